// Lattice on a CPU, token by token with the state of a head in the processor's cache: forward with the decode step, and the
// exact adjoint, and a layer's decode step. For slots of unit norm (project) without l1; a forget gate is folded into gamma
// before (op.py).
//
//     h = S k - v (dec), v (enc), -v (sim);  p = S^T h;  c = k, in enc p - k
//     s_i = (1 - alpha_i p_i) s_i + alpha_i h, alpha = -gamma c, then divided by its norm;  y = S q
//
// S is [d, m] as in the state: slots are columns, so that loops over slots run over contiguous memory.

#include <algorithm>

#include "../layer.h"

namespace {

enum Variant { DEC, ENC, SIM };  // native_path.VARIANTS
constexpr int64_t WINDOW = 64;   // tokens between two states that forward keeps: sizes.CHECKPOINT

// One token's values, which the adjoint reads again.
struct Write {
    Floats h, p, c, alpha, keep, inverse;
    Write(int d, int m) : h(d), p(m), c(m), alpha(m), keep(m), inverse(m) {}
};

// [n, k] -> [k, n]
void transpose(const float* from, float* to, int64_t n, int64_t k) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t j = 0; j < k; ++j) to[j * n + i] = from[i * k + j];
}

// S after the write, in place or into `to`, and y = S q unless y is null.
void write(const float* S, float* to, const float* k, const float* v, float gamma, const float* q, float* y, int variant,
           int d, int m, Write& w) {
    float *h = w.h.data(), *p = w.p.data(), *alpha = w.alpha.data(), *keep = w.keep.data(), *inverse = w.inverse.data();
    std::fill_n(p, m, 0.0f);
    over_rows(d, [&](int first, auto rows) {
        Sum reads[ROWS];
        if (variant == DEC)
            over_columns(m, [&](int i, auto kind) {
                for (int n = 0; n < rows; ++n) reads[n] += get(S + (first + n) * m + i, kind) * get(k + i, kind);
            });
        for (int n = 0; n < rows; ++n) h[first + n] = variant == ENC ? v[first + n] : reads[n].total() - v[first + n];
        over_columns(m, [&](int i, auto kind) {
            auto sum = get(p + i, kind);
            for (int n = 0; n < rows; ++n) sum += h[first + n] * get(S + (first + n) * m + i, kind);
            put(p + i, sum);
        });
    });
    for (int i = 0; i < m; ++i) {
        w.c[i] = variant == ENC ? p[i] - k[i] : k[i];
        alpha[i] = -gamma * w.c[i];
        keep[i] = 1 - alpha[i] * p[i];
        inverse[i] = 0;
    }
    over_rows(d, [&](int first, auto rows) {
        over_columns(m, [&](int i, auto kind) {
            auto square = get(inverse + i, kind);
            for (int n = 0; n < rows; ++n) {
                const int at = (first + n) * m + i;
                const auto now = get(keep + i, kind) * get(S + at, kind) + h[first + n] * get(alpha + i, kind);
                put(to + at, now);
                square += now * now;
            }
            put(inverse + i, square);
        });
    });
    for (int i = 0; i < m; ++i) inverse[i] = 1 / std::sqrt(inverse[i]);
    over_rows(d, [&](int first, auto rows) {
        Sum reads[ROWS];
        over_columns(m, [&](int i, auto kind) {
            for (int n = 0; n < rows; ++n) {
                float* at = to + (first + n) * m + i;
                const auto now = get(at, kind) * get(inverse + i, kind);
                put(at, now);
                if (y) reads[n] += now * get(q + i, kind);
            }
        });
        for (int n = 0; y && n < rows; ++n) y[first + n] = reads[n].total();
    });
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
            write(S, S, k + at * m, v + at * d, gamma[at], q + at * m, y + at * d, variant, d, m, w);
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
    Floats states((WINDOW + 1) * size), dh(d), dp(m), dkeep(m), dalpha(m), along(m);
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
                write(S, S + size, k + at * m, v + at * d, gamma[at], nullptr, nullptr, variant, d, m,
                      writes[t - begin]);
            }
            for (int64_t t = end - 1; t >= begin; --t) {
                const int64_t at = (starts[n] + t) * heads + head;
                const float *S = states.data() + (t - begin) * size, *next = S + size;
                const float *query = q + at * m, *key = k + at * m, *dout = dy + at * d;
                const Write& w = writes[t - begin];
                const float *h = w.h.data(), *p = w.p.data(), *alpha = w.alpha.data(), *keep = w.keep.data();

                // the read-out, then the projection: what of G is along the new slots falls away
                float* read = dq + at * m;
                std::fill_n(read, m, 0.0f);
                std::fill(along.begin(), along.end(), 0.0f);
                over_rows(d, [&](int first, auto rows) {
                    over_columns(m, [&](int i, auto kind) {
                        auto given = get(read + i, kind), inside = get(&along[i], kind);
                        for (int n = 0; n < rows; ++n) {
                            const int a = first + n;
                            const auto slot = get(next + a * m + i, kind);
                            const auto g = get(G + a * m + i, kind) + dout[a] * get(query + i, kind);
                            put(G + a * m + i, g);
                            given += dout[a] * slot;
                            inside += slot * g;
                        }
                        put(read + i, given);
                        put(&along[i], inside);
                    });
                });
                // new = keep s + alpha h
                std::fill(dkeep.begin(), dkeep.end(), 0.0f);
                std::fill(dalpha.begin(), dalpha.end(), 0.0f);
                over_rows(d, [&](int first, auto rows) {
                    Sum sums[ROWS];
                    over_columns(m, [&](int i, auto kind) {
                        auto of_keep = get(&dkeep[i], kind), of_alpha = get(&dalpha[i], kind);
                        for (int n = 0; n < rows; ++n) {
                            const int a = first + n, at = a * m + i;
                            const auto g = (get(G + at, kind) - get(next + at, kind) * get(&along[i], kind)) *
                                           get(&w.inverse[i], kind);
                            put(G + at, g);
                            of_keep += get(S + at, kind) * g;
                            of_alpha += h[a] * g;
                            sums[n] += get(alpha + i, kind) * g;
                        }
                        put(&dkeep[i], of_keep);
                        put(&dalpha[i], of_alpha);
                    });
                    for (int n = 0; n < rows; ++n) dh[first + n] = sums[n].total();
                });
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
                over_rows(d, [&](int first, auto rows) {
                    Sum sums[ROWS];
                    over_columns(m, [&](int i, auto kind) {
                        for (int n = 0; n < rows; ++n)
                            sums[n] += get(&dp[i], kind) * get(S + (first + n) * m + i, kind);
                    });
                    float z[ROWS];
                    for (int n = 0; n < rows; ++n) {
                        const float sum = dh[first + n] + sums[n].total();
                        dv[at * d + first + n] = variant == ENC ? sum : -sum;
                        z[n] = variant == DEC ? sum : 0.0f;
                    }
                    over_columns(m, [&](int i, auto kind) {
                        auto of_key = get(dkey + i, kind);
                        for (int n = 0; n < rows; ++n) {
                            float* g = G + (first + n) * m + i;
                            put(g, get(keep + i, kind) * get(g, kind) + h[first + n] * get(&dp[i], kind) +
                                       z[n] * get(key + i, kind));
                            of_key += z[n] * get(S + (first + n) * m + i, kind);
                        }
                        put(dkey + i, of_key);
                    });
                });
            }
        }
    }
}

