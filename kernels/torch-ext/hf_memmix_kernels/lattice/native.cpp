// Lattice on a CPU, token by token with the state of a head in the processor's cache: forward with the decode step, and the
// exact adjoint. For slots of unit norm (project) without l1; a forget gate is folded into gamma before (op.py).
//
//     h = S k - v (dec), v (enc), -v (sim);  p = S^T h;  c = k, in enc p - k
//     s_i = (1 - alpha_i p_i) s_i + alpha_i h, alpha = -gamma c, then divided by its norm;  y = S q
//
// S is [d, m] as in the state: slots are columns, so that loops over slots run over contiguous memory.

#include <algorithm>

#include "../native.h"

namespace {

enum Variant { DEC, ENC, SIM };  // native_path.VARIANTS
constexpr int64_t WINDOW = 64;   // tokens between two states that forward keeps: sizes.CHECKPOINT

// One token's values, which the adjoint reads again.
struct Write {
    std::vector<float> h, p, c, alpha, inverse;
    Write(int d, int m) : h(d), p(m), c(m), alpha(m), inverse(m) {}
};

// [n, k] -> [k, n]
void transpose(const float* from, float* to, int64_t n, int64_t k) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < k; ++j) to[j * n + i] = from[i * k + j];
}

// S after the write, in place or into `to`.
void write(const float* S, float* to, const float* k, const float* v, float gamma, int variant, int d, int m, Write& w) {
    float *h = w.h.data(), *p = w.p.data(), *alpha = w.alpha.data(), *inverse = w.inverse.data();
    std::fill_n(p, m, 0.0f);
    for (int a = 0; a < d; ++a) {
        const float* row = S + a * m;
        float read = 0;
        if (variant == DEC)
            for (int i = 0; i < m; ++i) read += row[i] * k[i];
        h[a] = variant == ENC ? v[a] : read - v[a];
        for (int i = 0; i < m; ++i) p[i] += h[a] * row[i];
    }
    for (int i = 0; i < m; ++i) {
        w.c[i] = variant == ENC ? p[i] - k[i] : k[i];
        alpha[i] = -gamma * w.c[i];
        inverse[i] = 0;
    }
    for (int a = 0; a < d; ++a)
        for (int i = 0; i < m; ++i) {
            const float now = (1 - alpha[i] * p[i]) * S[a * m + i] + alpha[i] * h[a];
            to[a * m + i] = now;
            inverse[i] += now * now;
        }
    for (int i = 0; i < m; ++i) inverse[i] = 1 / std::sqrt(inverse[i]);
    for (int a = 0; a < d; ++a)
        for (int i = 0; i < m; ++i) to[a * m + i] *= inverse[i];
}

}  // namespace

// Advance S over the tokens of some heads of some sequences, and read it.
//
// q, k [tokens, heads, m], v, y [tokens, heads, d], gamma [tokens, heads], all contiguous. Sequence n has the tokens
// starts[n] .. starts[n + 1] - 1 and the state [heads, d, m] at state + page * stride, where page is pages[n], or n without
// pages. Row r = n heads + head; rows first .. last - 1 of `rows` are computed. `kept` [windows, rows, m, d] gets the states
// before every 64th token unless it is null.
EXPORT void lattice_tokens(const float* q, const float* k, const float* v, const float* gamma, float* state,
                           const int64_t* pages, int64_t stride, float* y, float* kept, const int64_t* starts,
                           int64_t heads, int64_t d, int64_t m, int64_t variant, int64_t rows, int64_t first,
                           int64_t last) {
    Write w(d, m);
    for (int64_t row = first; row < last; ++row) {
        const int64_t n = row / heads, head = row % heads;
        float* S = page(state, pages, stride, n) + head * d * m;
        for (int64_t t = starts[n]; t < starts[n + 1]; ++t) {
            const int64_t at = t * heads + head, since = t - starts[n];
            if (kept && since % WINDOW == 0) transpose(S, kept + (since / WINDOW * rows + row) * d * m, d, m);
            write(S, S, k + at * m, v + at * d, gamma[at], variant, d, m, w);
            for (int64_t a = 0; a < d; ++a) {
                float read = 0;
                for (int64_t i = 0; i < m; ++i) read += S[a * m + i] * q[at * m + i];
                y[at * d + a] = read;
            }
        }
    }
}

