// One matrix S [K, V] per head that tokens write and read, token by token in float32 with S in the processor's cache, and
// its gradient. `gated_delta` has the delta rule; `gla` writes the value itself.
//
//     S = e^g S,  x = v - S^T k (delta rule) or v,  S += beta k x^T,  o = scale S^T q + skip v
#pragma once

#include <algorithm>

#include "native.h"

// q [tokens, query_heads, K], k [tokens, key_heads, K], v [tokens, value_heads, V], log_decay [tokens, heads, decays] with
// decays = 1 or K, beta [tokens, heads], skip [heads], o [tokens, heads, V], all contiguous; beta and skip may be null for 1
// and 0. Sequence n has the tokens starts[n] .. starts[n + 1] - 1 and the state [heads, K, V] at state + page * stride, where
// page is pages[n], or n without pages. Gradients have the shapes of their tensors, but those of q, k and v have all heads,
// and dskip is [sequences, heads]. _native_memory.py has the same fields.
struct Memory {
    const float *q, *k, *v, *log_decay, *beta, *skip;
    float* state;
    const int64_t *pages, *starts;
    float* o;
    const float *dout, *dfinal;
    float *dq, *dk, *dv, *dlog_decay, *dbeta, *dskip, *dstate;
    int64_t stride, heads, query_heads, key_heads, value_heads, K, V, decays;
    float scale;
};

namespace {

// What a token of one head reads, and vectors that are computed from it.
struct Token {
    const Memory& m;
    const float *query = nullptr, *key = nullptr, *value = nullptr;
    float strength = 1, skip = 0;
    int64_t gate = 0;  // the place of (token, head)
    Floats decay, read, by, written;

    explicit Token(const Memory& m) : m(m), decay(m.K), read(m.K), by(m.K), written(m.V) {}

