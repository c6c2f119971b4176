// Tokens of gated linear attention on a CPU, and their gradients; ../matrix_memory.h has the recurrence. And the decode step
// of a layer of Mamba-2.

#include "../layer.h"
#include "../matrix_memory.h"

// arguments.Mamba2: W_in [2 H P + 2 G N + H, hidden] gives z | x | B | C | dt, W_out [width, H P]; their biases, and
// that of the convolution, may be null. taps [C, tap_count] and past [C, tap_count - 1] for the channels of x | B | C, norm
// [H P], A_log, D, dt_bias [H] and state [H, N, P]. FIELDS of native_path.py has the same fields.
struct Mamba2 {
    const void *x, *weights[2], *biases[2], *taps, *conv_bias, *norm, *past;
    void* out;
    const float *A_log, *D, *dt_bias;
    float* state;
    int64_t hidden, width, heads, groups, N, P, tap_count;
    float eps, largest_feature, largest_readout, smallest_dt, largest_dt;
};

namespace {

template <class T>
void layer(const Mamba2& l) {
    const int64_t starts[] = {0, 1}, features = l.heads * l.P, keys = l.groups * l.N, channels = features + 2 * keys;
    Floats z(features + channels + l.heads), g(l.heads), o(features);
    float *x = &z[features], *dt = x + channels, limit = l.largest_feature;
    products(as<T>(l.weights[0]), as<T>(l.biases[0]), as<T>(l.x), z.size(), l.hidden,
             [&](int64_t row, float y) { z[row] = cut(y, limit); });
    convolve(as<T>(l.taps), const_cast<T*>(as<T>(l.past)), x, channels, l.tap_count);
    for (int64_t i = 0; l.conv_bias && i < channels; ++i) x[i] += load(as<T>(l.conv_bias)[i]);
    for (int64_t i = 0; i < channels; ++i) x[i] = silu(x[i]);
    for (int64_t h = 0; h < l.heads; ++h) {
        dt[h] = between(softplus(dt[h] + l.dt_bias[h]), l.smallest_dt, l.largest_dt);
        g[h] = -std::exp(l.A_log[h]) * dt[h];
    }
    Memory m = {};
    m.v = x, m.k = x + features, m.q = m.k + keys, m.o = o.data(), m.log_decay = g.data(), m.beta = dt, m.skip = l.D;
    m.state = l.state, m.starts = starts, m.K = l.N, m.V = l.P, m.decays = 1, m.scale = 1;
    m.heads = m.value_heads = l.heads, m.query_heads = m.key_heads = l.groups;
    memory_tokens<false>(m, 0, l.heads);
    for (int64_t i = 0; i < features; ++i) o[i] = cut(o[i], l.largest_readout) * silu(z[i]);
    for (int64_t i = 0, size = features / l.groups; i < features; i += size)
        rms_norm(&o[i], as<T>(l.norm) + i, size, l.eps);
    products(as<T>(l.weights[1]), as<T>(l.biases[1]), o.data(), l.width, features,
             [&](int64_t row, float y) { store(static_cast<T*>(l.out)[row], y); });
}

}  // namespace

// One token of one sequence.
EXPORT void mamba2_layer(const Mamba2* l, int64_t in_bf16) { in_bf16 ? layer<bf16>(*l) : layer<float>(*l); }

EXPORT void gla_tokens(const Memory* m, int64_t first, int64_t last) { memory_tokens<false>(*m, first, last); }
EXPORT void gla_gradients(const Memory* m, int64_t first, int64_t last) { memory_gradients<false>(*m, first, last); }
