// The loss of `CoffeeCore` on the induction head task and its gradients, for a CPU: one function instead of some sixty
// calls of torch for a step. `native_step.py` compiles it and says what its arguments are. Tokens and targets are not
// checked: they must be symbols.
#include <algorithm>

#include "native.h"

constexpr int V = 32;        // sequences that are computed together
constexpr int SYMBOLS = 16;  // at most
using Row = float[V];        // one number for each of them

// A statement for every sequence v of a row, in a loop that compilers vectorise: no row overlaps another one.
#define EACH _Pragma("GCC ivdep") for (int v = 0; v < V; ++v)

static float sum(const Row& x) {
    float found = 0;
    EACH found += x[v];
    return found;
}

struct Block {
    int tokens, last, symbols, dim, states;
    std::vector<int32_t> ids;                        // [tokens, V]
    std::vector<float> u, x, phi, y, dy, du, table;  // x before every token and after the last one

    Row& row(std::vector<float>& of, int64_t i) { return reinterpret_cast<Row&>(of[i * V]); }

    void inputs(const float* embeddings, int d) {
        for (int t = 0; t < tokens; ++t) {
            const int32_t* id = &ids[t * V];
            Row found = {};
            for (int m = 0; m < symbols; ++m) {
                const float e = embeddings[m * dim + d];
                EACH found[v] = id[v] == m ? e : found[v];
            }
            Row& to = row(u, t);
            EACH to[v] = found[v];
        }
    }

    // The states of state j of feature d before and after every token, and the gates.
    void scan(int lane, float lam, float w) {
        Row now = {};
        for (int t = 0; t < tokens; ++t) {
            Row &kept = row(x, lane * (tokens + 1) + t), &gate = row(phi, lane * tokens + t), &in = row(u, t);
            EACH {
                kept[v] = now[v];
                gate[v] = sigmoid(w * now[v]);
                now[v] += gate[v] * (lam * now[v] + in[v]);
            }
        }
        Row& end = row(x, lane * (tokens + 1) + tokens);
        EACH end[v] = now[v];
    }

    // The sum of the losses of prediction k, with dy and the gradient of the table added up.
    float head(const float* embeddings, int k, const int64_t* targets, int64_t stride, float scale) {
        Row distance[SYMBOLS], others[SYMBOLS], logit[SYMBOLS], grad[SYMBOLS], loss, highest, total;
        for (int m = 0; m < symbols; ++m) {
            Row square = {};
            for (int d = 0; d < dim; ++d) {
                const Row& out = row(y, k * dim + d);
                const float e = embeddings[m * dim + d];
                EACH square[v] += (out[v] - e) * (out[v] - e);
            }
            EACH distance[m][v] = std::sqrt(square[v]);
        }
        // others: log of the sum of e^-distance over the other symbols
        for (int m = 0; m < symbols; ++m) {
            EACH highest[v] = -INFINITY, total[v] = 0;
            for (int i = 0; i < symbols; ++i)
                if (i != m) EACH highest[v] = std::max(highest[v], -distance[i][v]);
            for (int i = 0; i < symbols; ++i)
                if (i != m) EACH total[v] += exponential(-distance[i][v] - highest[v]);
            EACH others[m][v] = highest[v] + std::log(total[v]);
            EACH logit[m][v] = -distance[m][v] - others[m][v];
        }
        EACH highest[v] = -INFINITY, total[v] = 0;
        for (int m = 0; m < symbols; ++m) EACH highest[v] = std::max(highest[v], logit[m][v]);
        for (int m = 0; m < symbols; ++m) EACH total[v] += exponential(logit[m][v] - highest[v]);
        EACH loss[v] = highest[v] + std::log(total[v]) - logit[targets[v * stride]][v];
        // grad: of the logits, scaled
        for (int m = 0; m < symbols; ++m)
            EACH grad[m][v] = scale * (exponential(logit[m][v] - highest[v]) / total[v] - (targets[v * stride] == m));
        for (int m = 0; m < symbols; ++m) {
            // of the score, which is minus the distance: it is in its own logit and in the others of all symbols
            Row force;
            EACH force[v] = -grad[m][v];
            for (int i = 0; i < symbols; ++i)
                if (i != m) EACH force[v] += grad[i][v] * exponential(-distance[m][v] - others[i][v]);
            EACH force[v] = distance[m][v] > 0 ? force[v] / distance[m][v] : 0;
            for (int d = 0; d < dim; ++d) {
                const Row& out = row(y, k * dim + d);
                Row &to = row(dy, k * dim + d), &of_table = row(table, m * dim + d);
                const float e = embeddings[m * dim + d];
                EACH {
                    const float step = force[v] * (out[v] - e);
                    to[v] += step;
                    of_table[v] -= step;
                }
            }
        }
        return sum(loss);
    }

