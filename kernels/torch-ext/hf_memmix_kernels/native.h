// What the native.cpp files of the ops share: element types, exp, vectors, and where a row's state lies.
//
// Plain C++17 with the vector types of GCC and Clang: no header of torch or Python, so that a file compiles in about a
// second. _native.py compiles and loads it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#define INLINE inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

// bfloat16: the upper half of a float32
struct bf16 {
    uint16_t bits;
};

static inline float load(float x) { return x; }
static inline float load(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

static inline void store(float& to, float x) { to = x; }
static inline void store(bf16& to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    // to nearest, ties to even; a NaN stays one
    to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// a b + c. -fassociative-math would add the two parts of log 2 in `exponential` first, and lose what the second is for
#ifdef __has_builtin
#if __has_builtin(__builtin_assoc_barrier)
#define AS_WRITTEN(sum) __builtin_assoc_barrier(sum)
#endif
#endif
#ifndef AS_WRITTEN
#define AS_WRITTEN(sum) (sum)  // Clang without FMA: up to 35 units in the last place
#endif
static inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return AS_WRITTEN(a * b + c);  // a call of fmaf would not be vectorised
#endif
}

// e^x within 2 units in the last place: 2^n times a polynomial of the rest, which compilers vectorise. 0 where e^x is
// below 2^-126, the smallest normal number; infinity where it is above the largest number; NaN stays NaN.
static inline float exponential(float x) {
    constexpr float LOWEST = -87.336544f, HIGHEST = 88.72283f;  // log 2^-126 and log 2^128, rounded towards 0
    const float limited = x < LOWEST ? LOWEST : x > HIGHEST ? HIGHEST : x;
    const float n = std::floor(limited * 1.44269504f + 0.5f);
    const float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, limited));
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;  // n is added to the exponent of p: 2^128 is no float32, and p < 1 where n is 128
    std::memcpy(&bits, &p, sizeof bits);
    bits += uint32_t(int32_t(n)) << 23;
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return x < LOWEST ? 0.0f : x > HIGHEST ? INFINITY : x != x ? x : found;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
// log(1 + e^x) within 4 units in the last place, which compilers vectorise: max(x, 0) + log(1 + t) with t = e^-|x|, and
// log(1 + t) = 2 artanh(t / (2 + t)), as a series in s = t / (2 + t) <= 1/3
static inline float softplus(float x) {
    const float t = exponential(x > 0 ? -x : x), s = t / (2 + t), z = s * s;
    float p = 1.0f / 15;
    p = p * z + 1.0f / 13;
    p = p * z + 1.0f / 11;
    p = p * z + 1.0f / 9;
    p = p * z + 1.0f / 7;
    p = p * z + 1.0f / 5;
    p = p * z + 1.0f / 3;
    return (x > 0 ? x : 0.0f) + 2 * (s + s * z * p);
}
static inline float between(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
static inline float cut(float x, float limit) { return between(x, -limit, limit); }
static inline float silu(float x) { return x * sigmoid(x); }

enum class Activation : int64_t { NONE, SILU, GELU, SIGMOID };  // _native.ACTIVATIONS
static inline float activate(float x, int64_t activation) {
    switch (Activation(activation)) {
        case Activation::SILU: return silu(x);
        case Activation::GELU: return 0.5f * x * (1 + std::erf(x * 0.70710678f));
        case Activation::SIGMOID: return sigmoid(x);
        default: return 1.0f;
    }
}

// numbers that are computed together, as many as a register holds; memory need not be aligned
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// memory on whole cache lines, so that no vector of a scratch matrix lies on two
template <class T>
struct OnLines {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};
    OnLines() = default;
    template <class Other>
    OnLines(const OnLines<Other>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), LINE)); }
    void deallocate(T* at, size_t) { ::operator delete(at, LINE); }
    bool operator==(const OnLines&) const { return true; }
    bool operator!=(const OnLines&) const { return false; }
};
typedef std::vector<float, OnLines<float>> Floats;

static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Passes over the rows of a matrix, ROWS at a time: each row has a sum of its own, and they run side by side

constexpr int ROWS = 4;

struct Wide {};
struct One {};
inline Lanes get(const float* at, Wide) { return *reinterpret_cast<const Lanes*>(at); }
inline float get(const float* at, One) { return *at; }
inline float get(const bf16* at, One) { return load(*at); }
inline Lanes get(const bf16* at, Wide) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
    return reinterpret_cast<Lanes>(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), Words) << 16);
}
inline void put(float* at, Lanes x) { *reinterpret_cast<Lanes*>(at) = x; }
inline void put(float* at, float x) { *at = x; }

