// Lattice's "dec" forward, by the products of the slots (README, "The walk by products"), for 64 slots of 64.
//
// One block per (sequence, head). With N = S^T S, p = S^T h = N x - S^T v needs one sum per token, over x = k alone, where
// S k and then S^T h would be two that depend on each other. Four warps ("walkers") hold N and find p. Four others
// ("keepers") hold S, and work beside them: h = S k - v, y = S q, and S^T v of the next token. Two barriers per token: after the
// first, R = T^T h, kappa and h are known to all, after the second x of the next token.
//
// Slots are not normalised at once: S = T A, A a number per slot, and the block holds T and N = T^T T. With x = A k a write is
// T' = T + h kappa^T, N' = N + R kappa^T + kappa R^T + |h|^2 kappa kappa^T. Where A leaves 1/64 .. 4, a slot is scaled in that
// token. Before every kept state, slots are divided by their norms, and N is found anew.

constexpr int STAGE = 8, RING = 32;     // tokens that are fetched together, and tokens in shared memory
constexpr int PITCH = D + 4;            // of a row of S in shared memory
constexpr float LEAST = 1.f / 64, MOST = 4;

#ifdef EMULATE
typedef char* Address;
static Address address(const void* x) { return (char*)x; }
template <int AT> static void get4(float* x, Address a) { memcpy(x, a + AT, 16); }
template <int AT> static float get(Address a) { float x; memcpy(&x, a + AT, 4); return x; }
template <int AT> static void put(Address a, float x) { memcpy(a + AT, &x, 4); }
template <int AT> static float get_raw(Address a) { u16 x; memcpy(&x, a + AT, 2); return wide(x); }
template <int AT> static void get_raw4(float* x, Address a) {
  u32 y[2];
  memcpy(y, a + AT, 8);
  unpack(y[0], x[0], x[1]);
  unpack(y[1], x[2], x[3]);
}
#else
typedef u32 Address;  // in shared memory; constants are added by the instruction itself
__device__ __forceinline__ Address address(const void* x) { return (u32)__cvta_generic_to_shared(x); }
template <int AT> __device__ __forceinline__ void get4(float* x, Address a) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(a), "n"(AT) : "memory");
}
template <int AT> __device__ __forceinline__ float get(Address a) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1 + %2];" : "=f"(x) : "r"(a), "n"(AT) : "memory");
  return x;
}
template <int AT> __device__ __forceinline__ void put(Address a, float x) {
  asm volatile("st.shared.f32 [%0 + %1], %2;" ::"r"(a), "n"(AT), "f"(x) : "memory");
}
template <int AT> __device__ __forceinline__ float get_raw(Address a) {
  u16 x;
  asm volatile("ld.shared.b16 %0, [%1 + %2];" : "=h"(x) : "r"(a), "n"(AT) : "memory");
  return wide(x);
}
template <int AT> __device__ __forceinline__ void get_raw4(float* x, Address a) {
  u32 lo, hi;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2 + %3];" : "=r"(lo), "=r"(hi) : "r"(a), "n"(AT) : "memory");
  unpack(lo, x[0], x[1]);
  unpack(hi, x[2], x[3]);
}
#endif
template <int AT> __device__ __forceinline__ void get16(float* x, Address a) {  // a lane's 16 columns
  get4<AT>(x, a);
  get4<AT + 64>(x + 4, a);
  get4<AT + 128>(x + 8, a);
  get4<AT + 192>(x + 12, a);
}
template <int AT> __device__ __forceinline__ void get8(float* x, Address a) {  // a lane's 8 columns
  get4<AT>(x, a);
  get4<AT + 128>(x + 4, a);
}

struct Shared {
  u16 q[RING][D], k[RING][D], v[RING][D];
  float gamma[RING];
  float x[D], xq[D];          // A k of the token, A q of the token before
  float R[D], kappa[D], scale[D], h[D];
  float u[WARPS][D];          // shares of T^T v
  float A[D], inverse[D];
  float S[D][PITCH];          // entry, slot
};
constexpr int ROW = 2 * D, VECTOR = 4 * D;  // bytes
constexpr int AT_Q = 0, AT_K = AT_Q + RING * ROW, AT_V = AT_K + RING * ROW, AT_GAMMA = AT_V + RING * ROW,
              AT_X = AT_GAMMA + RING * 4, AT_XQ = AT_X + VECTOR, AT_R = AT_XQ + VECTOR, AT_KAPPA = AT_R + VECTOR,
              AT_SCALE = AT_KAPPA + VECTOR, AT_H = AT_SCALE + VECTOR, AT_U = AT_H + VECTOR;

