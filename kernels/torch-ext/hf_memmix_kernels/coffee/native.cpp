// One token of COFFEE on a CPU: x = x + s (lambda x + u) with the gate s = phi(w x), then y = C . x.

#include "../native.h"

namespace {

enum Feedback { SIGMOID, LINEAR, INPUT, TOKEN };  // native_path.FEEDBACKS

}  // namespace

// u, y [batch, features], the parameters [features, states], w_filter may be null. Row b has the state [features, states]
// at state + page * stride, where page is pages[b], or b without pages.
EXPORT void coffee_step(const float* u, const float* lambda, const float* w, const float* C, const float* w_filter,
                        float* state, const int64_t* pages, int64_t stride, float* y, int64_t batch, int64_t features,
                        int64_t states, int64_t feedback) {
    for (int64_t b = 0; b < batch; ++b) {
        float* x = page(state, pages, stride, b);
        for (int64_t d = 0; d < features; ++d, x += states) {
            const float now = u[b * features + d];
            float sum = 0, filter = 0;
            for (int64_t j = 0; j < states; ++j) {
                const int64_t at = d * states + j;
                const float inner = w[at] * (feedback == INPUT ? now : x[j]);
                const float gate = feedback == TOKEN ? 1.0f : feedback == LINEAR ? inner : sigmoid(inner);
                x[j] += gate * (lambda[at] * x[j] + now);
                sum += C[at] * x[j];
                if (w_filter) filter += w_filter[at] * x[j];
            }
            y[b * features + d] = w_filter ? sum * sigmoid(filter) : sum;
        }
    }
}
