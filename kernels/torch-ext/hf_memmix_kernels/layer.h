// The layers around the memory of a mixer, in the decode step of one sequence on a CPU:
//
//     q, k, v = W x;  norms of q and k;  short convolutions;  rotation of q and k, and norm 1 of their heads
//     out = W_o (norm per head(y) * activation(W_g x))
//
// All but the projections may be absent. The native.cpp of an op computes y in between.
#pragma once

#include "native.h"

// Weights as in nn.Linear of q, k, v and of the output, and their biases; norms of q, k and of the output's heads; taps
// [rows, tap_count] and states [rows, tap_count - 1] of the convolutions; angles [pairs]; W_g [rows of y, hidden], or
// [rows of y, rank] after W_h [rank, hidden]. Null is absent, as is a `unit_eps` of 0. `rows` are those of q, k, v and y,
// and `normed` is how many of them a norm of q and k spans; heads of q and k have K numbers, those of v and y D.
// _FIELDS of _layer_step.py has the same fields.
struct Layer {
    const void *x, *weights[4], *biases[4], *norms[3], *taps[3], *past[3], *cos, *sin, *gate[2], *gate_bias;
    void* out;
    int64_t hidden, width, K, D, pairs, rank, tap_count, silu, activation, rows[4], normed[2];
    float eps, unit_eps;
};

namespace {

// at[i] *= weight[i] / sqrt(mean square of at + eps)
template <class T>
void rms_norm(float* at, const T* weight, int64_t D, float eps) {
    float square = 0;
    for (int64_t i = 0; i < D; ++i) square += at[i] * at[i];
    const float scale = 1 / std::sqrt(square / D + eps);
    for (int64_t i = 0; i < D; ++i) at[i] *= scale * load(weight[i]);
}

// `finish(row, ...)` for all rows of up x, or of up (down x) where there is a `down` [rank, hidden]
template <class T, class Finish>
void products_in_turn(const void* const* matrices, const void* bias, const T* x, int64_t rows, int64_t hidden,
                      int64_t rank, Finish finish) {
    if (!matrices[0]) return products(as<T>(matrices[1]), as<T>(bias), x, rows, hidden, finish);
    Floats between(rank);
    products<T>(as<T>(matrices[0]), nullptr, x, rank, hidden, [&](int64_t row, float y) { between[row] = y; });
    products(as<T>(matrices[1]), as<T>(bias), between.data(), rows, rank, finish);
}

// q, k or v of the token
template <class T, class Out>
void project(const Layer& l, int part, Out* to) {
    const int64_t rows = l.rows[part];
    Floats z(rows);
    products(as<T>(l.weights[part]), as<T>(l.biases[part]), as<T>(l.x), rows, l.hidden,
             [&](int64_t row, float y) { z[row] = y; });
    for (int64_t i = 0; part < 2 && l.norms[part] && i < rows; i += l.normed[part])
        rms_norm(&z[i], as<T>(l.norms[part]), l.normed[part], l.eps);
    if (const T* taps = as<T>(l.taps[part])) {
        convolve(taps, const_cast<T*>(as<T>(l.past[part])), z.data(), rows, l.tap_count);
        for (int64_t i = 0; l.silu && i < rows; ++i) z[i] = silu(z[i]);
    }
    for (int64_t i = 0; part < 2 && i < rows; i += l.K) {
        rotate_head(&z[i], as<T>(l.cos), as<T>(l.sin), l.pairs);
        if (l.unit_eps) unit(&z[i], &z[i], l.K, l.unit_eps);
    }
    for (int64_t i = 0; i < rows; ++i) store(to[i], z[i]);
}

// The layer's output from y.
template <class T, class Y>
void read_out(const Layer& l, const Y* y) {
    const int64_t rows = l.rows[3];
    Floats z(rows);
    for (int64_t i = 0; i < rows; ++i) z[i] = load(y[i]);
    for (int64_t i = 0; l.norms[2] && i < rows; i += l.D) rms_norm(&z[i], as<T>(l.norms[2]), l.D, l.eps);
    if (l.gate[1])
        products_in_turn(l.gate, l.gate_bias, as<T>(l.x), rows, l.hidden, l.rank,
                         [&](int64_t row, float g) { z[row] *= activate(g, l.activation); });
    products(as<T>(l.weights[3]), as<T>(l.biases[3]), z.data(), l.width, rows,
             [&](int64_t row, float found) { store(static_cast<T*>(l.out)[row], found); });
}

}  // namespace
