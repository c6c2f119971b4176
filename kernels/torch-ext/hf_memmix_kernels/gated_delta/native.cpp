// Tokens of the gated delta rule on a CPU, and their gradients; ../matrix_memory.h has the recurrence. And a layer's decode
// step.

#include "../layer.h"
#include "../matrix_memory.h"

// beta = strength sigmoid(W_b x) [heads], g = -e^A_log softplus(W_a x + dt_bias) [heads, decays]; W_a may be a product, as
// the gate of `Layer`. FIELDS of native_path.py has the same fields.
struct Delta {
    const void *decay[2], *beta;
    const float *dt_bias, *A_log;
    float* state;
    int64_t kv_heads, decays, rank;
    float strength, scale;
};

namespace {

template <class T>
void layer(const Layer& l, const Delta& d) {
    const int64_t starts[] = {0, 1}, heads = l.rows[0] / l.D;
    Floats q(l.rows[0]), k(l.rows[1]), v(l.rows[2]), o(l.rows[0]), g(heads * d.decays), beta(heads);
    project<T>(l, 0, q.data());
    project<T>(l, 1, k.data());
    project<T>(l, 2, v.data());
    products_in_turn(d.decay, nullptr, as<T>(l.x), heads * d.decays, l.hidden, d.rank, [&](int64_t row, float z) {
        g[row] = -std::exp(d.A_log[row / d.decays]) * softplus(z + d.dt_bias[row]);
    });
    products<T>(as<T>(d.beta), nullptr, as<T>(l.x), heads, l.hidden,
                [&](int64_t row, float z) { beta[row] = d.strength * sigmoid(z); });
    Memory m = {};
    m.q = q.data(), m.k = k.data(), m.v = v.data(), m.o = o.data(), m.log_decay = g.data(), m.beta = beta.data();
    m.state = d.state, m.starts = starts, m.K = m.V = l.D, m.decays = d.decays, m.scale = d.scale;
    m.heads = m.query_heads = heads, m.key_heads = m.value_heads = d.kv_heads;
    memory_tokens<true>(m, 0, heads);
    read_out<T>(l, o.data());
}

}  // namespace

// One token of one sequence.
EXPORT void gated_delta_layer(const Layer* l, const Delta* d, int64_t in_bf16) {
    in_bf16 ? layer<bf16>(*l, *d) : layer<float>(*l, *d);
}

EXPORT void gated_delta_tokens(const Memory* m, int64_t first, int64_t last) { memory_tokens<true>(*m, first, last); }
EXPORT void gated_delta_gradients(const Memory* m, int64_t first, int64_t last) { memory_gradients<true>(*m, first, last); }
