// The functions of this folder on a CPU, without gradients: each reads and writes a row once and rounds once.

#include "../native.h"

namespace {

inline float cut(float x, float limit) { return x < -limit ? -limit : x > limit ? limit : x; }

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

// y, out and, if it is not null, gate [rows, D]; weight [groups, D], of which row r takes r % groups. NORM of native_path.py has
// the same fields.
struct Norm {
    const void *y, *gate, *weight;
    void* out;
    int64_t D, groups, activation, norm_first, in_bf16;
    float eps, limit, gate_limit;
};

template <class T>
void norm(const Norm& n, int64_t first, int64_t last) {
    const int64_t D = n.D;
    std::vector<float> values(D), gates(D, 1.0f);
    const T *y = as<T>(n.y) + first * D, *gate = n.gate ? as<T>(n.gate) + first * D : nullptr;
    T* out = static_cast<T*>(n.out) + first * D;
    for (int64_t row = first; row < last; ++row, y += D, out += D) {
        const T* w = as<T>(n.weight) + row % n.groups * D;
        if (gate) {
            for (int64_t i = 0; i < D; ++i) gates[i] = activate(cut(load(gate[i]), n.gate_limit), n.activation);
            gate += D;
        }
        float square = 0;
        for (int64_t i = 0; i < D; ++i) {
            values[i] = cut(load(y[i]), n.limit) * (n.norm_first ? 1.0f : gates[i]);
            square += values[i] * values[i];
        }
        const float scale = 1 / std::sqrt(square / D + n.eps);
        for (int64_t i = 0; i < D; ++i)
            store(out[i], values[i] * scale * load(w[i]) * (n.norm_first ? gates[i] : 1.0f));
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
            const float size = softplus(cut(x[at + h], limit) + bias[h]);
            dt[at + h] = size < smallest ? smallest : size > largest ? largest : size;
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

EXPORT void gated_norm(const Norm* n, int64_t first, int64_t last) {
    n->in_bf16 ? norm<bf16>(*n, first, last) : norm<float>(*n, first, last);
}
