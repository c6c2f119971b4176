// One token of the gated delta rule on a CPU: S = e^g S, S += beta k (v - S^T k)^T, o = scale S^T q.

#include <vector>

#include "../native.h"

// q [batch, query_heads, K], k [batch, key_heads, K], v [batch, value_heads, V], beta [batch, heads], log_decay [batch,
// heads, decays] with decays = 1 or K, o [batch, heads, V], all contiguous. Row b has the state [heads, K, V] at state +
// page * stride, where page is pages[b], or b without pages.
EXPORT void gated_delta_step(const float* q, const float* k, const float* v, const float* log_decay, const float* beta,
                             float* state, const int64_t* pages, int64_t stride, float* o, int64_t batch, int64_t heads,
                             int64_t query_heads, int64_t key_heads, int64_t value_heads, int64_t K, int64_t V,
                             int64_t decays, float scale) {
    std::vector<float> error(V);
    for (int64_t b = 0; b < batch; ++b) {
        float* S = page(state, pages, stride, b);
        for (int64_t head = 0; head < heads; ++head, S += K * V, o += V) {
            auto row = [&](const float* t, int64_t shared, int64_t size) {
                return t + (b * shared + head / (heads / shared)) * size;
            };
            const float *query = row(q, query_heads, K), *key = row(k, key_heads, K), *value = row(v, value_heads, V);
            const float* g = log_decay + (b * heads + head) * decays;
            const float strength = beta[b * heads + head];
            for (int64_t i = 0; i < V; ++i) error[i] = value[i], o[i] = 0.0f;
            float decay = exponential(g[0]);
            for (int64_t j = 0; j < K; ++j) {
                if (decays > 1) decay = exponential(g[j]);
                const float read = key[j];
                for (int64_t i = 0; i < V; ++i) {
                    const float now = decay * S[j * V + i];
                    S[j * V + i] = now;
                    error[i] -= read * now;
                }
            }
            for (int64_t j = 0; j < K; ++j) {
                const float write = strength * key[j], read = scale * query[j];
                for (int64_t i = 0; i < V; ++i) {
                    const float now = S[j * V + i] + write * error[i];
                    S[j * V + i] = now;
                    o[i] += read * now;
                }
            }
        }
    }
}
