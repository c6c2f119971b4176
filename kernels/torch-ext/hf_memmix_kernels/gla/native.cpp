// One token of gated linear attention on a CPU: S = e^g S + beta k v^T, o = scale S^T q + skip v.

#include "../native.h"

// q [batch, query_heads, K], k [batch, key_heads, K], v [batch, value_heads, V], the gates [batch, heads], skip [heads],
// o [batch, heads, V], all contiguous; beta and skip may be null. Row b has the state [heads, K, V] at state + page * stride,
// where page is pages[b], or b without pages.
EXPORT void gla_step(const float* q, const float* k, const float* v, const float* log_decay, const float* beta,
                     const float* skip, float* state, const int64_t* pages, int64_t stride, float* o, int64_t batch,
                     int64_t heads, int64_t query_heads, int64_t key_heads, int64_t value_heads, int64_t K, int64_t V,
                     float scale) {
    for (int64_t b = 0; b < batch; ++b) {
        float* S = page(state, pages, stride, b);
        for (int64_t head = 0; head < heads; ++head, S += K * V, o += V) {
            auto row = [&](const float* t, int64_t shared, int64_t size) {
                return t + (b * shared + head / (heads / shared)) * size;
            };
            const float *query = row(q, query_heads, K), *key = row(k, key_heads, K), *value = row(v, value_heads, V);
            const int64_t gate = b * heads + head;
            const float decay = exponential(log_decay[gate]), strength = beta ? beta[gate] : 1.0f;
            for (int64_t i = 0; i < V; ++i) o[i] = skip ? skip[head] * value[i] : 0.0f;
            for (int64_t j = 0; j < K; ++j) {
                const float write = strength * key[j], read = scale * query[j];
                for (int64_t i = 0; i < V; ++i) {
                    const float now = decay * S[j * V + i] + write * value[i];
                    S[j * V + i] = now;
                    o[i] += read * now;
                }
            }
        }
    }
}