struct Sum {
    Lanes wide = {};
    float rest = 0;

    void operator+=(Lanes x) { wide += x; }
    void operator+=(float x) { rest += x; }
    float total() const {
        typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
        const Four* parts = reinterpret_cast<const Four*>(&wide);
        Four sum = parts[0];
        for (int i = 1; i < LANES / 4; ++i) sum += parts[i];
        return rest + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
};

// columns(i, kind) for all columns: whole `Lanes` of them (Wide), then one by one (One)
template <class Body>
INLINE void over_columns(int D, Body columns) {
    int i = 0;
    for (; i + LANES <= D; i += LANES) columns(i, Wide());
    for (; i < D; ++i) columns(i, One());
}

// body(row, number of rows) for all rows
template <class Body>
INLINE void over_rows(int count, Body body) {
    int row = 0;
    for (; row + ROWS <= count; row += ROWS) body(row, std::integral_constant<int, ROWS>());
    for (; row < count; ++row) body(row, std::integral_constant<int, 1>());
}

// `finish(row, w x + bias)` for all rows of w [rows, D]; bias [rows] may be null. Eight rows at once use more of the memory's
// bandwidth than one.
template <class T, class X, class Finish>
INLINE void products(const T* w, const T* bias, const X* x, int64_t rows, int64_t D, Finish finish) {
    const auto part = [&](int64_t first, auto count) __attribute__((always_inline)) {
        Sum sum[8];
        over_columns(int(D), [&](int i, auto kind) __attribute__((always_inline)) {
            const auto value = get(x + i, kind);
            for (int n = 0; n < count; ++n) sum[n] += value * get(w + (first + n) * D + i, kind);
        });
        for (int n = 0; n < count; ++n) finish(first + n, sum[n].total() + (bias ? load(bias[first + n]) : 0.0f));
    };
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) part(row, std::integral_constant<int, 8>());
    for (; row < rows; ++row) part(row, std::integral_constant<int, 1>());
}

// sum += A^T by, for A [K, V]
inline void pull(float* sum, const float* A, const float* by, int K, int V) {
    over_rows(K, [&](int first, auto rows) __attribute__((always_inline)) {
        over_columns(V, [&](int i, auto kind) __attribute__((always_inline)) {
            auto found = by[first] * get(A + first * V + i, kind);
            for (int n = 1; n < rows; ++n) found += by[first + n] * get(A + (first + n) * V + i, kind);
            put(sum + i, get(sum + i, kind) + found);
        });
    });
}

template <class T>
static inline const T* as(const void* at) {
    return static_cast<const T*>(at);
}

// Where the state of row b begins: in its page, or in row b if there are no pages.
template <class T>
static inline T* page(T* states, const int64_t* pages, int64_t stride, int64_t b) {
    return states + (pages ? pages[b] : b) * stride;
}

// z = R z of one head: R turns the channels i and i + pairs by an angle.
template <class T>
static inline void rotate_head(float* z, const T* cos, const T* sin, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = z[i], b = z[i + pairs], c = load(cos[i]), s = load(sin[i]);
        z[i] = a * c - b * s;
        z[i + pairs] = b * c + a * s;
    }
}

// y = z / (|z| + eps) of one head
template <class T>
static inline void unit(const float* z, T* y, int64_t D, float eps) {
    float square = 0;
    for (int64_t i = 0; i < D; ++i) square += z[i] * z[i];
    const float size = std::sqrt(square) + eps;
    for (int64_t i = 0; i < D; ++i) store(y[i], z[i] / size);
}

// z [channels] of a token to sum_j taps_j window_j, whose last input is z itself; past [channels, count - 1] moves on.
template <class T>
static inline void convolve(const T* taps, T* past, float* z, int64_t channels, int64_t count) {
    for (int64_t c = 0; c < channels; ++c, taps += count, past += count - 1) {
        float sum = load(taps[count - 1]) * z[c];
        for (int64_t j = 0; j < count - 1; ++j) sum += load(taps[j]) * load(past[j]);
        for (int64_t j = 0; j < count - 2; ++j) past[j] = past[j + 1];
        store(past[count - 2], z[c]);
        z[c] = sum;
    }
}
