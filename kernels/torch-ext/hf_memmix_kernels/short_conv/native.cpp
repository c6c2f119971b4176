// The short convolution on a CPU: z = bias + sum_j w_j window_j, y = silu(z) or z, and the window moves on. One token, or
// whole sequences and their gradient.

#include "../native.h"

namespace {

template <class T>
void step(const T* x, const T* weight, const T* bias, T* state, const int64_t* pages, int64_t stride, T* y, int64_t batch,
          int64_t channels, int64_t taps, bool activate, float limit) {
    std::vector<float> sums(channels);
    for (int64_t b = 0; b < batch; ++b, x += channels, y += channels) {
        for (int64_t c = 0; c < channels; ++c) sums[c] = cut(load(x[c]), limit);
        convolve(weight, page(state, pages, stride, b), sums.data(), channels, taps);
        for (int64_t c = 0; bias && c < channels; ++c) sums[c] += load(bias[c]);
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
                rotate_head(head.data(), cos + b * pairs, sin + b * pairs, pairs);
                unit(head.data(), to, D[part], eps);
            }
    }
}

// ---- sequences

// What a sequence needs for some channels: weights [taps, width], and the last `taps` inputs as rows of floats.
struct Taps {
    int64_t taps, width;
    float limit;
    Floats weights, inputs;

    template <class T>
    Taps(const T* weight, int64_t taps, int64_t first, int64_t last, float limit)
        : taps(taps), width(last - first), limit(limit), weights(taps * width), inputs(taps * width) {
        for (int64_t j = 0; j < taps; ++j)
            for (int64_t c = 0; c < width; ++c) weights[j * width + c] = load(weight[(first + c) * taps + j]);
    }
    float* row(Floats& ring, int64_t t) const { return &ring[(t + taps) % taps * width]; }
    // the input of token t, for t < 0 from the state [channels, taps - 1] before the sequence, or 0
    template <class T>
    void read(const T* x, const T* state, int64_t t) {
        float* to = row(inputs, t);
        for (int64_t c = 0; c < width; ++c) {
            const float now = t >= 0 ? load(x[c]) : state ? load(state[c * (taps - 1) + taps - 1 + t]) : 0.0f;
            to[c] = t < 0 ? now : cut(now, limit);
        }
    }
    // z of token t, whose input is the last one that was read
    void sum(float* z, const float* bias, int64_t t) {
        for (int64_t c = 0; c < width; ++c) z[c] = bias[c];
        for (int64_t j = 0; j < taps; ++j) {
            const float *w = &weights[j * width], *x = row(inputs, t + 1 + j);
            for (int64_t c = 0; c < width; ++c) z[c] += w[c] * x[c];
        }
    }
};

template <class T>
Floats biases(const T* bias, int64_t first, int64_t last) {
    Floats found(last - first);
    for (int64_t c = first; bias && c < last; ++c) found[c - first] = load(bias[c]);
    return found;
}

template <class T>
void sequences(const T* x, int64_t stride, const T* weight, const T* bias, const T* initial, T* y, T* final,
               const int64_t* starts, const int64_t* ends, int64_t count, int64_t channels, int64_t taps, bool activate,
               float limit, int64_t first, int64_t last) {
    Taps window(weight, taps, first, last, limit);
    const Floats added = biases(bias, first, last);
    Floats z(window.width);
    for (int64_t n = 0; n < count; ++n) {
        const int64_t tokens = ends[n] - starts[n], states = (n * channels + first) * (taps - 1);
        for (int64_t t = 1 - taps; t < 0; ++t) window.read<T>(nullptr, initial ? initial + states : nullptr, t);
        for (int64_t t = 0; t < tokens; ++t) {
            T* to = y + (starts[n] + t) * channels + first;
            window.read<T>(x + (starts[n] + t) * stride + first, nullptr, t);
            window.sum(z.data(), added.data(), t);
            if (activate)
                for (int64_t c = 0; c < window.width; ++c) store(to[c], silu(z[c]));
            else
                for (int64_t c = 0; c < window.width; ++c) store(to[c], z[c]);
        }
        for (int64_t j = 0; j < taps - 1; ++j) {
            const float* kept = window.row(window.inputs, tokens + 1 + j);
            for (int64_t c = 0; c < window.width; ++c) store(final[states + c * (taps - 1) + j], kept[c]);
        }
    }
}

