"""Scalar-decay linear attention in Triton: chunks on tensor cores, forward, backward and a one-launch decode step.

S_t = e^g S_{t-1} + k_t v_t^T,  o_t = scale * S_t^T q_t

One scan kernel serves both directions: it stores the state before every chunk, or its gradient after every chunk.
Products that need a transposed score tile compute it by a dot of its own from loaded operands: Triton 3.4 - 3.7.0
miscompiles the transpose of an accumulator on Hopper.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._chunks import chunk_table
from .._common import compute_dtype, num_sequences


@triton.jit
def _sequence(i_n, cu_seqlens, T, PACKED: tl.constexpr):
    """First row (int64) and length of sequence i_n."""
    if PACKED:  # noqa: SIM102
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        bos = i_n.to(tl.int64) * T
        length = T
    return bos, length


@triton.jit
def _chunk(i_c, cu_seqlens, first, sequence, T, NT, N, BT: tl.constexpr, PACKED: tl.constexpr):
    """First row of chunk i_c and the number of its tokens, 0 or less in a program beyond the last chunk."""
    if PACKED:  # noqa: SIM102
        # the grid is an upper bound: of programs beyond the last chunk `sequence` is N
        i_n = tl.load(sequence + i_c)
        last = tl.minimum(i_n, N - 1)
        bos, length = _sequence(last, cu_seqlens, T, PACKED)
        length = tl.where(i_n < N, length, 0)
        start = (i_c - tl.load(first + last)) * BT
    else:
        bos, length = _sequence(i_c // NT, cu_seqlens, T, PACKED)
        start = (i_c % NT) * BT
    return bos + start, tl.minimum(length - start, BT)


@triton.jit
def gla_cumsum_kernel(
    g, G, cu_seqlens, first, sequence, T, NT, N, H, rows,
    BT: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """G [H, rows] = cumsum of g [rows, H] inside each chunk."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    bos, length = _chunk(i_c, cu_seqlens, first, sequence, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_h = tl.arange(0, BT), i_h * BH + tl.arange(0, BH)
    mask = (o_t < length)[:, None] & (o_h < H)[None, :]
    b_g = tl.load(g + (bos + o_t)[:, None] * H + o_h[None, :], mask=mask, other=0)
    tl.store(G + o_h[None, :].to(tl.int64) * rows + (bos + o_t)[:, None], tl.cumsum(b_g, 0), mask=mask)


@triton.jit
def gla_scan_kernel(
    a, b, G, initial, states, final, cu_seqlens, first, scale, T, NT, H, K, V, rows,
    GROUPS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """S <- e^(G_C) S + a^T (w * b) over the chunks: a, b = k, v forward and q, do in reverse."""
    i_k, i_v = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK) % tl.cdiv(V, BV)
    i_nh = tl.program_id(0) // (tl.cdiv(K, BK) * tl.cdiv(V, BV))
    i_n, i_h = i_nh // H, i_nh % H
    bos, length = _sequence(i_n, cu_seqlens, T, PACKED)
    i_c = tl.load(first + i_n) if PACKED else i_n * NT
    chunks = tl.cdiv(length, BT)
    o_k, o_v, o_t = i_k * BK + tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, BT)
    m_k, m_v = o_k < K, o_v < V
    o_s = o_k[:, None] * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    heads = H // GROUPS
    i_g = i_h // GROUPS
    p_G = G + i_h.to(tl.int64) * rows + bos
    b_s = tl.load(initial + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0).to(ACC)
    for i in range(0, chunks):
        i_t = chunks - 1 - i if REVERSE else i
        tl.store(
            states + ((i_c + i_t).to(tl.int64) * H + i_h) * K * V + o_s, b_s.to(states.dtype.element_ty), mask=m_s
        )
        o_r = i_t * BT + o_t
        m_r = o_r < length
        b_G = tl.load(p_G + o_r, mask=m_r, other=0)
        b_end = tl.load(p_G + tl.minimum(i_t * BT + BT, length) - 1)
        o_row = (bos + o_r) * heads + i_g
        b_a = tl.load(a + o_row[None, :] * K + o_k[:, None], mask=m_k[:, None] & m_r[None, :], other=0)
        b_b = tl.load(b + o_row[:, None] * V + o_v[None, :], mask=m_r[:, None] & m_v[None, :], other=0)
        b_w = scale * tl.exp(b_G) if REVERSE else tl.exp(b_end - b_G)
        b_b = (b_b * b_w[:, None]).to(b_a.dtype)
        b_s = tl.dot(b_a, b_b, b_s * tl.exp(b_end), input_precision=PRECISION, out_dtype=ACC)
    tl.store(final + i_nh.to(tl.int64) * K * V + o_s, b_s, mask=m_s)


