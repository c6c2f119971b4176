// COFFEE on a CPU: x = x + s (lambda x + u) with the gate s = g phi(w x), then y = C . x. One token, a layer's decode step,
// sequences, and their gradients (README.md, "Backward"). Sequences are computed in blocks of features, whose states stay in
// the processor's cache.

#include <algorithm>

#include "../layer.h"

namespace {

enum Feedback { SIGMOID, LINEAR, INPUT, TOKEN };  // native_path.FEEDBACKS
constexpr int64_t BLOCK = 64;  // features that are computed together

// The columns first .. first + width - 1 of a row of features, for all states: [states, BLOCK].
struct Block {
    int64_t first, width, states;
    std::vector<float> lambda, w, C, filter;

    // parameters [features, states]; w_filter may be null
    Block(const float* l, const float* weights, const float* c, const float* f, int64_t features, int64_t states,
          int64_t number)
        : first(number * BLOCK), width(std::min(BLOCK, features - number * BLOCK)), states(states), lambda(take(l)),
          w(take(weights)), C(take(c)), filter(f ? take(f) : std::vector<float>()) {}

    std::vector<float> take(const float* from) const {
        std::vector<float> found(states * BLOCK);
        for (int64_t j = 0; j < states; ++j)
            for (int64_t i = 0; i < width; ++i) found[j * BLOCK + i] = from[(first + i) * states + j];
        return found;
    }
};

inline float phi(float w, float x, float u, int feedback) {
    return feedback == TOKEN ? 1.0f : feedback == LINEAR ? w * x : sigmoid(w * (feedback == INPUT ? u : x));
}

// to = the states after a token, from those before it [states, BLOCK]; u and the factors of the gate [BLOCK]
template <int FEEDBACK>
void advance(const Block& b, const float* from, float* to, const float* u, const float* factor) {
    for (int64_t j = 0; j < b.states; ++j) {
        const float *lambda = &b.lambda[j * BLOCK], *w = &b.w[j * BLOCK], *x = from + j * BLOCK;
        float* next = to + j * BLOCK;
        for (int64_t i = 0; i < BLOCK; ++i)
            next[i] = x[i] + factor[i] * phi(w[i], x[i], u[i], FEEDBACK) * (lambda[i] * x[i] + u[i]);
    }
}

// sum_j p x over the states
void over_states(const std::vector<float>& p, const float* x, float* sum, int64_t states) {
    std::fill_n(sum, BLOCK, 0.0f);
    for (int64_t j = 0; j < states * BLOCK; j += BLOCK)
        for (int64_t i = 0; i < BLOCK; ++i) sum[i] += p[j + i] * x[j + i];
}

// What all tokens of a call share. The gate is null, [batch, tokens] (gate_width 1) or [batch, tokens, features].
struct Call {
    const float *u, *gate;
    int64_t batch, tokens, features, states, gate_width, interval;

    // u and the gate's factors of a token, [BLOCK] each
    void token(const Block& b, int64_t n, int64_t t, float* now, float* factor) const {
        const int64_t at = n * tokens + t;
        std::copy_n(u + at * features + b.first, b.width, now);
        if (gate && gate_width == 1) std::fill_n(factor, b.width, gate[at]);
        if (gate && gate_width > 1) std::copy_n(gate + at * features + b.first, b.width, factor);
    }