namespace {

// What a layer's decode step reads beside `Layer`: weights [heads, hidden] and biases [heads] of gamma and of the forget
// gate, each of which may be null, and the state [heads, D, K]. FIELDS of native_path.py has the same fields.
struct Slots {
    const void *weights[2], *biases[2];
    float* state;
    int64_t kv_heads, variant, softplus, forgets;
    float largest, enc_step, strongest_decay, unit_eps;
};

// found [heads] = W x + bias
template <class T>
void logits(const void* weight, const void* bias, const Layer& l, Floats& found) {
    const auto keep = [&](int64_t row, float z) { found[row] = z; };
    if (weight) return products(as<T>(weight), as<T>(bias), as<T>(l.x), found.size(), l.hidden, keep);
    for (size_t row = 0; row < found.size(); ++row) keep(row, load(as<T>(bias)[row]));
}

template <class T>
void layer(const Layer& l, const Slots& s) {
    const int64_t heads = l.rows[0] / l.K, of_keys = heads * l.K / l.rows[1], of_values = heads / s.kv_heads;
    Floats q(l.rows[0]), k(l.rows[1]), v(l.rows[2]), y(l.rows[3]), gamma(heads), forget(heads);
    project<T>(l, 0, q.data());
    project<T>(l, 1, k.data());
    project<T>(l, 2, v.data());
    for (int64_t i = 0; s.variant == ENC && i < l.rows[2]; i += l.D) unit(&v[i], &v[i], l.D, s.unit_eps);
    logits<T>(s.weights[0], s.biases[0], l, gamma);
    if (s.forgets) logits<T>(s.weights[1], s.biases[1], l, forget);
    Write w(l.D, l.K);
    for (int64_t head = 0; head < heads; ++head) {
        const float decay = s.forgets ? softplus(-forget[head]) : 0.0f;  // - log mu
        float step = s.softplus ? softplus(gamma[head]) : s.largest * sigmoid(gamma[head]);
        if (s.variant == ENC) step = between(step, 0, s.enc_step * exponential(-decay));
        float* S = s.state + head * l.D * l.K;
        write(S, S, &k[head / of_keys * l.K], &v[head / of_values * l.D],
              step * exponential(between(decay, 0, s.strongest_decay)), &q[head * l.K], &y[head * l.D], s.variant, l.D, l.K, w);
    }
    read_out<T>(l, y.data());
}

}  // namespace

// One token of one sequence.
EXPORT void lattice_layer(const Layer* l, const Slots* s, int64_t in_bf16) {
    in_bf16 ? layer<bf16>(*l, *s) : layer<float>(*l, *s);
}