@triton.jit
def gla_fwd_kernel(
    q, k, v, G, states, o, cu_seqlens, first, sequence, scale, T, NT, N, H, K, V, rows,
    GROUPS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o = scale * (e^G * (q S_0) + (q k^T * D) v) of one chunk, one head, one block of V."""
    i_v, i_c, i_h = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV), tl.program_id(1)
    bos, length = _chunk(i_c, cu_seqlens, first, sequence, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_t, m_v = o_t < length, o_v < V
    o_q = (bos + o_t) * H + i_h
    o_kv = (bos + o_t) * (H // GROUPS) + i_h // GROUPS
    p_s = states + (i_c.to(tl.int64) * H + i_h) * K * V
    b_o = tl.zeros([BT, BV], ACC)
    b_s = tl.zeros([BT, BT], ACC)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_q = tl.load(q + o_q[:, None] * K + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0)
        b_k = tl.load(k + o_kv[None, :] * K + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0)
        b_h = tl.load(p_s + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0)
        b_o = tl.dot(b_q, b_h, b_o, input_precision=PRECISION, out_dtype=ACC)
        b_s = tl.dot(b_q, b_k, b_s, input_precision=PRECISION, out_dtype=ACC)
    b_G = tl.load(G + i_h.to(tl.int64) * rows + bos + o_t, mask=m_t, other=0)
    b_D = tl.where((o_t[:, None] >= o_t[None, :]) & m_t[:, None], tl.exp(b_G[:, None] - b_G[None, :]), 0)
    b_v = tl.load(v + o_kv[:, None] * V + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0)
    b_o *= tl.exp(b_G)[:, None]
    b_o = tl.dot((b_s * b_D).to(b_v.dtype), b_v, b_o, input_precision=PRECISION, out_dtype=ACC) * scale
    p_o = o + o_q[:, None] * V + o_v[None, :]
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])


@triton.jit
def gla_bwd_kernel_dqkg(
    do, q, k, v, G, states, dstates, dq, dk, dg, cu_seqlens, first, sequence, scale, T, NT, N, H, K, V, rows,
    GROUPS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk and the share of dg of one chunk, one key head with its query heads, one block of K.

    g_t decays what tokens i >= t read of the state before the chunk, what tokens j < t leave in the state after it,
    what i >= t read of j < t, and the state that passes through: dg_t sums these four, and nothing cancels.
    """
    i_k, i_c, i_kv = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK), tl.program_id(1)
    bos, length = _chunk(i_c, cu_seqlens, first, sequence, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_k = tl.arange(0, BT), i_k * BK + tl.arange(0, BK)
    m_t, m_k = o_t < length, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    o_kv = (bos + o_t) * (H // GROUPS) + i_kv
    m_causal = (o_t[:, None] >= o_t[None, :]) & m_t[:, None]
    m_anti = (o_t[:, None] <= o_t[None, :]) & m_t[None, :]
    b_k = tl.load(k + o_kv[:, None] * K + o_k[None, :], mask=m_tk, other=0)
    b_dk_sum = tl.zeros([BT, BK], ACC)
    for i_g in range(GROUPS):
        i_h = i_kv * GROUPS + i_g
        o_q = (bos + o_t) * H + i_h
        p_s = (i_c.to(tl.int64) * H + i_h) * K * V
        b_dq = tl.zeros([BT, BK], ACC)
        b_dk = tl.zeros([BT, BK], ACC)
        b_ds = tl.zeros([BT, BT], ACC)
        b_dst = tl.zeros([BT, BT], ACC)
        b_inner = tl.zeros([BK], ACC)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < V
            m_tv, m_vk = m_t[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
            b_v = tl.load(v + o_kv[:, None] * V + o_v[None, :], mask=m_tv, other=0)
            b_do = tl.load(do + o_q[:, None] * V + o_v[None, :], mask=m_tv, other=0)
            b_h = tl.load(states + p_s + o_k[None, :] * V + o_v[:, None], mask=m_vk, other=0)
            b_dh = tl.load(dstates + p_s + o_k[None, :] * V + o_v[:, None], mask=m_vk, other=0)
            b_ds = tl.dot(b_do, tl.trans(b_v), b_ds, input_precision=PRECISION, out_dtype=ACC)
            b_dst = tl.dot(b_v, tl.trans(b_do), b_dst, input_precision=PRECISION, out_dtype=ACC)
            b_dq = tl.dot(b_do, b_h, b_dq, input_precision=PRECISION, out_dtype=ACC)
            b_dk = tl.dot(b_v, b_dh, b_dk, input_precision=PRECISION, out_dtype=ACC)
            b_inner += tl.sum(b_h.to(ACC) * b_dh.to(ACC), 0)
        p_G = G + i_h.to(tl.int64) * rows + bos
        b_G = tl.load(p_G + o_t, mask=m_t, other=0)
        b_end = tl.load(p_G + length - 1)
        b_q = tl.load(q + o_q[:, None] * K + o_k[None, :], mask=m_tk, other=0)
        b_dq *= (scale * tl.exp(b_G))[:, None]
        b_dk *= tl.exp(b_end - b_G)[:, None]
        b_reads = tl.sum(b_dq * b_q.to(ACC), 1)
        b_writes = tl.sum(b_dk * b_k.to(ACC), 1)
        b_ds *= tl.where(m_causal, scale * tl.exp(b_G[:, None] - b_G[None, :]), 0)
        b_dst *= tl.where(m_anti, scale * tl.exp(b_G[None, :] - b_G[:, None]), 0)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION, out_dtype=ACC)
        b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION, out_dtype=ACC)
        tl.store(dq + o_q[:, None] * K + o_k[None, :], b_dq.to(dq.dtype.element_ty), mask=m_tk)
        b_pairs = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=ACC) * b_ds
        b_before = (o_t[:, None] < o_t[None, :]).to(b_k.dtype)
        b_pairs = tl.dot(b_pairs.to(b_k.dtype), b_before, input_precision=PRECISION, out_dtype=ACC)
        b_dg = tl.where(o_t[:, None] >= o_t[None, :], b_pairs + b_reads[:, None], b_writes[:, None])
        b_dg = tl.sum(b_dg, 0) + tl.sum(b_inner, 0) * tl.exp(b_end)
        tl.store(dg + i_k.to(tl.int64) * rows * H + o_q, b_dg, mask=m_t)
        b_dk_sum += b_dk
    tl.store(dk + o_kv[:, None] * K + o_k[None, :], b_dk_sum.to(dk.dtype.element_ty), mask=m_tk)


