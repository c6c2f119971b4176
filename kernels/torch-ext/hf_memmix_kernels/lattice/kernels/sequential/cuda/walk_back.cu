// Lattice's "dec" back in time: dz and dalpha of all tokens, and the gradient of the first state, for 64 slots of 64. Symbols
// and formulas are those of dec_backward.py.
//
// One block per (sequence, head). Four warps ("walkers") hold the gradient g of the slots. Four others ("players") compute
// the states forward again: from the state before half a window, those before every fourth token into `scratch`, half a
// window ahead, and from these the states of four tokens into shared memory, where the walkers read them.
//
// A token needs two sums that depend on each other: over the entries of a slot (x, w), and over the slots (dz). A thread holds
// R slots x E entries; LANES lanes share a slot, SL lanes of a warp and the warps have different slots. `scatter` leaves a part
// of a sum in every lane, and a lane computes the scalars of one slot. x and w are found in two parts: that of g without
// k dz of the token after before dz is known, then k (s . dz) and k (h . dz).

constexpr int LANES = 8, SL = 32 / LANES;
constexpr int E = D / LANES;          // entries per thread
constexpr int R = D / (SL * WARPS);   // slots per thread
constexpr int V = 4;                  // entries that lie together
static_assert(R == 4 && E == 8, "vectors of 4 slots, and of two chunks of 4 entries");
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
// sums of E entries over the lanes of a warp that share them; the upper 16 lanes hold the two chunks of entries in the
// other order, so that all lanes send the second one
__device__ __forceinline__ void scatter_entries(float* x, int lane) {
#pragma unroll
  for (int e = 0; e < V; e++) x[e] += shift(x[e + V], 16);
  scatter<V, 8, LANES>(x, lane);
}
// where a thread stands in its role, and its sequence
struct Place : Sequence {
  int tid, lane, warp, e_lane, s_lane;
  int slot0;  // slots slot0 .. slot0 + R - 1 are this thread's
  int own;    // of these, the one whose scalars this lane computes
  bool owner; // the first of two lanes with this slot's scalars
  int z_at;   // first of the two entries whose sum over slots this lane finds

  __device__ __forceinline__ Place(const long long* cu_seqlens, int T, int H) : Sequence(cu_seqlens, T, H) {
    tid = threadIdx.x % THREADS, lane = tid & 31, warp = tid >> 5, e_lane = lane % LANES, s_lane = lane / LANES;
    slot0 = (warp * SL + s_lane) * R;
    own = kept_of<R, LANES / 2, 1>(lane);
    owner = lane % (LANES / R) == 0;
    const int z = kept_of<E, 16, LANES>(lane);
    z_at = z / V * (LANES * V) + e_lane * V + z % V;
  }
  // the first entry of chunk c
  __device__ __forceinline__ int entry(int c) const { return (c ^ (lane >> 4)) * (LANES * V) + e_lane * V; }
};
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


constexpr int HALF = 32, GROUP = 4, GROUPS = HALF / GROUP;
struct Half {
  float a[HALF][D], b[HALF][D], h[HALF][D], p[HALF][D];
  u16 q[HALF][D], k[HALF][D], dy[HALF][D];
  float gamma[HALF], hh[HALF];
};
struct Shared {
  Half half[2];
  float4 tiles[2][GROUP][R * E / 4][THREADS];  // states before the tokens of a group, as threads hold them
  float zs[2][WARPS][D];
};

