// The functions of this folder on a CPU, without gradients: each reads and writes a row once and rounds once.

#include "../native.h"

namespace {

// without `eps` only the rotation
template <class T>
void turned(const T* x, const T* cos, const T* sin, T* y, int64_t heads, int64_t D, int64_t pairs, const float* eps,
            int64_t first, int64_t last) {
    std::vector<float> head(D);
    x += first * heads * D, y += first * heads * D;
    for (int64_t row = first * heads; row < last * heads; ++row, x += D, y += D) {
        for (int64_t i = 0; i < D; ++i) head[i] = load(x[i]);
        const int64_t angle = row / heads * pairs;
        rotate_head(head.data(), cos + angle, sin + angle, pairs);
        if (eps)
            unit(head.data(), y, D, *eps);
        else
            for (int64_t i = 0; i < D; ++i) store(y[i], head[i]);
    }
}

template <class T>
void norm(const T* y, const T* gate, const T* weight, T* out, int64_t D, int64_t groups, float eps, int64_t activation,
          bool norm_first, float limit, float gate_limit, int64_t first, int64_t last) {
    std::vector<float> values(D), gates(D, 1.0f);
    y += first * D, out += first * D;
    if (gate) gate += first * D;
    for (int64_t row = first; row < last; ++row, y += D, out += D) {
        const T* w = weight + row % groups * D;
        if (gate) {
            for (int64_t i = 0; i < D; ++i) gates[i] = activate(cut(load(gate[i]), gate_limit), activation);
            gate += D;
        }
        float square = 0;
        for (int64_t i = 0; i < D; ++i) {
            values[i] = cut(load(y[i]), limit) * (norm_first ? 1.0f : gates[i]);
            square += values[i] * values[i];
        }
        const float scale = 1 / std::sqrt(square / D + eps);
        for (int64_t i = 0; i < D; ++i)
            store(out[i], values[i] * scale * load(w[i]) * (norm_first ? gates[i] : 1.0f));
    }
}

}  // namespace

// dt = softplus(x + bias) between `smallest` and `largest`, g = -e^A_log dt: rows first .. last - 1 of x, dt, g [rows, heads]
EXPORT void decay(const float* x, const float* bias, const float* A_log, float* dt, float* g, int64_t heads, float limit,
                  float smallest, float largest, int64_t first, int64_t last) {
    Floats rates(heads);
    for (int64_t h = 0; h < heads; ++h) rates[h] = -std::exp(A_log[h]);
    for (int64_t at = first * heads; at < last * heads; at += heads)
        for (int64_t h = 0; h < heads; ++h) {
            dt[at + h] = between(softplus(cut(x[at + h], limit) + bias[h]), smallest, largest);
            g[at + h] = rates[h] * dt[at + h];
        }
}

// y = R x, or R x / (|R x| + eps): rows first .. last - 1 of x, y [rows, heads, D], cos and sin [rows, pairs]
EXPORT void heads(const void* x, const void* cos, const void* sin, void* y, int64_t heads, int64_t D, int64_t pairs,
                  const float* eps, int64_t in_bf16, int64_t first, int64_t last) {
    const auto run = [&](auto kind) {
        using T = decltype(kind);
        turned(static_cast<const T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin), static_cast<T*>(y), heads,
               D, pairs, eps, first, last);
    };
    in_bf16 ? run(bf16()) : run(float());
}

// Rows first .. last - 1 of y, out and, if it is not null, gate [rows, D]; weight [groups, D], of which row r takes
// r % groups
EXPORT void gated_norm(const void* y, const void* gate, const void* weight, void* out, int64_t D, int64_t groups, float eps,
                       int64_t activation, int64_t norm_first, float limit, float gate_limit, int64_t in_bf16,
                       int64_t first, int64_t last) {
    if (in_bf16)
        norm<bf16>(static_cast<const bf16*>(y), static_cast<const bf16*>(gate), static_cast<const bf16*>(weight),
                   static_cast<bf16*>(out), D, groups, eps, activation, norm_first, limit, gate_limit, first, last);
    else
        norm<float>(static_cast<const float*>(y), static_cast<const float*>(gate), static_cast<const float*>(weight),
                    static_cast<float*>(out), D, groups, eps, activation, norm_first, limit, gate_limit, first, last);
}