template <class T>
void gradients(const T* dy, const T* dfinal, const T* x, int64_t stride, const T* weight, const T* bias, const T* initial,
               T* dx, T* dinitial, float* dweight, float* dbias, const int64_t* starts, const int64_t* ends, int64_t count,
               int64_t channels, int64_t taps, bool activate, float limit, int64_t first, int64_t last) {
    constexpr int64_t PART = 128;  // so many tokens are summed in float32, their sums in float64
    Taps window(weight, taps, first, last, limit);
    const int64_t width = window.width;
    const Floats added = biases(bias, first, last);
    Floats z(width), part((taps + 1) * width), waiting(taps * width);  // waiting: gradients of the last inputs
    std::vector<double> sums((taps + 1) * width);
    const auto flush = [&] {
        for (int64_t i = 0; i < (taps + 1) * width; ++i) sums[i] += part[i], part[i] = 0;
    };
    for (int64_t n = 0; n < count; ++n) {
        const int64_t tokens = ends[n] - starts[n], states = (n * channels + first) * (taps - 1);
        // input t, of the sequence or of the state before it, is complete
        const auto write = [&](int64_t t) {
            const float* found = window.row(waiting, t);
            const int64_t token = starts[n] + t;
            for (int64_t c = 0; t < 0 && c < width; ++c) store(dinitial[states + c * (taps - 1) + taps - 1 + t], found[c]);
            for (int64_t c = 0; t >= 0 && c < width; ++c) {
                const bool inside = limit == INFINITY || std::abs(load(x[token * stride + first + c])) < limit;
                store(dx[token * channels + first + c], found[c] * inside);
            }
        };
        std::fill(waiting.begin(), waiting.end(), 0.0f);
        for (int64_t t = 1 - taps; t < 0; ++t) window.read<T>(nullptr, initial ? initial + states : nullptr, t);
        for (int64_t t = 0; t < tokens; ++t) {
            const T* above = dy + (starts[n] + t) * channels + first;
            window.read<T>(x + (starts[n] + t) * stride + first, nullptr, t);
            if (activate) {
                window.sum(z.data(), added.data(), t);
                for (int64_t c = 0; c < width; ++c) {
                    const float gate = sigmoid(z[c]);
                    z[c] = load(above[c]) * gate * (1 + z[c] * (1 - gate));
                }
            } else {
                for (int64_t c = 0; c < width; ++c) z[c] = load(above[c]);
            }
            std::fill_n(window.row(waiting, t), width, 0.0f);
            for (int64_t j = 0; j < taps; ++j) {
                const float *w = &window.weights[j * width], *input = window.row(window.inputs, t + 1 + j);
                float *of_weight = &part[j * width], *of_input = window.row(waiting, t + 1 + j);
                for (int64_t c = 0; c < width; ++c) {
                    of_weight[c] += z[c] * input[c];
                    of_input[c] += z[c] * w[c];
                }
            }
            for (int64_t c = 0; c < width; ++c) part[taps * width + c] += z[c];
            if (t % PART == PART - 1) flush();
            write(t + 1 - taps);
        }
        flush();
        for (int64_t j = 0; j < taps - 1; ++j) {
            float* found = window.row(waiting, tokens + 1 + j);
            for (int64_t c = 0; c < width; ++c) found[c] += load(dfinal[states + c * (taps - 1) + j]);
            write(tokens + 1 - taps + j);
        }
    }
    for (int64_t c = 0; c < width; ++c) {
        for (int64_t j = 0; j < taps; ++j) dweight[(first + c) * taps + j] = float(sums[j * width + c]);
        dbias[first + c] = float(sums[taps * width + c]);
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

// Channels first .. last - 1 of sequences, which have the tokens starts[n] .. ends[n] - 1. x [tokens, channels] with rows
// `stride` apart, weight [channels, taps], bias [channels] or null, y [tokens, channels]; initial, which may be null, and
// final [count, channels, taps - 1].
EXPORT void short_conv_sequences(const void* x, int64_t stride, const void* weight, const void* bias, const void* initial,
                                 void* y, void* final, const int64_t* starts, const int64_t* ends, int64_t count,
                                 int64_t channels, int64_t taps, int64_t activate, float limit, int64_t in_bf16,
                                 int64_t first, int64_t last) {
    const auto run = [&](auto kind) {
        using T = decltype(kind);
        sequences(static_cast<const T*>(x), stride, static_cast<const T*>(weight), static_cast<const T*>(bias),
                  static_cast<const T*>(initial), static_cast<T*>(y), static_cast<T*>(final), starts, ends, count, channels,
                  taps, activate, limit, first, last);
    };
    in_bf16 ? run(bf16()) : run(float());
}

// The gradients of `short_conv_sequences` from those of y and of the final states; dweight and dbias are float32.
EXPORT void short_conv_gradients(const void* dy, const void* dfinal, const void* x, int64_t stride, const void* weight,
                                 const void* bias, const void* initial, void* dx, void* dinitial, float* dweight,
                                 float* dbias, const int64_t* starts, const int64_t* ends, int64_t count, int64_t channels,
                                 int64_t taps, int64_t activate, float limit, int64_t in_bf16, int64_t first,
                                 int64_t last) {
    const auto run = [&](auto kind) {
        using T = decltype(kind);
        gradients(static_cast<const T*>(dy), static_cast<const T*>(dfinal), static_cast<const T*>(x), stride,
                  static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<const T*>(initial),
                  static_cast<T*>(dx), static_cast<T*>(dinitial), dweight, dbias, starts, ends, count, channels, taps,
                  activate, limit, first, last);
    };
    in_bf16 ? run(bf16()) : run(float());
}