extern "C" __global__ void __launch_bounds__(2 * THREADS) lattice_dec_walk_back(
    const float* __restrict__ end_state, const u16* __restrict__ dy, const u16* __restrict__ q, const u16*
    __restrict__ k, const float* __restrict__ gamma, const float* __restrict__ h, const float* __restrict__ p, const
    float* __restrict__ hh, const float* __restrict__ a, const float* __restrict__ b, const float* __restrict__ kept,
    const float* __restrict__ middle, float* __restrict__ dz, float* __restrict__ dalpha, float* __restrict__
    start_state, float* scratch, const long long* __restrict__ cu_seqlens, int T, int H) {
  SHARED(Shared, shared);
  const bool player = uniform(threadIdx.x / THREADS);
  const Place my(cu_seqlens, T, H);
  const int tid = my.tid, lane = my.lane, warp = my.warp, slot0 = my.slot0, own = my.own, length = my.length;
  const long long at = my.at, program = my.program;
  kept += (my.row * H + my.head) * (D * D);
  middle += (my.row * H + my.head) * (D * D);
  int stride = H * D;
  KEEP(stride);
  const int halves = (length + HALF - 1) / HALF;
  auto groups_of = [&](int half) { return (min(length - half * HALF, HALF) + GROUP - 1) / GROUP; };

  if (player) {
    float4* mine = (float4*)scratch + program * (2 * GROUPS) * (D * D / 4) + tid;
    auto row = [&](int t, bool real) { return at + (real ? (long long)t * H : 0); };
    auto fetch = [&](int half) {
      Half& to = shared.half[half & 1];
      const int first = half * HALF;
      constexpr int WIDE = HALF * D / 4, NARROW = HALF * D / 8;
      const float* const floats_of[4] = {a, b, h, p};
      const u16* const halves_of[3] = {q, k, dy};
#pragma unroll
      for (int x = 0; x < 4; x++)
#pragma unroll
        for (int c0 = 0; c0 < WIDE; c0 += THREADS) {
          const int c = c0 + tid, i = c / (D / 4), part = c % (D / 4) * 4;
          const bool real = first + i < length;
          copy16(&to.a[0][0] + (x * HALF + i) * D + part, floats_of[x] + row(first + i, real) * D + part, real);
        }
#pragma unroll
      for (int x = 0; x < 3; x++)
#pragma unroll
        for (int c0 = 0; c0 < NARROW; c0 += THREADS) {
          const int c = c0 + tid, i = c / (D / 8), part = c % (D / 8) * 8;
          const bool real = first + i < length;
          copy16(&to.q[0][0] + (x * HALF + i) * D + part, halves_of[x] + row(first + i, real) * D + part, real);
        }
      if (tid < 2 * HALF) {
        const int i = tid % HALF;
        const bool real = first + i < length;
        copy4(tid < HALF ? &to.gamma[i] : &to.hh[i], (tid < HALF ? gamma : hh) + row(first + i, real), real);
      }
      copies_end();
    };
    auto arrived = [&]() { copies_wait<0>(); sync_role(1); };
    auto state = [&](int half) { return (half & 1 ? middle : kept) + (long long)(half / 2) * H * (D * D); };
    auto before = [&](int half, int group) { return mine + ((half & 1) * GROUPS + group) * (R * E / 4) * THREADS; };
    auto move = [&](float (&S)[R][E], const Half& in, int i) {
      float aa[R], bb[R], hv[E];
      load_slots(aa, in.a[i], my);
      load_slots(bb, in.b[i], my);
      load_entries(hv, in.h[i], my);
#pragma unroll
      for (int r = 0; r < R; r++)
#pragma unroll
        for (int e = 0; e < E; e++) S[r][e] = aa[r] * S[r][e] + bb[r] * hv[e];
    };
    auto put = [&](float4* to, const float (&S)[R][E]) {
#pragma unroll
      for (int i = 0; i < R * E / 4; i++) store4(&to[i * THREADS], &S[i / 2][i % 2 * 4]);
    };
    float ahead[R][E];  // the state that is computed for the half before
    auto play = [&](int half, int group) {  // from the state before `group` - 1 to that before `group`
#pragma unroll 1
      for (int i = 0; i < GROUP; i++) move(ahead, shared.half[half & 1], (group - 1) * GROUP + i);
      put(before(half, group), ahead);
    };
    auto show = [&](int half, int group, int slot) {  // the states of a group
      float S[R][E];
      if (group == 0) load_tile(S, state(half), my);
      else {
        const float4* from = before(half, group);
#pragma unroll
        for (int i = 0; i < R * E / 4; i++) load4(&S[i / 2][i % 2 * 4], &from[i * THREADS]);
      }
#pragma unroll 1
      for (int i = 0; i < GROUP; i++) {
        put(&shared.tiles[slot][i][0][tid], S);
        if (i + 1 < GROUP) move(S, shared.half[half & 1], group * GROUP + i);
      }
    };
    if (halves) {
      fetch(halves - 1);
      arrived();
      load_tile(ahead, state(halves - 1), my);
      const int groups = groups_of(halves - 1);
      for (int group = 1; group < groups; group++) play(halves - 1, group);
      show(halves - 1, groups - 1, 0);
    }
    int slot = 0;
    for (int half = halves - 1; half >= 0; half--) {
      const int groups = groups_of(half);
      for (int group = groups - 1; group >= 0; group--) {
        __syncthreads();
        slot ^= 1;
        if (half) {
          if (group == groups - 1) {
            fetch(half - 1);
            load_tile(ahead, state(half - 1), my);
          }
          if (group == (groups > 1 ? groups - 2 : 0)) arrived();
          if (groups < GROUPS) {  // the last half is short: at once
            if (group == 0)
              for (int i = 1; i < GROUPS; i++) play(half - 1, i);
          } else if (group < GROUPS - 1) {
            play(half - 1, GROUPS - 1 - group);
          }
        }
        if (group) show(half, group - 1, slot);
        else if (half) show(half - 1, GROUPS - 1, slot);
      }
    }
    return;
  }

  float g[R][E], kk[R], sum[E];
  load_tile(g, end_state + program * (D * D), my);
  float* dz_at = dz + at * D + my.entry(my.s_lane) + (long long)(length - 1) * stride;
  float* dalpha_at = dalpha + at * D + slot0 + own + (long long)(length - 1) * stride;
#pragma unroll
  for (int r = 0; r < R; r++) kk[r] = 0;
#pragma unroll
  for (int e = 0; e < E; e++) sum[e] = 0;
  auto sum_of_warps = [&](int parity) {  // dz of the token after
    float zz[WARPS][E];
#pragma unroll
    for (int i = 0; i < WARPS; i++) load_entries(zz[i], shared.zs[parity][i], my);
#pragma unroll
    for (int e = 0; e < E; e++) sum[e] = (zz[0][e] + zz[2][e]) + (zz[1][e] + zz[3][e]);
  };
  int slot = 0, t = length - 1;
  for (int half = halves - 1; half >= 0; half--) {
    const Half& now = shared.half[half & 1];
    for (int group = groups_of(half) - 1; group >= 0; group--) {
      __syncthreads();
#pragma unroll 1
      for (int i = t % HALF; i >= group * GROUP; i--, t--) {
        float S[R][E], hv[E], aa[R], bb[R], qq[R], dd[E], x[R], w[R];
        u32 raw_q[R / 2], raw_dy[E / 2], raw_k[R / 2];
#pragma unroll
        for (int j = 0; j < R * E / 4; j++) load4(&S[j / 2][j % 2 * 4], &shared.tiles[slot][i % GROUP][j][tid]);
        load_entries(hv, now.h[i], my);
        load_slots(aa, now.a[i], my);
        load_slots(bb, now.b[i], my);
        raw<R>(raw_q, &now.q[i][slot0]);
        raw<R>(raw_k, &now.k[i][slot0]);
#pragma unroll
        for (int c = 0; c < E / V; c++) raw<V>(raw_dy + c * V / 2, &now.dy[i][my.entry(c)]);
        floats<R>(qq, raw_q);
        floats<E>(dd, raw_dy);
        // the scalars of the own slot that do not depend on g
        float lo, hi;
        unpack(now.k[i][slot0 + own], lo, hi);
        const float pp = now.p[i][slot0 + own], n = now.hh[i], al = -now.gamma[i] * lo, keep = 1 - al * pp;
        const float be = inverse_root(1 + al * al * fmaxf(n - pp * pp, 0.f)), ao = be * keep, bo = be * al;
        // g without k dz of the token after
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int e = 0; e < E; e++) g[r][e] += qq[r] * dd[e];
#pragma unroll
        for (int r = 0; r < R; r++) {
          x[r] = S[r][0] * g[r][0];
          w[r] = hv[0] * g[r][0];
#pragma unroll
          for (int e = 1; e < E; e++) { x[r] += S[r][e] * g[r][e]; w[r] += hv[e] * g[r][e]; }
        }
        if (t + 1 < length) {
          sync_role(0);
          sum_of_warps((t + 1) & 1);
          store_once(dz_at, sum, my);
          dz_at -= stride;
        }
        float hd = hv[0] * sum[0];
#pragma unroll
        for (int e = 1; e < E; e++) hd += hv[e] * sum[e];
#pragma unroll
        for (int r = 0; r < R; r++) {
          float sd = S[r][0] * sum[0];
#pragma unroll
          for (int e = 1; e < E; e++) sd += S[r][e] * sum[e];
          x[r] += kk[r] * sd;
          w[r] += kk[r] * hd;
        }
        scatter<R, LANES / 2, 1>(x, lane);
        scatter<R, LANES / 2, 1>(w, lane);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int e = 0; e < E; e++) g[r][e] += kk[r] * sum[e];
        float share[E];
#pragma unroll
        for (int e = 0; e < E; e++) {
          share[e] = bb[0] * g[0][e];
#pragma unroll
          for (int r = 1; r < R; r++) share[e] += bb[r] * g[r][e];
        }
        const float sigma = ao * x[0] + bo * w[0], turn = be * (x[0] - be * sigma), along = be * sigma;
        const float da = be * (w[0] - (ao * pp + bo * n) * sigma) - pp * turn;
        const float u = al * turn, c2 = u + keep * along * bo, c3 = u + al * along * ao;
        float weight = my.owner ? al * along * bo : 0.f;
        weight = sum_lanes<LANES>(weight);
        float d2[R], d3[R];
#pragma unroll
        for (int r = 0; r < R; r++) {
          const int from = (lane & ~(LANES - 1)) + r * (LANES / R);
          d3[r] = __shfl_sync(FULL, c3, from);
          d2[r] = __shfl_sync(FULL, c2, from);
        }
#pragma unroll
        for (int e = 0; e < E; e++) {
#pragma unroll
          for (int r = 0; r < R; r++) share[e] -= d3[r] * S[r][e];
          share[e] -= weight * hv[e];
        }
        scatter_entries(share, lane);
        *(float2*)&shared.zs[t & 1][warp][my.z_at] = make_float2(share[0], share[1]);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int e = 0; e < E; e++) g[r][e] = aa[r] * g[r][e] - d2[r] * hv[e];
        floats<R>(kk, raw_k);
        if (my.owner) *dalpha_at = da;
        dalpha_at -= stride;
      }
      slot ^= 1;
    }
  }
  if (length) {
    sync_role(0);
    sum_of_warps(0);
    store_once(dz_at, sum, my);
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int e = 0; e < E; e++) g[r][e] += kk[r] * sum[e];
  }
  store_tile(start_state + program * (D * D), g, my);
}