@triton.jit
def gla_bwd_kernel_dv(
    do, q, k, G, dstates, dv, cu_seqlens, first, sequence, scale, T, NT, N, H, K, V, rows,
    GROUPS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dv of one chunk, one value head with its query heads, one block of V."""
    i_v, i_c, i_kv = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV), tl.program_id(1)
    bos, length = _chunk(i_c, cu_seqlens, first, sequence, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_t, m_v = o_t < length, o_v < V
    m_tv = m_t[:, None] & m_v[None, :]
    o_kv = (bos + o_t) * (H // GROUPS) + i_kv
    m_anti = (o_t[:, None] <= o_t[None, :]) & m_t[None, :]
    b_dv_sum = tl.zeros([BT, BV], ACC)
    for i_g in range(GROUPS):
        i_h = i_kv * GROUPS + i_g
        o_q = (bos + o_t) * H + i_h
        p_s = (i_c.to(tl.int64) * H + i_h) * K * V
        b_dv = tl.zeros([BT, BV], ACC)
        b_st = tl.zeros([BT, BT], ACC)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < K
            m_tk = m_t[:, None] & m_k[None, :]
            b_k = tl.load(k + o_kv[:, None] * K + o_k[None, :], mask=m_tk, other=0)
            b_q = tl.load(q + o_q[None, :] * K + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0)
            p_dh = dstates + p_s + o_k[:, None] * V + o_v[None, :]
            b_dh = tl.load(p_dh, mask=m_k[:, None] & m_v[None, :], other=0)
            b_st = tl.dot(b_k, b_q, b_st, input_precision=PRECISION, out_dtype=ACC)
            b_dv = tl.dot(b_k, b_dh, b_dv, input_precision=PRECISION, out_dtype=ACC)
        p_G = G + i_h.to(tl.int64) * rows + bos
        b_G = tl.load(p_G + o_t, mask=m_t, other=0)
        b_dv *= tl.exp(tl.load(p_G + length - 1) - b_G)[:, None]
        b_st *= tl.where(m_anti, scale * tl.exp(b_G[None, :] - b_G[:, None]), 0)
        b_do = tl.load(do + o_q[:, None] * V + o_v[None, :], mask=m_tv, other=0)
        b_dv_sum += tl.dot(b_st.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dv + o_kv[:, None] * V + o_v[None, :], b_dv_sum.to(dv.dtype.element_ty), mask=m_tv)


@triton.jit
def gla_step_kernel(
    q, k, v, g, state, o, scale, H, K, V,
    GROUPS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token: the state's block of V columns is read once and written once."""
    i_s, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_kv = i_s // H * (H // GROUPS) + i_s % H // GROUPS
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    p_s = state + i_s * K * V + o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0)
    b_q = tl.load(q + i_s * K + o_k, mask=m_k, other=0).to(ACC)
    b_k = tl.load(k + i_kv * K + o_k, mask=m_k, other=0).to(ACC)
    b_v = tl.load(v + i_kv * V + o_v, mask=m_v, other=0).to(ACC)
    b_s = tl.exp(tl.load(g + i_s).to(ACC)) * b_s + b_k[:, None] * b_v[None, :]
    tl.store(p_s, b_s, mask=m_s)
    b_o = scale * tl.sum(b_q[:, None] * b_s, 0)
    tl.store(o + i_s * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)


