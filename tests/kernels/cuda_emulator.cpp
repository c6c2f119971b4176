// Runs a kernel of CUDA C++ on a CPU: every thread of a block is a coroutine, which waits in barriers and shuffles.
// Compiled with -DSOURCE='"walk_back.cu"'; bfloat16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define EMULATE 1
#define BF16 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define KEEP(x)
using std::min;
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int LIVE = 128, LANE = 32, STACK = 1 << 17;
static struct { unsigned x; } threadIdx, blockIdx;
static ucontext_t scheduler, contexts[LIVE];
static bool ended[LIVE];
static int current;
static void (*body)();

static void wait() {
  const int self = current;
  swapcontext(&contexts[self], &scheduler);
  current = threadIdx.x = self;
}
struct Barrier {
  int count = 0, turn = 0;
  void sync(int threads) {
    const int mine = turn;
    if (++count == threads) {
      count = 0;
      turn++;
    } else
      while (turn == mine) wait();
  }
};
static Barrier block, warps[LIVE / LANE];
static float values[LIVE / LANE][2][LANE];
static void __syncthreads() { block.sync(LIVE); }
static float __shfl_sync(unsigned, float x, int from) {
  Barrier& warp = warps[current / LANE];
  float* sent = values[current / LANE][warp.turn & 1];
  sent[current % LANE] = x;
  warp.sync(LANE);
  return sent[from];
}
static float __shfl_xor_sync(unsigned mask, float x, int bit) { return __shfl_sync(mask, x, current % LANE ^ bit); }
static void copy16(void* to, const void* from, bool real) { real ? memcpy(to, from, 16) : memset(to, 0, 16); }
static void copy4(void* to, const void* from, bool real) { real ? memcpy(to, from, 4) : memset(to, 0, 4); }
static void copies_end() {}
template <int N> static void copies_wait() {}
static float rsqrt_fast(float x) { return 1 / std::sqrt(x) * (1 + 1e-7f); }
static float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
static void fetch_line(const float*) {}
#include SOURCE

static void start() {
  body();
  ended[current] = true;
  wait();
}
static void run(int blocks, void (*kernel)()) {
  static std::vector<char> stacks(size_t(LIVE) * STACK);
  body = kernel;
  for (blockIdx.x = 0; blockIdx.x < unsigned(blocks); blockIdx.x++) {
    for (int i = 0; i < LIVE; i++) {
      getcontext(&contexts[i]);
      contexts[i].uc_stack.ss_sp = &stacks[size_t(i) * STACK];
      contexts[i].uc_stack.ss_size = STACK;
      makecontext(&contexts[i], start, 0);
      ended[i] = false;
    }
    while (!std::all_of(ended, ended + LIVE, [](bool x) { return x; }))
      for (int i = 0; i < LIVE; i++)
        if (!ended[i]) {
          current = threadIdx.x = i;
          swapcontext(&scheduler, &contexts[i]);
        }
  }
}
// the arguments of the kernels, in their order
static void* const* given;
static int int_at(int i) { return *(int*)given[i]; }
#define F(i) (float*)given[i]
#define H(i) (u16*)given[i]
#define L(i) (long long*)given[i]
extern "C" void walk_back(int blocks, void* const* arguments) {
  given = arguments;
  run(blocks, [] {
    lattice_dec_walk_back(F(0), H(1), H(2), H(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14),
                          F(15), L(16), int_at(17), int_at(18));
  });
}