    void at(int64_t t, int64_t head) {
        gate = t * m.heads + head;
        query = m.q + (t * m.query_heads + head / (m.heads / m.query_heads)) * m.K;
        key = m.k + (t * m.key_heads + head / (m.heads / m.key_heads)) * m.K;
        value = m.v + (t * m.value_heads + head / (m.heads / m.value_heads)) * m.V;
        strength = m.beta ? m.beta[gate] : 1.0f;
        skip = m.skip ? m.skip[head] : 0.0f;
        const float* g = m.log_decay + gate * m.decays;
        if (m.decays == 1)
            std::fill(decay.begin(), decay.end(), exponential(g[0]));
        else
            for (int j = 0; j < m.K; ++j) decay[j] = exponential(g[j]);
        for (int j = 0; j < m.K; ++j) read[j] = m.scale * query[j];
    }
};

// The state after a token from that before it, which may be the same memory; x, and o if there is memory for it.
template <bool DELTA>
void advance(Token& token, const float* S, float* next, float* x, float* o) {
    const int K = token.m.K, V = token.m.V;
    std::copy_n(token.value, V, x);
    if (DELTA) {
        for (int j = 0; j < K; ++j) token.by[j] = -token.decay[j] * token.key[j];
        pull(x, S, token.by.data(), K, V);
    }
    for (int i = 0; i < V; ++i) token.written[i] = token.strength * x[i];
    const float *decay = token.decay.data(), *read = token.read.data(), *key = token.key, *written = token.written.data();
    for (int i = 0; o && i < V; ++i) o[i] = token.skip * token.value[i];
    over_rows(K, [&](int first, auto rows) __attribute__((always_inline)) {
        over_columns(V, [&](int i, auto kind) __attribute__((always_inline)) {
            const auto u = get(written + i, kind);
            decltype(get(written + i, kind)) sum = {};
            for (int n = 0; n < rows; ++n) {
                const int j = first + n;
                const auto s = decay[j] * get(S + j * V + i, kind) + key[j] * u;
                put(next + j * V + i, s);
                sum += read[j] * s;
            }
            if (o) put(o + i, get(o + i, kind) + sum);
        });
    });
}

// dS = the gradient of the state before a token, from that of the state after it; and the gradients of the token. S is the
// state before it, x what `advance` found.
template <bool DELTA>
void go_back(Token& token, const float* S, const float* x, float* dS, Floats& dwritten, Floats& dx) {
    const Memory& m = token.m;
    const int K = m.K, V = m.V;
    const float *above = m.dout + token.gate * V, *key = token.key, *decay = token.decay.data(), *read = token.read.data();
    float *dq = m.dq + token.gate * K, *dk = m.dk + token.gate * K, *dg = m.dlog_decay + token.gate * m.decays;
    const float strength = token.strength, skip = token.skip;
    float *du = dwritten.data(), *error = dx.data(), *written = token.written.data(), *dv = m.dv + token.gate * V;
    float both = 0, through = 0, dbeta = 0;
    for (int j = 0; j < K; ++j) both += read[j] * key[j];
    for (int i = 0; i < V; ++i) du[i] = both * above[i];
    pull(du, dS, key, K, V);
    for (int i = 0; i < V; ++i) dbeta += du[i] * x[i], through += strength * x[i] * above[i];
    for (int i = 0; i < V; ++i) written[i] = strength * x[i], error[i] = strength * du[i];
    for (int i = 0; i < V; ++i) dv[i] = error[i] + skip * above[i];
    if (m.dbeta) m.dbeta[token.gate] = dbeta;
    if (m.decays == 1) *dg = 0;
    over_rows(K, [&](int first, auto rows) __attribute__((always_inline)) {
        Sum keys[ROWS], queries[ROWS], decays[ROWS];
        over_columns(V, [&](int i, auto kind) __attribute__((always_inline)) {
            const auto out = get(above + i, kind), u = get(written + i, kind), e = get(error + i, kind);
            for (int n = 0; n < rows; ++n) {
                const int j = first + n;
                const auto s = decay[j] * get(S + j * V + i, kind);
                auto d = get(dS + j * V + i, kind) + read[j] * out;
                queries[n] += s * out;
                keys[n] += d * u;
                if (DELTA) keys[n] += -s * e, d -= key[j] * e;
                decays[n] += d * s;
                put(dS + j * V + i, decay[j] * d);
            }
        });
        for (int n = 0; n < rows; ++n) {
            const int j = first + n;
            dk[j] = keys[n].total();
            dq[j] = m.scale * (queries[n].total() + key[j] * through);
            dg[m.decays == 1 ? 0 : j] = decays[n].total() + (m.decays == 1 ? *dg : 0);
        }
    });
}

// Advance the states over the tokens; row r = n heads + head, rows first .. last - 1 are computed.
template <bool DELTA>
void memory_tokens(const Memory& m, int64_t first, int64_t last) {
    Token token(m);
    Floats x(m.V);
    for (int64_t row = first; row < last; ++row) {
        const int64_t n = row / m.heads, head = row % m.heads;
        float* S = page(m.state, m.pages, m.stride, n) + head * m.K * m.V;
        for (int64_t t = m.starts[n]; t < m.starts[n + 1]; ++t) {
            token.at(t, head);
            advance<DELTA>(token, S, S, x.data(), m.o + token.gate * m.V);
        }
    }
}

// The gradients, for states without pages. One walk keeps a state of every window; the walk back repeats the states of a
// window.
template <bool DELTA>
void memory_gradients(const Memory& m, int64_t first, int64_t last) {
    const int64_t size = m.K * m.V;
    Token token(m);
    Floats x(m.V), dwritten(m.V), dx(m.V), S(size), kept, states, errors;
    for (int64_t row = first; row < last; ++row) {
        const int64_t n = row / m.heads, head = row % m.heads, begin = m.starts[n], tokens = m.starts[n + 1] - begin;
        const int64_t window = std::max<int64_t>(16, std::sqrt(double(tokens))), windows = (tokens + window - 1) / window;
        kept.resize(windows * size), states.resize((window + 1) * size), errors.resize(window * m.V);
        std::copy_n(m.state + row * size, size, S.data());
        for (int64_t t = 0; t < tokens; ++t) {
            if (t % window == 0) std::copy(S.begin(), S.end(), &kept[t / window * size]);
            token.at(begin + t, head);
            advance<DELTA>(token, S.data(), S.data(), x.data(), nullptr);
        }
        float *dS = m.dstate + row * size, dskip = 0;
        std::copy_n(m.dfinal + row * size, size, dS);
        for (int64_t w = windows - 1; w >= 0; --w) {
            const int64_t from = w * window, count = std::min(window, tokens - from);
            std::copy_n(&kept[w * size], size, states.data());
            for (int64_t t = 0; t < count; ++t) {
                token.at(begin + from + t, head);
                advance<DELTA>(token, &states[t * size], &states[(t + 1) * size], &errors[t * m.V], nullptr);
            }
            for (int64_t t = count - 1; t >= 0; --t) {
                token.at(begin + from + t, head);
                go_back<DELTA>(token, &states[t * size], &errors[t * m.V], dS, dwritten, dx);
                for (int64_t i = 0; m.dskip && i < m.V; ++i) dskip += m.dout[token.gate * m.V + i] * token.value[i];
            }
        }
        if (m.dskip) m.dskip[row] = dskip;
    }
}

}  // namespace