def _block(size: int, limit: int) -> int:
    return max(16, min(limit, triton.next_power_of_2(size)))


def _tiles(x: Tensor, chunk_size: int, K: int, V: int, limit_k: int, limit_v: int, num_stages: int) -> dict:
    """Block sizes and launch options; 32-bit operands take twice the shared memory, so they get a small tile."""
    if x.element_size() > 2:
        limit_k, limit_v, num_stages = 32, 32, 1
    num_warps = 8 if chunk_size == 128 else 4
    return {"BK": _block(K, limit_k), "BV": _block(V, limit_v), "num_stages": num_stages, "num_warps": num_warps}


class _Launch:
    """Grids, tables and constants that the kernels of one call share.

    Chunks and sequences are on a grid's first dimension: the others end at 65535.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, chunk_size: int):
        B, T, H, K = q.shape
        self.kv_heads, V = v.shape[2:]
        rows, N = B * T, num_sequences(B, cu_seqlens)
        self.chunk_size = chunk_size
        self.cu_seqlens, self.first, self.sequence = cu_seqlens, None, None
        NT = triton.cdiv(T, chunk_size)
        self.chunks = B * NT
        if cu_seqlens is not None:
            self.first, self.sequence, self.chunks = chunk_table(cu_seqlens, T, chunk_size)
        self.N, self.T, self.NT, self.H, self.K, self.V, self.rows = N, T, NT, H, K, V, rows
        acc = tl.float64 if compute_dtype(q.dtype) == torch.float64 else tl.float32
        self.options = {"BT": chunk_size, "PACKED": cu_seqlens is not None}
        self.dots = {"ACC": acc, "PRECISION": "ieee" if q.dtype in (torch.float32, torch.float64) else None}
        self.G = log_decay.new_empty(H, rows)
        BH = min(16, triton.next_power_of_2(H))
        gla_cumsum_kernel[(self.chunks, triton.cdiv(H, BH))](
            log_decay.contiguous(), self.G, *self.tables, T, NT, N, H, rows, BH=BH, num_warps=2, **self.options
        )

    @property
    def tables(self):
        return self.cu_seqlens, self.first, self.sequence

    @property
    def sizes(self):
        return self.T, self.NT, self.N, self.H, self.K, self.V, self.rows

    def scan(self, a: Tensor, b: Tensor, initial: Tensor, scale: float, reverse: bool) -> tuple[Tensor, Tensor]:
        """States per chunk [chunks, H, K, V] in a's dtype and the last state, like `initial`."""
        states = a.new_empty(self.chunks, self.H, self.K, self.V)
        final = torch.empty_like(initial, memory_format=torch.contiguous_format)
        tiles = _tiles(a, self.chunk_size, self.K, self.V, 64, 64, 3)
        grid = (triton.cdiv(self.K, tiles["BK"]) * triton.cdiv(self.V, tiles["BV"]) * self.N * self.H,)
        T, NT, _, *sizes = self.sizes
        gla_scan_kernel[grid](
            a, b, self.G, initial.contiguous(), states, final, self.cu_seqlens, self.first, scale, T, NT, *sizes,
            GROUPS=self.H // a.shape[2], REVERSE=reverse, **tiles, **self.options, **self.dots,
        )  # fmt: skip
        return states, final


