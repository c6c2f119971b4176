// The walk of Lattice's "dec" back in time (dec_backward.py has the formulas), for 64 slots of 64.
// launch_cuda.py compiles this file with NVRTC, BF16 = 0 for float16.
//
// One block per (sequence, head). A thread holds R slots x E entries of the state: LANES lanes share a slot, and SL
// lanes of a warp and the warps have different slots. A token needs two sums that depend on each other, over the
// entries of a slot (shuffles) and over the slots (shuffles, then shared memory and one barrier). `scatter` leaves a
// part of the sums in every lane, so that each lane computes the scalars of one slot.
//
// What Triton's kernel does not have: inputs come through cp.async, half a window ahead; a lane computes the scalars
// of one slot; what lies along a slot is removed at every second token. The gradient does not need it, but it must be
// removed: a token multiplies it by a^2, and a can be above 1 where k_i p_i > 0 (p_i = s_i . h), as with values near
// zero; in some layers it grew by orders of magnitude. A loop treats two tokens, because a longer one waits for its
// instructions.

typedef unsigned short u16;
typedef unsigned int u32;
constexpr int D = 64;
constexpr int WARPS = 4, LANES = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int SL = 32 / LANES;              // lanes of a warp with the same entries
constexpr int E = D / LANES;                // entries per thread
constexpr int R = D / (SL * WARPS);      // slots per thread
constexpr int V = 4;                     // entries that lie together
static_assert(R == 4 && E == 8, "vectors of 4 slots, and of two chunks of 4 entries");
constexpr int CHECKPOINT = 64;           // tokens between two states that forward keeps
#define FULL 0xffffffffu

#ifndef EMULATE
#define KEEP(x) asm volatile("" : "+r"(x))  // in a register, and not read again from constant memory
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
__device__ __forceinline__ void fetch_line(const float* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ float rsqrt_fast(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
#endif
__device__ __forceinline__ void unpack(u32 x, float& lo, float& hi) {
#if BF16
  lo = __uint_as_float(x << 16);
  hi = __uint_as_float(x & 0xffff0000u);
#else
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(lo), "=f"(hi) : "r"(x));
#endif
}
template <int N> __device__ __forceinline__ void raw(u32* to, const u16* from) {
  if constexpr (N == 2) to[0] = *(const u32*)from;
  else if constexpr (N == 4) { uint2 x = *(const uint2*)from; to[0] = x.x; to[1] = x.y; }
  else {
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      uint4 x = *(const uint4*)(from + i);
      to[i / 2] = x.x; to[i / 2 + 1] = x.y; to[i / 2 + 2] = x.z; to[i / 2 + 3] = x.w;
    }
  }
}
template <int N> __device__ __forceinline__ void floats(float* to, const u32* from) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) unpack(from[i], to[2 * i], to[2 * i + 1]);
}
__device__ __forceinline__ float shift(float x, int bit) { return __shfl_xor_sync(FULL, x, bit); }
// sums of N numbers over lanes that differ in bits FROM, FROM / 2, ..., END; a lane keeps a part of them
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
// sums of E entries over the lanes of a warp that share them; the upper 16 lanes hold the two chunks of entries in the
// other order, so that all lanes send the second one
__device__ __forceinline__ void scatter_entries(float* x, int lane) {
#pragma unroll
  for (int e = 0; e < V; e++) x[e] += shift(x[e + V], 16);
  scatter<V, 8, LANES>(x, lane);
}
template <int N> __device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
  for (int bit = N / 2; bit; bit /= 2) x += shift(x, bit);
  return x;
}
__device__ __forceinline__ float inverse_root(float x) {
  float r = rsqrt_fast(x);
  return r + 0.5f * r * (1 - x * r * r);  // the instruction alone is biased, and the bias adds up over tokens
}

// where a thread stands, and its sequence
struct Place {
  int tid, lane, warp, e_lane, s_lane;
  int slot0;  // slots slot0 .. slot0 + R - 1 are this thread's
  int own;    // of these, the one whose scalars this lane computes
  bool owner; // the only lane, or the first of two, with this slot's scalars
  int z_at;   // first of the two entries whose sum over slots this lane finds
  int head, length;
  long long program, row, at;  // first checkpoint; first row of [tokens, heads]