template <bool SAVES> __device__ __forceinline__ void walk(
    const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, const float* __restrict__ gamma,
    const float* __restrict__ start_state, u16* __restrict__ o, float* __restrict__ final_state,
    float* __restrict__ kept, float* __restrict__ h_out, float* __restrict__ p_out,
    const long long* __restrict__ cu_seqlens, int T, int H) {
  SHARED(Shared, in);
  const int tid = threadIdx.x, lane = tid & 31, role_warp = uniform(tid >> 5), warp = role_warp % WARPS;
  const bool keeper = role_warp >= WARPS;
  const Sequence my(cu_seqlens, T, H);
  const int length = my.length;
  const long long at = my.at, program = my.program;
  const int stride = H * D;
  q += at * D; k += at * D; v += at * D; o += at * D; gamma += at;
  if (SAVES) {
    h_out += at * D; p_out += at * D;
    kept += (my.row * H + my.head) * (D * D);
  }

  auto fetch = [&](int first) {
#pragma unroll
    for (int c0 = 0; c0 < STAGE * 24; c0 += 2 * THREADS) {
      const int c = c0 + tid;
      if (c < STAGE * 24) {
        const int which = c / (STAGE * 8), t = first + c / 8 % STAGE, part = c % 8 * 8;
        const u16* from = which == 0 ? q : which == 1 ? k : v;
        const bool real = t < length;
        u16* to = &in.q[0][0] + (which * RING + t % RING) * D + part;
        copy16(to, from + (real ? (long long)t * stride : 0) + part, real);
      }
    }
    if (tid < STAGE) {
      const int t = first + tid;
      const bool real = t < length;
      copy4(&in.gamma[t % RING], gamma + (real ? (long long)t * H : 0), real);
    }
    copies_end();
  };
  fetch(0); fetch(STAGE); fetch(2 * STAGE);

  // walkers: four lanes share slots `row`, row + 1 and have 16 columns each, in chunks of 4; a lane finds the scalars of
  // slot `own`
  const int part = lane & 3, row = warp * 16 + (lane >> 2) * 2, own = row + (part & 1);
  // keepers: eight lanes share four entries and have 8 slots each, in chunks of 4; after a sum, a lane has entry `mine`
  const int column = lane & 7, entry = warp * 16 + (lane >> 3) * 4;
  const int mine = entry + kept_of<4, 4, 1>(lane), pair = kept_of<8, 16, 8>(lane);
  float N[2][16];  // of walkers
  float S[4][8];   // of keepers: S[e][i] is entry `entry` + e of slot i / 4 * 32 + column * 4 + i % 4
  float A = 1;
  bool bad = false;
  const Address base = address(&in);
  Address by_part = base + part * 16, by_own = base + own * 4, by_row = base + row * 4, by_column = base + column * 16;
  Address by_entry = base + entry * 4, by_mine = base + mine * 4, raw_own = base + own * 2, raw_part = base + part * 8;
  Address raw_entry = base + entry * 2, raw_mine = base + mine * 2;
  Address by_pair = base + (pair / 4 * 32 + column * 4 + pair % 4 + warp * D) * 4;
  KEEP(by_part); KEEP(by_own); KEEP(by_row); KEEP(by_column); KEEP(by_entry); KEEP(by_mine); KEEP(raw_own);
  KEEP(raw_part); KEEP(raw_entry); KEEP(raw_mine); KEEP(by_pair);

  auto times = [&](Address x) {  // entry `mine` of S x
    float y[8], z[4];
    get8<0>(y, x);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      z[e] = S[e][0] * y[0];
#pragma unroll
      for (int i = 1; i < 8; i++) z[e] += S[e][i] * y[i];
    }
    scatter<4, 4, 1>(z, lane);
    return z[0];
  };
  auto values = [&](int t) {  // shares of S^T v of token t
    float w[4], u[8];
    get_raw4<AT_V>(w, raw_entry + (t & (RING - 1)) * ROW);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u[i] = S[0][i] * w[0];
#pragma unroll
      for (int e = 1; e < 4; e++) u[i] += S[e][i] * w[e];
    }
    scatter<8, 16, 8>(u, lane);
    put<AT_U>(by_pair, u[0]);
    put<AT_U + 4>(by_pair, u[1]);
  };
  auto write_y = [&](int t) {
    const float y = times(by_column + AT_XQ);
    if (!(lane & 1)) o[(long long)t * stride + mine] = narrow(y);
  };
  // slots of unit norm in S, N found anew; the state goes to `to`
  auto renew = [&](float* to) {
    if (keeper) {
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          *(float4*)&in.S[entry + e][c * 32 + column * 4] =
              make_float4(S[e][4 * c], S[e][4 * c + 1], S[e][4 * c + 2], S[e][4 * c + 3]);
    } else if (part < 2) {
      in.A[own] = A;
    }
    __syncthreads();
    {
      const int slot = tid >> 2;
      float n = 0;
#pragma unroll
      for (int e = 0; e < 16; e++) {
        const float s = in.S[e * 4 + part][slot];
        n += s * s;
      }
      n += shift(n, 1);
      n += shift(n, 2);
      n = n > 0 ? inverse_root(n) : 0;
      if (part == 0) in.inverse[slot] = in.A[slot] < 0 ? -n : n;
    }
    __syncthreads();
    if (to) {
#pragma unroll
      for (int c = 0; c < D * D; c += 2 * THREADS) {
        const int slot = (c + tid) / D, e = tid % D;
        to[c + tid] = in.S[e][slot] * in.inverse[slot];
      }
    }
    if (keeper) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float n = in.inverse[i / 4 * 32 + column * 4 + i % 4];
#pragma unroll
        for (int e = 0; e < 4; e++) S[e][i] *= n;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 16; j++) N[0][j] = N[1][j] = 0;