def gla_fwd_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in q.dtype and the final states [N, H, K, V]."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    launch = _Launch(q, k, v, log_decay, cu_seqlens, chunk_size)
    states, final = launch.scan(k, v, initial_state, scale, reverse=False)
    o = q.new_empty(*q.shape[:3], v.shape[-1])
    tiles = _tiles(q, chunk_size, launch.K, launch.V, 64, 128, 1)
    gla_fwd_kernel[(triton.cdiv(launch.V, tiles["BV"]) * launch.chunks, launch.H)](
        q, k, v, launch.G, states, o, *launch.tables, scale, *launch.sizes,
        GROUPS=launch.H // launch.kv_heads, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    return o, final


def gla_bwd_triton(
    do: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv, dlog_decay and the gradient of the initial states."""
    do, q, k, v = (t.contiguous() for t in (do, q, k, v))
    launch = _Launch(q, k, v, log_decay, cu_seqlens, chunk_size)
    states, _ = launch.scan(k, v, initial_state, scale, reverse=False)
    dstates, dinitial = launch.scan(q, do, dfinal, scale, reverse=True)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    groups = launch.H // launch.kv_heads
    # at least 64 wide: ptxas 12.8 takes descriptors of narrower tiles from the wrong registers ("Compiler traps")
    tiles = _tiles(q, chunk_size, max(launch.K, 64), launch.V, 64, 64, 2)
    blocks = triton.cdiv(launch.K, tiles["BK"])
    dg = log_decay.new_empty(blocks, *log_decay.shape)
    gla_bwd_kernel_dqkg[(blocks * launch.chunks, launch.kv_heads)](
        do, q, k, v, launch.G, states, dstates, dq, dk, dg, *launch.tables, scale, *launch.sizes,
        GROUPS=groups, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    tiles = _tiles(q, chunk_size, launch.K, launch.V, 64, 128, 2)
    gla_bwd_kernel_dv[(triton.cdiv(launch.V, tiles["BV"]) * launch.chunks, launch.kv_heads)](
        do, q, k, launch.G, dstates, dv, *launch.tables, scale, *launch.sizes,
        GROUPS=groups, **tiles, **launch.options, **launch.dots,
    )  # fmt: skip
    return dq, dk, dv, dg.sum(0) if blocks > 1 else dg[0], dinitial


def gla_step_triton(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float) -> Tensor:
    """One token [B, 1, heads, D]; `state` [B, H, K, V] is advanced in place, in one launch."""
    B, _, H, K = q.shape
    V = v.shape[-1]
    o = q.new_empty(B, 1, H, V)
    BK, BV = triton.next_power_of_2(K), min(32, triton.next_power_of_2(V))
    gla_step_kernel[(B * H, triton.cdiv(V, BV))](
        *(t.contiguous() for t in (q, k, v, log_decay)), state, o, scale, H, K, V,
        GROUPS=H // k.shape[2], BK=BK, BV=BV, num_warps=4,
        ACC=tl.float64 if compute_dtype(state.dtype) == torch.float64 else tl.float32,
    )  # fmt: skip
    return o
