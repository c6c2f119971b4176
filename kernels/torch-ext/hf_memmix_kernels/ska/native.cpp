// One token of SKA on a CPU, and a layer's decode step. Torch estimates the operator, once per chunk (native_path.py).
//
//     o = gain W q;  G += z z^T,  M^T += previous z^T,  C^T += z v^T,  nu = max(nu, |z|)

#include "../layer.h"

// One row of the five tensors of arguments.State: [kv_heads, ...]
struct State {
    float *statistics, *W, *previous, *nu, *position;
};

// q, o [batch, heads, ...], z, v [batch, kv_heads, ...] and gain [heads]. Row b has the state at page * strides, where page is
// pages[b], or b without pages. ROWS of native_path.py has the same fields.
struct Rows {
    const float *q, *z, *v, *gain;
    float* o;
    const int64_t* pages;
    State first;
    int64_t strides[5], batch, heads, kv_heads, r, P;
};

// What a layer's decode step reads beside `Layer`: gamma and eta [heads]. FIELDS of native_path.py has the same fields.
struct Factors {
    const float *gamma, *eta;
    State state;
    int64_t kv_heads, power;
};

namespace {

// The state of one head after the key z and the value v.
void write(const State& s, int64_t head, const float* z, const float* v, int64_t r, int64_t P) {
    float *row = s.statistics + head * r * (2 * r + P), *previous = s.previous + head * r, square = 0;
    for (int64_t j = 0; j < r; ++j, row += 2 * r + P) {
        for (int64_t i = 0; i < r; ++i) row[i] += z[j] * z[i];
        for (int64_t i = 0; i < r; ++i) row[r + i] += previous[j] * z[i];
        for (int64_t i = 0; i < P; ++i) row[2 * r + i] += z[j] * v[i];
    }
    for (int64_t j = 0; j < r; ++j) square += z[j] * z[j];
    const float norm = std::sqrt(square);
    s.nu[head] = norm > s.nu[head] || norm != norm ? norm : s.nu[head];
    std::memcpy(previous, z, r * sizeof *z);
    s.position[head] += 1;
}

// o = W q of all heads, and then the state after the token; q already has the gain
void token(const State& s, const float* q, const float* z, const float* v, float* o, int64_t heads, int64_t kv_heads,
           int64_t r, int64_t P) {
    std::fill_n(o, heads * P, 0.0f);
    for (int64_t head = 0; head < heads; ++head)
        pull(o + head * P, s.W + head / (heads / kv_heads) * r * P, q + head * r, int(r), int(P));
    for (int64_t head = 0; head < kv_heads; ++head) write(s, head, z + head * r, v + head * P, r, P);
}

template <class T>
void layer(const Layer& l, const Factors& f) {
    const int64_t r = l.K, heads = l.rows[0] / r;
    Floats q(l.rows[0]), k(l.rows[1]), v(l.rows[2]), y(l.rows[3]);
    project<T>(l, 0, q.data());
    project<T>(l, 1, k.data());
    project<T>(l, 2, v.data());
    for (int64_t head = 0; head < heads; ++head) {
        float gain = f.eta[head];
        for (int64_t i = 0; i < f.power; ++i) gain *= f.gamma[head];
        for (int64_t j = 0; j < r; ++j) q[head * r + j] *= gain;
    }
    token(f.state, q.data(), k.data(), v.data(), y.data(), heads, f.kv_heads, r, l.D);
    read_out<T>(l, y.data());
}

}  // namespace

EXPORT void ska_step(const Rows* rows) {
    const auto& [q, z, v, gain, o, pages, first, strides, batch, heads, kv_heads, r, P] = *rows;
    Floats scaled(heads * r);
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t i = 0; i < heads * r; ++i) scaled[i] = gain[i / r] * q[b * heads * r + i];
        const auto of = [&](float* pool, int part) { return page(pool, pages, strides[part], b); };
        const State state = {of(first.statistics, 0), of(first.W, 1), of(first.previous, 2), of(first.nu, 3),
                             of(first.position, 4)};
        token(state, scaled.data(), z + b * kv_heads * r, v + b * kv_heads * P, o + b * heads * P, heads, kv_heads, r, P);
    }
}

// One token of one sequence.
EXPORT void ska_layer(const Layer* l, const Factors* f, int64_t in_bf16) {
    in_bf16 ? layer<bf16>(*l, *f) : layer<float>(*l, *f);
}
