// The decode step of a window on a CPU: a token enters the ring of keys and values, then each head reads the filled slots; and
// the layer around it.

#include <algorithm>

#include "../layer.h"

namespace {

// q, o [batch, heads, D], k, v [batch, kv_heads, D]; keys and values [slots, kv_heads, D] and seen [kv_heads] in the page of
// each row, of which `steps` are the distances. native_path.py has the same fields.
struct Ring {
    const void *q, *k, *v;
    const float* sink_logits;
    void *keys, *values;
    int64_t* seen;
    const int64_t* pages;
    void* o;
    int64_t keys_step, values_step, seen_step, heads, kv_heads, D, window, sinks;
    float scale, softcap;  // no cap: 0
};

// Of the heads first .. last - 1 of row b; those of queries that share a key/value head stand together.
template <class T>
struct Row {
    const Ring& r;
    const int64_t b, first, last, group, D, stride, slots;
    T *keys, *values;
    std::vector<int64_t> filled;
    Floats query, weights, sums, out;

    Row(const Ring& r, int64_t b, int64_t first, int64_t last)
        : r(r), b(b), first(first), last(last), group(r.heads / r.kv_heads), D(r.D), stride(r.kv_heads * r.D),
          slots(r.sinks + r.window), keys(page(static_cast<T*>(r.keys), r.pages, r.keys_step, b)),
          values(page(static_cast<T*>(r.values), r.pages, r.values_step, b)), filled(r.kv_heads),
          query(r.heads * r.D), weights(r.heads * slots), sums(r.heads), out(r.heads * r.D) {}

    // Writes the token into its slot, and counts it.
    void write() {
        const T* k = static_cast<const T*>(r.k) + b * stride;
        const T* v = static_cast<const T*>(r.v) + b * stride;
        int64_t* seen = page(r.seen, r.pages, r.seen_step, b);
        for (int64_t h = first; h < last; ++h) {
            const int64_t count = std::max<int64_t>(seen[h], 0);  // a page of garbage may hold any number
            const int64_t slot = count < r.sinks ? count : r.sinks + (count - r.sinks) % r.window;
            std::copy_n(k + h * D, D, keys + slot * stride + h * D);
            std::copy_n(v + h * D, D, values + slot * stride + h * D);
            filled[h] = std::min(count, slots - 1) + 1;
            seen[h] = count + 1;
        }
    }

    // The logits of all slots. Slots are the outer loop, as memory has them.
    void score() {
        const T* q = static_cast<const T*>(r.q) + b * r.heads * D;
        for (int64_t i = first * group * D; i < last * group * D; ++i) query[i] = r.scale * load(q[i]);
        for (int64_t s = 0; s < slots; ++s)
            for (int64_t h = first; h < last; ++h) {
                if (s >= filled[h]) continue;
                const T* key = keys + s * stride + h * D;
                over_rows(int(group), [&](int g, auto rows) __attribute__((always_inline)) {
                    Sum sum[ROWS];
                    const float* of = &query[(h * group + g) * D];
                    over_columns(int(D), [&](int i, auto kind) __attribute__((always_inline)) {
                        const auto x = get(key + i, kind);
                        for (int n = 0; n < rows; ++n) sum[n] += get(of + n * D + i, kind) * x;
                    });
                    for (int n = 0; n < rows; ++n) weights[(h * group + g + n) * slots + s] = sum[n].total();
                });
            }
    }

    // Logits to powers of e, and the sum of each head's.
    void exponentiate(int64_t head) {
        float *w = &weights[head * slots], largest = r.sink_logits ? r.sink_logits[head] : -INFINITY, sum = 0;
        const int64_t count = filled[head / group];
        for (int64_t s = 0; r.softcap && s < count; ++s) w[s] = r.softcap * std::tanh(w[s] / r.softcap);
        for (int64_t s = 0; s < count; ++s) largest = w[s] > largest ? w[s] : largest;
        for (int64_t s = 0; s < count; ++s) {
            w[s] = exponential(w[s] - largest);
            sum += w[s];
        }
        sums[head] = r.sink_logits ? sum + exponential(r.sink_logits[head] - largest) : sum;
    }

    void read() {
        std::fill(out.begin(), out.end(), 0.0f);
        over_rows(int(slots), [&](int s, auto rows) __attribute__((always_inline)) {
            for (int64_t h = first; h < last; ++h) {
                const int64_t count = std::min<int64_t>(rows, filled[h] - s);
                if (count == rows)
                    add(s, h, rows);
                else
                    for (int64_t n = 0; n < count; ++n) add(s + n, h, std::integral_constant<int, 1>());
            }
        });
        T* o = static_cast<T*>(r.o) + b * r.heads * D;
        for (int64_t head = first * group; head < last * group; ++head)
            for (int64_t i = 0; i < D; ++i) store(o[head * D + i], out[head * D + i] / sums[head]);
    }

    // out += the values of the slots s .. s + rows - 1, of one key/value head
    template <class Count>
    INLINE void add(int64_t s, int64_t h, Count rows) {
        const T* value = values + s * stride + h * D;
        for (int64_t head = h * group; head < (h + 1) * group; ++head) {
            const float* w = &weights[head * slots + s];
            float* to = &out[head * D];
            over_columns(int(D), [&](int i, auto kind) __attribute__((always_inline)) {
                auto found = get(to + i, kind);
                for (int n = 0; n < rows; ++n) found += w[n] * get(value + n * stride + i, kind);
                put(to + i, found);
            });
        }
    }

    void run() {
        write();
        score();
        for (int64_t head = first * group; head < last * group; ++head) exponentiate(head);
        read();
    }
};

template <class T>
void step(const Ring& r, int64_t first, int64_t last) {
    for (int64_t b = first / r.kv_heads; b * r.kv_heads < last; ++b) {
        const int64_t begin = b * r.kv_heads;
        Row<T>(r, b, std::max<int64_t>(first - begin, 0), std::min(last - begin, r.kv_heads)).run();
    }
}

template <class T>
void layer(const Layer& l, Ring r) {
    std::vector<T> q(l.rows[0]), k(l.rows[1]), v(l.rows[2]), o(l.rows[0]);
    project<T>(l, 0, q.data());
    project<T>(l, 1, k.data());
    project<T>(l, 2, v.data());
    r.q = q.data(), r.k = k.data(), r.v = v.data(), r.o = o.data();
    step<T>(r, 0, r.kv_heads);
    read_out<T>(l, o.data());
}

}  // namespace

// One token of one sequence; q, k, v and o of the ring are not read.
EXPORT void window_layer(const Layer* l, const Ring* r, int64_t in_bf16) {
    in_bf16 ? layer<bf16>(*l, *r) : layer<float>(*l, *r);
}

// Rows first .. last - 1 of batch x kv_heads. Each head reads a count of its own, as several threads may share a page.
EXPORT void window_step(const Ring* r, int64_t in_bf16, int64_t first, int64_t last) {
    in_bf16 ? step<bf16>(*r, first, last) : step<float>(*r, first, last);
}