    // row `slot` of states [slots, states, batch, features] to or from a block
    void keep(const Block& b, int64_t n, int64_t slot, float* kept, const float* x) const {
        for (int64_t j = 0; j < states; ++j)
            std::copy_n(x + j * BLOCK, b.width, kept + ((slot * states + j) * batch + n) * features + b.first);
    }
    void read(const Block& b, int64_t n, int64_t slot, const float* kept, float* x) const {
        for (int64_t j = 0; j < states; ++j)
            std::copy_n(kept + ((slot * states + j) * batch + n) * features + b.first, b.width, x + j * BLOCK);
    }
};

template <int FEEDBACK>
void forward(const Call& c, const Block& b, int64_t n, float* state, float* y, float* kept) {
    std::vector<float> x(c.states * BLOCK), u(BLOCK), factor(BLOCK, 1.0f), sum(BLOCK), gain(BLOCK);
    c.read(b, n, 0, state, x.data());
    for (int64_t t = 0; t < c.tokens; ++t) {
        if (kept && t % c.interval == 0) c.keep(b, n, t / c.interval, kept, x.data());
        c.token(b, n, t, u.data(), factor.data());
        advance<FEEDBACK>(b, x.data(), x.data(), u.data(), factor.data());
        over_states(b.C, x.data(), sum.data(), c.states);
        if (b.filter.size()) {
            over_states(b.filter, x.data(), gain.data(), c.states);
            for (int64_t i = 0; i < BLOCK; ++i) sum[i] *= sigmoid(gain[i]);
        }
        std::copy_n(sum.data(), b.width, y + (n * c.tokens + t) * c.features + b.first);
    }
    c.keep(b, n, 0, state, x.data());
}

// One token of the adjoint: carry is the gradient of `after`, then of `before`; sums are those of lambda, w, C and w_filter.
template <int FEEDBACK>
void reverse(const Block& b, const float* before, const float* after, const float* u, const float* factor,
             const float* dy, float* carry, std::vector<float>* sums, float* du, float* dgate) {
    float value[BLOCK], gain[BLOCK], dvalue[BLOCK], dfilter[BLOCK];
    std::copy_n(dy, BLOCK, dvalue);
    std::fill_n(du, BLOCK, 0.0f);
    std::fill_n(dgate, BLOCK, 0.0f);
    const bool filtered = b.filter.size();
    if (filtered) {
        over_states(b.C, after, value, b.states);
        over_states(b.filter, after, gain, b.states);
        for (int64_t i = 0; i < BLOCK; ++i) {
            const float open = sigmoid(gain[i]);
            dvalue[i] = dy[i] * open;
            dfilter[i] = dy[i] * value[i] * open * (1 - open);
        }
    }
    for (int64_t j = 0; j < b.states * BLOCK; j += BLOCK) {
        const float *lambda = &b.lambda[j], *w = &b.w[j], *C = &b.C[j], *filter = filtered ? &b.filter[j] : nullptr;
        float *dlambda = &sums[0][j], *dw = &sums[1][j], *dC = &sums[2][j], *dF = &sums[3][j];
        if (filtered)
            for (int64_t i = 0; i < BLOCK; ++i) {
                carry[j + i] += filter[i] * dfilter[i];
                dF[i] += dfilter[i] * after[j + i];
            }
#pragma GCC ivdep
        for (int64_t i = 0; i < BLOCK; ++i) {
            const float x = before[j + i], g = C[i] * dvalue[i] + carry[j + i];
            const float v = lambda[i] * x + u[i], p = phi(w[i], x, u[i], FEEDBACK);
            const float gs = g * p * factor[i];
            const float inner = g * v * factor[i] * (FEEDBACK == SIGMOID || FEEDBACK == INPUT ? p - p * p : 1.0f);
            dC[i] += dvalue[i] * after[j + i];
            dlambda[i] += gs * x;
            dgate[i] += g * p * v;
            if (FEEDBACK != TOKEN) dw[i] += inner * (FEEDBACK == INPUT ? u[i] : x);
            du[i] += FEEDBACK == INPUT ? gs + w[i] * inner : gs;
            carry[j + i] = g + lambda[i] * gs + (FEEDBACK == SIGMOID || FEEDBACK == LINEAR ? w[i] * inner : 0.0f);
        }
    }
}

template <int FEEDBACK>
void backward(const Call& c, const Block& b, int64_t n, const float* dy, const float* kept, float* dstate, float* du,
              float* dgate, float* const* grads) {
    const int64_t window = c.interval, size = c.states * BLOCK;
    std::vector<float> states((window + 1) * size), carry(size), above(BLOCK), to_u(BLOCK), to_gate(BLOCK);
    std::vector<float> u(window * BLOCK), factors(window * BLOCK, 1.0f), sums[4];
    for (auto& sum : sums) sum.assign(size, 0.0f);
    c.read(b, n, 0, dstate, carry.data());
    for (int64_t begin = (c.tokens - 1) / window * window; begin >= 0; begin -= window) {
        const int64_t end = std::min(begin + window, c.tokens);
        c.read(b, n, begin / window, kept, states.data());
        for (int64_t t = begin; t < end; ++t) {
            float *before = &states[(t - begin) * size], *now = &u[(t - begin) * BLOCK];
            c.token(b, n, t, now, &factors[(t - begin) * BLOCK]);
            advance<FEEDBACK>(b, before, before + size, now, &factors[(t - begin) * BLOCK]);
        }
        for (int64_t t = end - 1; t >= begin; --t) {
            const int64_t at = (n * c.tokens + t) * c.features + b.first;
            const float* before = &states[(t - begin) * size];
            std::copy_n(dy + at, b.width, above.data());
            const float *now = &u[(t - begin) * BLOCK], *factor = &factors[(t - begin) * BLOCK];
            reverse<FEEDBACK>(b, before, before + size, now, factor, above.data(), carry.data(), sums, to_u.data(),
                              to_gate.data());
            std::copy_n(to_u.data(), b.width, du + at);
            if (dgate) std::copy_n(to_gate.data(), b.width, dgate + at);
        }
    }
    c.keep(b, n, 0, dstate, carry.data());
    for (int parameter = 0; parameter < 4; ++parameter)
        for (int64_t j = 0; j < c.states; ++j)
            std::copy_n(&sums[parameter][j * BLOCK], b.width,
                        grads[parameter] + (n * c.states + j) * c.features + b.first);
}

// f<feedback>(...), with the feedback as a constant
#define BY_FEEDBACK(f, ...)                           \
    if (feedback == SIGMOID) f<SIGMOID>(__VA_ARGS__); \
    else if (feedback == LINEAR) f<LINEAR>(__VA_ARGS__); \
    else if (feedback == INPUT) f<INPUT>(__VA_ARGS__); \
    else f<TOKEN>(__VA_ARGS__)

}  // namespace