    // Adds the gradients of lam, w and C of one lane to three numbers, and of u to du.
    void reverse(int lane, int d, float lam, float w, float C, float* dlam, float* dw, float* dC) {
        Row carry = {}, of_lam = {}, of_w = {}, of_C = {};
        for (int t = tokens - 1; t >= 0; --t) {
            const Row &before = row(x, lane * (tokens + 1) + t), &after = row(x, lane * (tokens + 1) + t + 1);
            const Row &gate = row(phi, lane * tokens + t), &in = row(u, t);
            Row& to = row(du, t);
            const int k = t - (tokens - last);
            if (k >= 0) {
                const Row& from = row(dy, k * dim + d);
                EACH {
                    carry[v] += C * from[v];
                    of_C[v] += from[v] * after[v];
                }
            }
            EACH {
                const float passed = carry[v] * gate[v];
                const float inner = passed * (1 - gate[v]) * (lam * before[v] + in[v]);
                to[v] += passed;
                of_lam[v] += passed * before[v];
                of_w[v] += inner * before[v];
                carry[v] += lam * passed + w * inner;
            }
        }
        *dlam += sum(of_lam);
        *dw += sum(of_w);
        *dC += sum(of_C);
    }
};

EXPORT void induction_gradients(
    const float* embeddings, const float* lam, const float* w, const float* C, const int64_t* ids,
    const int64_t* targets, float* loss, float* dembeddings, float* dlam, float* dw, float* dC, int64_t copies,
    int64_t batch, int64_t tokens, int64_t last, int64_t symbols, int64_t dim, int64_t states) {
    const int64_t lanes = dim * states;
    const float scale = 1.0f / float(batch * last);
    auto numbers = [](int64_t rows) { return std::vector<float>(rows * V); };
    Block b{int(tokens), int(last), int(symbols), int(dim), int(states), std::vector<int32_t>(tokens * V),
            numbers(tokens), numbers(lanes * (tokens + 1)), numbers(lanes * tokens), numbers(last * dim),
            numbers(last * dim), numbers(tokens), numbers(symbols * dim)};
    for (int64_t s = 0; s < copies; ++s) {
        const float* table = embeddings + s * symbols * dim;
        double total = 0;
        std::fill(b.table.begin(), b.table.end(), 0.0f);
        for (int64_t first = 0; first < batch; first += V) {
            const int64_t* from = ids + (s * batch + first) * tokens;
            for (int64_t t = 0; t < tokens; ++t) EACH b.ids[t * V + v] = int32_t(from[v * tokens + t]);
            std::fill(b.y.begin(), b.y.end(), 0.0f);
            std::fill(b.dy.begin(), b.dy.end(), 0.0f);
            for (int64_t lane = 0; lane < lanes; ++lane) {
                const int64_t d = lane / states, p = s * lanes + lane;
                if (lane % states == 0) b.inputs(table, d);
                b.scan(lane, lam[p], w[p]);
                for (int64_t k = 0; k < last; ++k) {
                    const Row& end = b.row(b.x, lane * (tokens + 1) + tokens - last + k + 1);
                    Row& y = b.row(b.y, k * dim + d);
                    EACH y[v] += C[p] * end[v];
                }
            }
            for (int64_t k = 0; k < last; ++k)
                total += b.head(table, k, targets + (s * batch + first) * last + k, last, scale);
            for (int64_t d = 0; d < dim; ++d) {
                b.inputs(table, d);
                std::fill(b.du.begin(), b.du.end(), 0.0f);
                for (int64_t lane = d * states; lane < (d + 1) * states; ++lane) {
                    const int64_t p = s * lanes + lane;
                    b.reverse(lane, d, lam[p], w[p], C[p], dlam + p, dw + p, dC + p);
                }
                for (int m = 0; m < symbols; ++m) {
                    Row found = {};
                    for (int64_t t = 0; t < tokens; ++t) {
                        const int32_t* id = &b.ids[t * V];
                        const Row& du = b.row(b.du, t);
                        EACH found[v] += float(id[v] == m) * du[v];  // a choice would not be vectorised
                    }
                    Row& to = b.row(b.table, m * dim + d);
                    EACH to[v] += found[v];
                }
            }
        }
        loss[s] = float(total * scale);
        for (int64_t i = 0; i < symbols * dim; ++i) dembeddings[s * symbols * dim + i] = sum(b.row(b.table, i));
    }
}
