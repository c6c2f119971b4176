// What the walks of Lattice's "dec" in CUDA C++ share: types, copies to shared memory, numbers of 16 bits, sums over lanes.
// launch_cuda.py puts this text before walk.cu or walk_back.cu and compiles it with NVRTC, BF16 = 0 for float16.
// tests/kernels/cuda_emulator.cpp runs the same text on a CPU, EMULATE.

typedef unsigned short u16;
typedef unsigned int u32;
constexpr int D = 64;           // slots, and entries of a slot
constexpr int WARPS = 4;        // of each of the two roles that the warps of a block have
constexpr int THREADS = 32 * WARPS;
constexpr int CHECKPOINT = 64;  // tokens between two states that forward keeps
#define FULL 0xffffffffu

#ifndef EMULATE
#define KEEP(x) asm volatile("" : "+r"(x))  // in a register, and not found again
#define SHARED(type, name)                                  \
  extern __shared__ __align__(16) unsigned char memory[];   \
  type& name = *(type*)memory
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(FULL, x, 0); }  // the same in all lanes
__device__ __forceinline__ void sync_role(int role) {
  asm volatile("bar.sync %0, %1;" ::"r"(role + 1), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from, bool real) {
  u32 s = (u32)__cvta_generic_to_shared(to);
  int n = real ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s), "l"(from), "r"(n));
}
__device__ __forceinline__ void copy4(void* to, const void* from, bool real) {
  u32 s = (u32)__cvta_generic_to_shared(to);
  int n = real ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(s), "l"(from), "r"(n));
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ float rsqrt_fast(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float rcp_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ u16 narrow(float x) {
  u16 r;
#if BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
  return r;
}
__device__ __forceinline__ void unpack(u32 x, float& lo, float& hi) {
#if BF16
  lo = __uint_as_float(x << 16);
  hi = __uint_as_float(x & 0xffff0000u);
#else
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(lo), "=f"(hi) : "r"(x));
#endif
}
#endif
__device__ __forceinline__ float wide(u16 x) {
  float lo, hi;
  unpack(x, lo, hi);
  return lo;
}
__device__ __forceinline__ void load4(float* x, const void* from) {
  float4 y = *(const float4*)from;
  x[0] = y.x; x[1] = y.y; x[2] = y.z; x[3] = y.w;
}
__device__ __forceinline__ void store4(void* to, const float* x) {
  *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ float shift(float x, int bit) { return __shfl_xor_sync(FULL, x, bit); }
// sums of N numbers over lanes that differ in bits FROM, FROM / 2, ..., END; a lane keeps a part of them, in order
template <int N, int FROM, int END> __device__ __forceinline__ void scatter(float* x, int lane) {
  if constexpr (FROM >= END) {
    bool upper = lane & FROM;
    if constexpr (N > 1) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        float send = upper ? x[i] : x[i + N / 2], keep = upper ? x[i + N / 2] : x[i];
        x[i] = keep + shift(send, FROM);
      }
      scatter<N / 2, FROM / 2, END>(x, lane);
    } else {
      x[0] += shift(x[0], FROM);
      scatter<1, FROM / 2, END>(x, lane);
    }
  }
}
// the first of the numbers that a lane keeps
template <int N, int FROM, int END> __device__ __forceinline__ int kept_of(int lane) {
  if constexpr (FROM >= END && N > 1) return ((lane & FROM) ? N / 2 : 0) + kept_of<N / 2, FROM / 2, END>(lane);
  else return 0;
}
template <int N> __device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int bit = N / 2; bit; bit /= 2) x += shift(x, bit);
  return x;
}
// The instructions alone are not exact to the last place, and the bias of a root adds up over tokens.
__device__ __forceinline__ float inverse_root(float x) {
  float r = rsqrt_fast(x);
  return r + 0.5f * r * (1 - x * r * r);
}
__device__ __forceinline__ float inverse(float x) {
  float r = rcp_fast(x);
  return r + r * (1 - x * r);
}

// where a block's sequence and head lie
struct Sequence {
  int head, length;
  long long program, row, at;  // first kept state; first row of [tokens, heads]

  __device__ __forceinline__ Sequence(const long long* cu_seqlens, int T, int H) {
    program = blockIdx.x;
    head = program % H;
    const long long sequence = program / H;
    long long start = sequence * T;
    length = T;
    row = sequence * ((T + CHECKPOINT - 1) / CHECKPOINT);
    if (cu_seqlens) {
      start = cu_seqlens[sequence];
      length = (int)(cu_seqlens[sequence + 1] - start);
      row = start / CHECKPOINT + sequence;
    }
    at = start * H + head;
  }
};