  __device__ __forceinline__ Place(const long long* cu_seqlens, int T, int H) {
    tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, e_lane = lane % LANES, s_lane = lane / LANES;
    slot0 = (warp * SL + s_lane) * R;
    own = kept_of<R, LANES / 2, 1>(lane);
    owner = lane % (LANES / R) == 0;
    const int z = kept_of<E, 16, LANES>(lane);
    z_at = z / V * (LANES * V) + e_lane * V + z % V;
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
  // the first entry of chunk c
  __device__ __forceinline__ int entry(int c) const { return (c ^ (lane >> 4)) * (LANES * V) + e_lane * V; }
};
__device__ __forceinline__ void load4(float* x, const void* from) {
  float4 y = *(const float4*)from;
  x[0] = y.x; x[1] = y.y; x[2] = y.z; x[3] = y.w;
}
__device__ __forceinline__ void store4(void* to, const float* x) {
  *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
}
// this thread's entries of a vector, its slots of one, and its part of a tile
__device__ __forceinline__ void load_entries(float* x, const float* from, const Place& my) {
#pragma unroll
  for (int c = 0; c < E / V; c++) load4(x + V * c, from + my.entry(c));
}
__device__ __forceinline__ void store_entries(float* to, const float* x, const Place& my) {
#pragma unroll
  for (int c = 0; c < E / V; c++) store4(to + my.entry(c), x + V * c);
}
__device__ __forceinline__ void load_slots(float* x, const float* from, const Place& my) { load4(x, from + my.slot0); }
__device__ __forceinline__ void load_tile(float (&S)[R][E], const float* from, const Place& my) {
#pragma unroll
  for (int r = 0; r < R; r++) load_entries(S[r], from + (my.slot0 + r) * D, my);
}
__device__ __forceinline__ void store_tile(float* to, const float (&S)[R][E], const Place& my) {
#pragma unroll
  for (int r = 0; r < R; r++) store_entries(to + (my.slot0 + r) * D, S[r], my);
}
// stores a vector of which every warp has all entries
__device__ __forceinline__ void store_once(float* to, const float* x, const Place& my) {
  float y[V];
#pragma unroll
  for (int e = 0; e < V; e++) y[e] = my.s_lane ? x[V + e] : x[e];
  if (my.warp == 0 && my.s_lane < E / V) store4(to, y);
}

// Back in time: dz and dalpha of all tokens, and the gradient of the first state.
constexpr int HALF = 32;
struct Half {
  float a[HALF][D], b[HALF][D], h[HALF][D], p[HALF][D];
  u16 q[HALF][D], k[HALF][D], dy[HALF][D];
  float gamma[HALF], hh[HALF];
};
struct Shared {
  Half half[2];
  float zs[2][WARPS][D];
};

extern "C" __global__ void __launch_bounds__(THREADS) lattice_dec_walk_back(
    const float* __restrict__ end_state, const u16* __restrict__ dy, const u16* __restrict__ q, const u16*
    __restrict__ k, const float* __restrict__ gamma, const float* __restrict__ h, const float* __restrict__ p, const
    float* __restrict__ hh, const float* __restrict__ a, const float* __restrict__ b, const float* __restrict__ kept,
    const float* __restrict__ middle, float* __restrict__ dz, float* __restrict__ dalpha, float* __restrict__
    start_state, float* scratch, const long long* __restrict__ cu_seqlens, int T, int H) {
#ifdef EMULATE
  static Shared shared;
#else
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *(Shared*)memory;
#endif
  const Place my(cu_seqlens, T, H);
  const int tid = my.tid, lane = my.lane, warp = my.warp, slot0 = my.slot0, own = my.own, length = my.length;
  const long long at = my.at, program = my.program;
  kept += (my.row * H + my.head) * (D * D);
  middle += (my.row * H + my.head) * (D * D);
  float4* mine = (float4*)scratch + program * (HALF / 2) * (D * D / 4) + tid;
  int stride = H * D;
  KEEP(stride);

  auto row = [&](int t, bool real) { return at + (real ? (long long)t * H : 0); };
  auto fetch = [&](int half) {
    Half& to = shared.half[half & 1];
    const int first = half * HALF;
    constexpr int WIDE = HALF * D / 4, NARROW = HALF * D / 8;
    const float* const wide[4] = {a, b, h, p};
    const u16* const narrow[3] = {q, k, dy};
#pragma unroll
    for (int x = 0; x < 4; x++)
#pragma unroll
      for (int c0 = 0; c0 < WIDE; c0 += THREADS) {
        const int c = c0 + tid, i = c / (D / 4), part = c % (D / 4) * 4;
        const bool real = first + i < length;
        copy16(&to.a[0][0] + (x * HALF + i) * D + part, wide[x] + row(first + i, real) * D + part, real);
      }
#pragma unroll
    for (int x = 0; x < 3; x++)
#pragma unroll
      for (int c0 = 0; c0 < NARROW; c0 += THREADS) {
        const int c = c0 + tid, i = c / (D / 8), part = c % (D / 8) * 8;
        const bool real = first + i < length;
        copy16(&to.q[0][0] + (x * HALF + i) * D + part, narrow[x] + row(first + i, real) * D + part, real);
      }
    if (tid < 2 * HALF) {
      const int i = tid % HALF;
      const bool real = first + i < length;
      copy4(tid < HALF ? &to.gamma[i] : &to.hh[i], (tid < HALF ? gamma : hh) + row(first + i, real), real);
    }
  };
  const int halves = (length + HALF - 1) / HALF;
  if (halves) fetch(halves - 1);
  copies_end();
  float g[R][E];
  load_tile(g, end_state + program * (D * D), my);

  for (int half = halves - 1; half >= 0; half--) {
    Half& now = shared.half[half & 1];
    copies_wait<0>();
    __syncthreads();
    if (half) fetch(half - 1);
    copies_end();
    const int tokens = length - half * HALF < HALF ? length - half * HALF : HALF, pairs = (tokens + 1) / 2;
    float S[R][E];
    auto state = [&](int half) { return (half & 1 ? middle : kept) + (long long)(half / 2) * H * (D * D); };
    load_tile(S, state(half), my);
    if (half) fetch_line(state(half - 1) + tid * (D * D / THREADS));
    auto move = [&](int t) {
      float aa[R], bb[R], hv[E];
      load_slots(aa, now.a[t], my);
      load_slots(bb, now.b[t], my);
      load_entries(hv, now.h[t], my);
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int e = 0; e < E; e++) S[r][e] = aa[r] * S[r][e] + bb[r] * hv[e];
    };
    // forward over the half: the slots before each pair of tokens; each thread reads what it wrote
    for (int j = 0; j < pairs - 1; j++) {
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int e = 0; e < E; e += 4)
          store4(&mine[(j * (R * E / 4) + (r * E + e) / 4) * THREADS], &S[r][e]);
      move(2 * j);
      move(2 * j + 1);
    }
    // and back
    float* dz_at = dz + (at + (long long)half * HALF * H) * D + my.entry(my.s_lane);
    float* dalpha_at = dalpha + (at + (long long)half * HALF * H) * D + slot0 + own;
    auto add = [&](int t) {  // the gradient that comes through the output of token t
      u32 x[R / 2], y[E / 2];
      float qq[R], dd[E];
      raw<R>(x, &now.q[t][slot0]);
      floats<R>(qq, x);
#pragma unroll
      for (int c = 0; c < E / V; c++) raw<V>(y + c * V / 2, &now.dy[t][my.entry(c)]);
      floats<E>(dd, y);
#pragma unroll
      for (int r = 0; r < R; r++) {
#pragma unroll
        for (int e = 0; e < E; e++) g[r][e] += qq[r] * dd[e];
      }
    };
    auto token = [&](const float (&S)[R][E], int t, int parity) {
      float hv[E], aa[R], bb[R];
      load_entries(hv, now.h[t], my);
      load_slots(aa, now.a[t], my);
      load_slots(bb, now.b[t], my);
      // the scalars of the own slot that do not depend on g
      float lo, hi;
      unpack(now.k[t][slot0 + own], lo, hi);
      const float pp = now.p[t][slot0 + own], n = now.hh[t], al = -now.gamma[t] * lo, keep = 1 - al * pp;
      const float be = inverse_root(1 + al * al * fmaxf(n - pp * pp, 0.f)), ao = be * keep, bo = be * al;
      add(t);
      float x[R], w[R];
#pragma unroll
      for (int r = 0; r < R; r++) {
        x[r] = S[r][0] * g[r][0];
        w[r] = hv[0] * g[r][0];
#pragma unroll
        for (int e = 1; e < E; e++) { x[r] += S[r][e] * g[r][e]; w[r] += hv[e] * g[r][e]; }
      }
      scatter<R, LANES / 2, 1>(x, lane);
      scatter<R, LANES / 2, 1>(w, lane);
      const float sigma = ao * x[0] + bo * w[0], turn = be * (x[0] - be * sigma), along = be * sigma;
      const float da = be * (w[0] - (ao * pp + bo * n) * sigma) - pp * turn;
      const float u = al * turn, c2 = u + keep * along * bo, c3 = u + al * along * ao;
      float weight = my.owner ? al * along * bo : 0.f;
      weight = sum_lanes<LANES>(weight);
      float share[E], d1[R], d2[R], d3[R];  // d1: what lies along the slot
#pragma unroll
      for (int r = 0; r < R; r++) {
        const int from = (lane & ~(LANES - 1)) + r * (LANES / R);
        d3[r] = __shfl_sync(FULL, c3, from);
        d2[r] = __shfl_sync(FULL, c2, from);
        if (!parity) d1[r] = __shfl_sync(FULL, keep * along * ao, from);
      }
#pragma unroll
      for (int e = 0; e < E; e++) {
        share[e] = -weight * hv[e];
#pragma unroll
        for (int r = 0; r < R; r++) share[e] += bb[r] * g[r][e];
#pragma unroll
        for (int r = 0; r < R; r++) share[e] -= d3[r] * S[r][e];
      }
      scatter_entries(share, lane);
      *(float2*)&shared.zs[parity][warp][my.z_at] = make_float2(share[0], share[1]);
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int e = 0; e < E; e++) {
          g[r][e] = aa[r] * g[r][e] - d2[r] * hv[e];
          if (!parity) g[r][e] -= d1[r] * S[r][e];
        }
      u32 raw_k[R / 2];
      float kk[R];
      raw<R>(raw_k, &now.k[t][slot0]);
      floats<R>(kk, raw_k);
      __syncthreads();
      float zz[WARPS][E], sum[E];
#pragma unroll
      for (int i = 0; i < WARPS; i++) load_entries(zz[i], shared.zs[parity][i], my);
#pragma unroll
      for (int e = 0; e < E; e++) {
#pragma unroll
        for (int m = WARPS / 2; m; m /= 2)
#pragma unroll
          for (int i = 0; i < m; i++) zz[i][e] += zz[i + m][e];
        sum[e] = zz[0][e];
      }
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int e = 0; e < E; e++) g[r][e] += kk[r] * sum[e];
      if (my.owner) dalpha_at[t * stride] = da;
      store_once(dz_at + t * stride, sum, my);
    };
    for (int j = pairs - 1; j >= 0; j--) {
      float next[R][E];
      const int before = j ? j - 1 : 0;
      {
        float between[R][E];
        float aa[R], bb[R], hv[E];
        load_slots(aa, now.a[2 * j], my);
        load_slots(bb, now.b[2 * j], my);
        load_entries(hv, now.h[2 * j], my);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int e = 0; e < E; e++) between[r][e] = aa[r] * S[r][e] + bb[r] * hv[e];
        if (2 * j + 1 < tokens) token(between, 2 * j + 1, 1);  // the last pair may be a single token
      }
      if (j) {
#pragma unroll
        for (int i = 0; i < R * E / 4; i++) {
          load4(&next[4 * i / E][4 * i % E], &mine[(before * (R * E / 4) + i) * THREADS]);
        }
      }
      token(S, 2 * j, 0);
      if (j) {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int e = 0; e < E; e++) S[r][e] = next[r][e];
      }
    }
  }
  store_tile(start_state + program * (D * D), g, my);
}