// The adjoint of `lattice_tokens`. Gradients have the shapes of their tensors. dstate [sequences, heads, d, m] holds the
// gradient of the final states and gets that of the initial ones.
EXPORT void lattice_adjoint(const float* dy, float* dstate, const float* q, const float* k, const float* v,
                            const float* gamma, const float* kept, float* dq, float* dk, float* dv, float* dgamma,
                            const int64_t* starts, int64_t heads, int64_t d, int64_t m, int64_t variant, int64_t rows,
                            int64_t first, int64_t last) {
    const int64_t size = d * m;
    std::vector<float> states((WINDOW + 1) * size), dh(d), dp(m), dkeep(m), dalpha(m), along(m);
    std::vector<Write> writes(WINDOW, Write(d, m));
    for (int64_t row = first; row < last; ++row) {
        const int64_t n = row / heads, head = row % heads, tokens = starts[n + 1] - starts[n];
        float* G = dstate + row * size;  // gradient of the state after token t, then of the one before it
        for (int64_t window = (tokens + WINDOW - 1) / WINDOW - 1; window >= 0; --window) {
            const int64_t begin = window * WINDOW, end = std::min(begin + WINDOW, tokens);
            transpose(kept + (window * rows + row) * size, states.data(), m, d);
            for (int64_t t = begin; t < end; ++t) {
                const int64_t at = (starts[n] + t) * heads + head;
                float* S = states.data() + (t - begin) * size;
                write(S, S + size, k + at * m, v + at * d, gamma[at], variant, d, m, writes[t - begin]);
            }
            for (int64_t t = end - 1; t >= begin; --t) {
                const int64_t at = (starts[n] + t) * heads + head;
                const float *S = states.data() + (t - begin) * size, *next = S + size;
                const float *query = q + at * m, *key = k + at * m, *dout = dy + at * d;
                const Write& w = writes[t - begin];
                const float *h = w.h.data(), *p = w.p.data(), *alpha = w.alpha.data();

                // the read-out, then the projection: what of G is along the new slots falls away
                float* read = dq + at * m;
                std::fill_n(read, m, 0.0f);
                std::fill(along.begin(), along.end(), 0.0f);
                for (int64_t a = 0; a < d; ++a)
                    for (int64_t i = 0; i < m; ++i) {
                        G[a * m + i] += query[i] * dout[a];
                        read[i] += next[a * m + i] * dout[a];
                        along[i] += next[a * m + i] * G[a * m + i];
                    }
                // new = keep s + alpha h
                std::fill(dkeep.begin(), dkeep.end(), 0.0f);
                std::fill(dalpha.begin(), dalpha.end(), 0.0f);
                for (int64_t a = 0; a < d; ++a) {
                    float sum = 0;
                    for (int64_t i = 0; i < m; ++i) {
                        const float g = (G[a * m + i] - next[a * m + i] * along[i]) * w.inverse[i];
                        G[a * m + i] = g;
                        dkeep[i] += S[a * m + i] * g;
                        dalpha[i] += h[a] * g;
                        sum += alpha[i] * g;
                    }
                    dh[a] = sum;
                }
                // keep = 1 - alpha p, alpha = -gamma c
                float step = 0, *dkey = dk + at * m;
                for (int64_t i = 0; i < m; ++i) {
                    const float da = dalpha[i] - p[i] * dkeep[i], dc = -gamma[at] * da;
                    dp[i] = -alpha[i] * dkeep[i] + (variant == ENC ? dc : 0.0f);
                    dkey[i] = variant == ENC ? -dc : dc;
                    step -= w.c[i] * da;
                }
                dgamma[at] = step;
                // p = S^T h, and in dec h = S k - v
                for (int64_t a = 0; a < d; ++a) {
                    float sum = dh[a];
                    for (int64_t i = 0; i < m; ++i) sum += dp[i] * S[a * m + i];
                    dv[at * d + a] = variant == ENC ? sum : -sum;
                    const float z = variant == DEC ? sum : 0.0f;
                    for (int64_t i = 0; i < m; ++i) {
                        G[a * m + i] = (1 - alpha[i] * p[i]) * G[a * m + i] + dp[i] * h[a] + key[i] * z;
                        dkey[i] += S[a * m + i] * z;
                    }
                }
            }
        }
    }
}