// Sequences: u, y [batch, tokens, features], the parameters [features, states], w_filter may be null; the gate as in `Call`.
// `state` [states, batch, features] is advanced in place. `kept` [slots, states, batch, features], which may be null, gets
// the states before every `interval`-th token. Row r = n blocks + block of features; rows first .. last - 1 are computed.
EXPORT void coffee_tokens(const float* u, const float* lambda, const float* w, const float* C, const float* w_filter,
                          const float* gate, float* state, float* y, float* kept, int64_t batch, int64_t tokens,
                          int64_t features, int64_t states, int64_t gate_width, int64_t interval, int64_t feedback,
                          int64_t first, int64_t last) {
    const Call call = {u, gate, batch, tokens, features, states, gate_width, interval};
    const int64_t blocks = (features + BLOCK - 1) / BLOCK;
    for (int64_t row = first; row < last; ++row) {
        const Block block(lambda, w, C, w_filter, features, states, row % blocks);
        BY_FEEDBACK(forward, call, block, row / blocks, state, y, kept);
    }
}

// The gradients of `coffee_tokens`. dstate [states, batch, features] holds the gradient of the final states and gets that of
// the states before the first token. dgate [batch, tokens, features] may be null. dlambda, dw, dC and
// dfilter are [batch, states, features].
EXPORT void coffee_gradients(const float* dy, float* dstate, const float* u, const float* lambda, const float* w,
                             const float* C, const float* w_filter, const float* gate, const float* kept, float* du,
                             float* dgate, float* dlambda, float* dw, float* dC, float* dfilter, int64_t batch,
                             int64_t tokens, int64_t features, int64_t states, int64_t gate_width, int64_t interval,
                             int64_t feedback, int64_t first, int64_t last) {
    const Call call = {u, gate, batch, tokens, features, states, gate_width, interval};
    const int64_t blocks = (features + BLOCK - 1) / BLOCK;
    float* const grads[] = {dlambda, dw, dC, dfilter};
    for (int64_t row = first; row < last; ++row) {
        const Block block(lambda, w, C, w_filter, features, states, row % blocks);
        BY_FEEDBACK(backward, call, block, row / blocks, dy, kept, dstate, du, dgate, grads);
    }
}

// What a layer's decode step reads beside `Layer`, [features, states] each: the parameters, of which w_filter may be null, and
// the state. lambda is -2 sigmoid(logit). FIELDS of native_path.py has the same fields.
struct Parameters {
    const float *logit, *w, *C, *w_filter;
    float* state;
    int64_t states;
};

namespace {

// y of one token from u, both [features]; the states x [features, states] move on
template <int FEEDBACK>
void step(const float* u, const float* lambda, const float* w, const float* C, const float* w_filter, float* x, float* y,
          int64_t features, int64_t states) {
    for (int64_t d = 0; d < features; ++d) {
        const int64_t end = (d + 1) * states;
        const float now = u[d];
        float sum = 0, filter = 0;
#pragma GCC ivdep
        for (int64_t at = d * states; at < end; ++at) {
            x[at] += phi(w[at], x[at], now, FEEDBACK) * (lambda[at] * x[at] + now);
            sum += C[at] * x[at];
        }
        for (int64_t at = d * states; w_filter && at < end; ++at) filter += w_filter[at] * x[at];
        y[d] = w_filter ? sum * sigmoid(filter) : sum;
    }
}

// a layer whose v is u
template <class T>
void layer(const Layer& l, const Parameters& p) {
    const int64_t features = l.rows[2];
    Floats u(features), y(features), lambda(features * p.states);
    project<T>(l, 2, u.data());
    for (size_t i = 0; i < lambda.size(); ++i) lambda[i] = -2 * sigmoid(p.logit[i]);
    step<SIGMOID>(u.data(), lambda.data(), p.w, p.C, p.w_filter, p.state, y.data(), features, p.states);
    read_out<T>(l, y.data());
}

}  // namespace

// u, y [batch, features], the parameters [features, states], w_filter may be null. Row b has the state [features, states]
// at state + page * stride, where page is pages[b], or b without pages.
EXPORT void coffee_step(const float* u, const float* lambda, const float* w, const float* C, const float* w_filter,
                        float* state, const int64_t* pages, int64_t stride, float* y, int64_t batch, int64_t features,
                        int64_t states, int64_t feedback) {
    for (int64_t b = 0; b < batch; ++b) {
        float* x = page(state, pages, stride, b);
        BY_FEEDBACK(step, u + b * features, lambda, w, C, w_filter, x, y + b * features, features, states);
    }
}

// One token of one sequence.
EXPORT void coffee_layer(const Layer* l, const Parameters* p, int64_t in_bf16) {
    in_bf16 ? layer<bf16>(*l, *p) : layer<float>(*l, *p);
}