#pragma unroll 4
      for (int e = 0; e < D; e++) {
        const float2 s = *(const float2*)&in.S[e][row];
        float y[16];
#pragma unroll
        for (int c = 0; c < 4; c++) load4(y + 4 * c, &in.S[e][c * 16 + part * 4]);
#pragma unroll
        for (int j = 0; j < 16; j++) { N[0][j] += s.x * y[j]; N[1][j] += s.y * y[j]; }
      }
#pragma unroll
      for (int j = 0; j < 16; j++) {
        const float n = in.inverse[j / 4 * 16 + part * 4 + j % 4];
        N[0][j] *= n * in.inverse[row];
        N[1][j] *= n * in.inverse[row + 1];
      }
      A = 1;
    }
  };

  if (keeper) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float s[4];
      load4(s, start_state + program * (D * D) + (i / 4 * 32 + column * 4 + i % 4) * D + entry);
#pragma unroll
      for (int e = 0; e < 4; e++) S[e][i] = s[e];
    }
  }
  if (tid < D) in.scale[tid] = 1;
  copies_wait<2>();
  auto begin = [&](int t) {  // a window and a stage of inputs
    if (t % CHECKPOINT == 0) {
      if (keeper && t) write_y(t - 1);
      renew(SAVES ? kept : nullptr);
      if (SAVES) kept += (long long)H * D * D;
      if (keeper) values(t);
      else if (part < 2) in.x[own] = wide(in.k[t & (RING - 1)][own]);
      __syncthreads();
    }
    if (t % STAGE == 0) {
      copies_wait<1>();       // the tokens of the next stage, which are read from the last token of this one on
      fetch(t + 3 * STAGE);   // in the place of the stage before the last
    }
  };
  if (keeper) {
    for (int t = 0; t < length; t++) {
      begin(t);
      const int i = t & (RING - 1);
      const float h = times(by_column + AT_X) - get_raw<AT_V>(raw_mine + i * ROW);
      if (!(lane & 1)) put<AT_H>(by_mine, h);
      if (t % CHECKPOINT) write_y(t - 1);
      if (SAVES && !(lane & 1)) h_out[(long long)t * stride + mine] = h;
      const bool scales = __syncthreads_or(false);
      float h4[4], kappas[8];
      get4<AT_H>(h4, by_entry);
      get8<AT_KAPPA>(kappas, by_column);
      if (scales) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const float g = in.scale[j / 4 * 32 + column * 4 + j % 4];
#pragma unroll
          for (int e = 0; e < 4; e++) S[e][j] *= g;
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) S[e][j] += kappas[j] * h4[e];
      values(t + 1);
      __syncthreads();
    }
  } else {
    for (int t = 0; t < length; t++) {
      begin(t);
      const int i = t & (RING - 1), next = (t + 1) & (RING - 1);
      float x[16], r[2];
      get16<AT_X>(x, by_part);
      const float u = (get<AT_U>(by_own) + get<AT_U + VECTOR>(by_own)) +
                      (get<AT_U + 2 * VECTOR>(by_own) + get<AT_U + 3 * VECTOR>(by_own));
      const float al = -get<AT_GAMMA>(base + i * 4) * get_raw<AT_K>(raw_own + i * ROW);
#pragma unroll
      for (int a = 0; a < 2; a++) {
        float even = N[a][0] * x[0], odd = N[a][1] * x[1];
#pragma unroll
        for (int j = 2; j < 16; j += 2) { even += N[a][j] * x[j]; odd += N[a][j + 1] * x[j + 1]; }
        r[a] = even + odd;
      }
      scatter<2, 1, 1>(r, lane);
      const float R = r[0] + shift(r[0], 2) - u, p = A * R, m = A * (1 - al * p);
      const bool was = bad;
      bad = !(fabsf(m) >= LEAST && fabsf(m) <= MOST);
      const float kappa = bad ? al : al * inverse(m);
      put<0>(by_own + (part < 2 ? AT_R : AT_KAPPA), part < 2 ? R : kappa);
      if (bad || was) put<AT_SCALE>(by_own, bad ? m : 1.f);
      const bool scales = __syncthreads_or(bad);
      float h[16], kappas[16], Rs[16], R2[2], kappa2[2], dots[4] = {0, 0, 0, 0};
      get16<AT_H>(h, by_part);
      // x of the next token for some lanes, A q for the others
      const float kq = get_raw<0>(raw_own + (part < 2 ? next * ROW + AT_K : i * ROW + AT_Q));
      get16<AT_KAPPA>(kappas, by_part);
      get16<AT_R>(Rs, by_part);
      R2[0] = get<AT_R>(by_row); R2[1] = get<AT_R + 4>(by_row);
      kappa2[0] = get<AT_KAPPA>(by_row); kappa2[1] = get<AT_KAPPA + 4>(by_row);
#pragma unroll
      for (int j = 0; j < 16; j++) dots[j & 3] += h[j] * h[j];
      float hh = (dots[0] + dots[1]) + (dots[2] + dots[3]);
      if (scales) {
        const float f[2] = {in.scale[row], in.scale[row + 1]};
#pragma unroll
        for (int j = 0; j < 16; j++) {
          const float g = in.scale[j / 4 * 16 + part * 4 + j % 4];
          Rs[j] *= g;
          N[0][j] *= f[0] * g;
          N[1][j] *= f[1] * g;
        }
        R2[0] *= f[0];
        R2[1] *= f[1];
      }
#pragma unroll
      for (int j = 0; j < 16; j++) {
        N[0][j] += R2[0] * kappas[j];
        N[1][j] += R2[1] * kappas[j];
        N[0][j] += kappa2[0] * Rs[j];
        N[1][j] += kappa2[1] * Rs[j];
      }
      hh = sum_lanes<4>(hh);
      const float be = inverse_root(1 + al * al * fmaxf(hh - p * p, 0.f));
      A = be * (bad ? 1.f : m);
      put<0>(by_own + (part < 2 ? AT_X : AT_XQ), A * kq);
      if (SAVES && part < 2) p_out[(long long)t * stride + own] = p;
      kappa2[0] *= hh; kappa2[1] *= hh;
#pragma unroll
      for (int j = 0; j < 16; j++) { N[0][j] += kappa2[0] * kappas[j]; N[1][j] += kappa2[1] * kappas[j]; }
      __syncthreads();
    }
  }
  if (keeper && length) write_y(length - 1);
  renew(final_state + program * (D * D));
}
#define ARGUMENTS                                                                                                    \
  const u16 *q, const u16 *k, const u16 *v, const float *gamma, const float *start_state, u16 *o, float *final_state, \
      float *kept, float *h_out, float *p_out, const long long *cu_seqlens, int T, int H
extern "C" __global__ void __launch_bounds__(2 * THREADS) lattice_dec_walk(ARGUMENTS) {
  walk<false>(q, k, v, gamma, start_state, o, final_state, kept, h_out, p_out, cu_seqlens, T, H);
}
extern "C" __global__ void __launch_bounds__(2 * THREADS) lattice_dec_walk_saving(ARGUMENTS) {
  walk<true>(q, k, v, gamma, start_state, o, final_state, kept, h_out, p_out, cu_seqlens, T, H);
}
