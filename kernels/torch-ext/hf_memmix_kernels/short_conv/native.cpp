// One token of the short convolution on a CPU: z = bias + sum_j w_j window_j, y = silu(z) or z, and the window moves on.

#include "../native.h"

namespace {

template <class T>
void step(const T* x, const T* weight, const T* bias, T* state, const int64_t* pages, int64_t stride, T* y, int64_t batch,
          int64_t channels, int64_t taps, bool activate, float limit) {
    std::vector<float> sums(channels);
    for (int64_t b = 0; b < batch; ++b, x += channels, y += channels) {
        T* past = page(state, pages, stride, b);
        for (int64_t c = 0; c < channels; ++c, past += taps - 1) {
            const float now = load(x[c]), cut = now < -limit ? -limit : now > limit ? limit : now;
            const T* w = weight + c * taps;
            float z = bias ? load(bias[c]) : 0.0f;
            for (int64_t j = 0; j < taps - 1; ++j) z += load(w[j]) * load(past[j]);
            z += load(w[taps - 1]) * cut;
            for (int64_t j = 0; j < taps - 2; ++j) past[j] = past[j + 1];
            store(past[taps - 2], cut);
            sums[c] = z;
        }
        // a loop of its own, which the compiler vectorises
        for (int64_t c = 0; c < channels; ++c) store(y[c], activate ? silu(sums[c]) : sums[c]);
    }
}

// `count` convolutions without bias; the heads of those with a head size in D are rotated and get norm 1.
template <class T>
void heads(T* const* x, T* const* weight, T* const* state, T* const* y, const int64_t* channels, const int64_t* strides,
           const int64_t* D, int64_t count, const T* cos, const T* sin, int64_t pairs, const int64_t* pages, int64_t batch,
           int64_t taps, bool activate, float eps) {
    for (int64_t part = 0; part < count; ++part) {
        step<T>(x[part], weight[part], nullptr, state[part], pages, strides[part], y[part], batch, channels[part], taps,
                activate, INFINITY);
        if (!D[part]) continue;
        std::vector<float> head(D[part]);
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t c = 0; c < channels[part]; c += D[part]) {
                T* to = y[part] + b * channels[part] + c;
                for (int64_t i = 0; i < D[part]; ++i) head[i] = load(to[i]);
                unit_head(head.data(), cos + b * pairs, sin + b * pairs, to, D[part], pairs, eps);
            }
    }
}

}  // namespace

// x, y [batch, channels], weight [channels, taps], bias [channels] or null. Row b has the state [channels, taps - 1] at
// state + page * stride, where page is pages[b], or b without pages.
EXPORT void short_conv_step(const void* x, const void* weight, const void* bias, void* state, const int64_t* pages,
                            int64_t stride, void* y, int64_t batch, int64_t channels, int64_t taps, int64_t activate,
                            float limit, int64_t in_bf16) {
    if (in_bf16)
        step<bf16>(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<const bf16*>(bias),
                   static_cast<bf16*>(state), pages, stride, static_cast<bf16*>(y), batch, channels, taps, activate, limit);
    else
        step<float>(static_cast<const float*>(x), static_cast<const float*>(weight), static_cast<const float*>(bias),
                    static_cast<float*>(state), pages, stride, static_cast<float*>(y), batch, channels, taps, activate,
                    limit);
}

// One token of several convolutions, and `unit_heads` (rowwise) of their outputs. Arrays have one entry per convolution;
// D is 0 where the output stays as it is. cos and sin [batch, pairs].
EXPORT void short_conv_heads(void* const* x, void* const* weight, void* const* state, void* const* y,
                             const int64_t* channels, const int64_t* strides, const int64_t* D, int64_t count,
                             const void* cos, const void* sin, int64_t pairs, const int64_t* pages, int64_t batch,
                             int64_t taps, int64_t activate, float eps, int64_t in_bf16) {
    if (in_bf16)
        heads<bf16>(reinterpret_cast<bf16* const*>(x), reinterpret_cast<bf16* const*>(weight),
                    reinterpret_cast<bf16* const*>(state), reinterpret_cast<bf16* const*>(y), channels, strides, D, count,
                    static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), pairs, pages, batch, taps, activate, eps);
    else
        heads<float>(reinterpret_cast<float* const*>(x), reinterpret_cast<float* const*>(weight),
                     reinterpret_cast<float* const*>(state), reinterpret_cast<float* const*>(y), channels, strides, D,
                     count, static_cast<const float*>(cos), static_cast<const float*>(sin), pairs, pages, batch, taps,
                     activate, eps);
}
