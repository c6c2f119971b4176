"""Forward kernels of gla: cumulative decays, the scan over chunk states, and the output of every chunk.

    S_t = e^g S_{t-1} + beta_t k_t v_t^T,  o_t = scale * S_t^T q_t + skip v_t

RQ, RK and RV are the numbers of heads that share a head of q, k and v.

The scan serves both directions: forward it stores the state before every chunk, in reverse the gradient of the state
after every chunk.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import locate_chunk, locate_sequence


@launched
@triton.jit
def gla_cumsum_kernel(
    gates, by_head, layout, T, NT, N, H, rows,
    FLOOR: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """G [H, rows] = cumsum of g [rows, H], which is at least FLOOR, inside each chunk, and beta in the same order."""
    g, beta = gates
    G, beta_out = by_head
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_h = tl.arange(0, BT), i_h * BH + tl.arange(0, BH)
    mask = (o_t < length)[:, None] & (o_h < H)[None, :]
    b_g = tl.load(g + (bos + o_t)[:, None] * H + o_h[None, :], mask=mask, other=0)
    o_out = o_h[None, :].to(tl.int64) * rows + (bos + o_t)[:, None]
    tl.store(G + o_out, tl.cumsum(tl.where(b_g < FLOOR, FLOOR, b_g), 0), mask=mask)
    if beta is not None:
        b_beta = tl.load(beta + (bos + o_t)[:, None] * H + o_h[None, :], mask=mask, other=0)
        tl.store(beta_out + o_out, b_beta, mask=mask)


@launched
@triton.jit
def gla_scan_kernel(
    inputs, initial, states, final, layout, scale, sizes, strides,
    RA: tl.constexpr, RB: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """S <- e^(G_C) S + a^T (w * b) over the chunks: a, b = k, v forward and q, do in reverse."""
    a, b, G, beta = inputs
    cu_seqlens, first = layout
    T, NT, H, K, V, rows = sizes
    s_a, s_b = strides
    i_k, i_v = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK) % tl.cdiv(V, BV)
    i_nh = tl.program_id(0) // (tl.cdiv(K, BK) * tl.cdiv(V, BV))
    i_n, i_h = i_nh // H, i_nh % H
    bos, length = locate_sequence(i_n, cu_seqlens, T, PACKED)
    i_c = tl.load(first + i_n) if PACKED else i_n * NT
    chunks = tl.cdiv(length, BT)
    o_k, o_v, o_t = i_k * BK + tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, BT)
    m_k, m_v = o_k < K, o_v < V
    o_s = o_k[:, None] * V + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    o_G = i_h.to(tl.int64) * rows + bos
    p_G = G + o_G
    p_a = a + bos * s_a + i_h // RA * K
    p_b = b + bos * s_b + i_h // RB * V
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
        o_row = o_r.to(tl.int64)
        b_a = tl.load(p_a + o_row[None, :] * s_a + o_k[:, None], mask=m_k[:, None] & m_r[None, :], other=0)
        b_b = tl.load(p_b + o_row[:, None] * s_b + o_v[None, :], mask=m_r[:, None] & m_v[None, :], other=0)
        b_w = scale * tl.exp(b_G) if REVERSE else tl.exp(b_end - b_G)
        if beta is not None:
            b_w *= tl.load(beta + o_G + o_r, mask=m_r, other=0)
        b_b = (b_b * b_w[:, None]).to(b_a.dtype)
        b_s = tl.dot(b_a, b_b, b_s * tl.exp(b_end), input_precision=PRECISION, out_dtype=ACC)
    tl.store(final + i_nh.to(tl.int64) * K * V + o_s, b_s, mask=m_s)


@launched
@triton.jit
def gla_fwd_kernel(
    inputs, states, o, layout, scale, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o = scale * (e^G * (q S_0) + (q k^T * D) (beta * v)) + skip v of one chunk, one head, one block of V."""
    q, k, v, G, beta, skip = inputs
    T, NT, N, H, K, V, rows = sizes
    s_q, s_k, s_v = strides
    i_v, i_c, i_h = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_t, m_v = o_t < length, o_v < V
    o_row = bos + o_t
    p_q, p_k, p_v = q + i_h // RQ * K, k + i_h // RK * K, v + i_h // RV * V
    p_s = states + (i_c.to(tl.int64) * H + i_h) * K * V
    b_o = tl.zeros([BT, BV], ACC)
    b_s = tl.zeros([BT, BT], ACC)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_q = tl.load(p_q + o_row[:, None] * s_q + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0)
        b_k = tl.load(p_k + o_row[None, :] * s_k + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0)
        b_h = tl.load(p_s + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0)
        b_o = tl.dot(b_q, b_h, b_o, input_precision=PRECISION, out_dtype=ACC)
        b_s = tl.dot(b_q, b_k, b_s, input_precision=PRECISION, out_dtype=ACC)
    o_G = i_h.to(tl.int64) * rows + bos + o_t
    b_G = tl.load(G + o_G, mask=m_t, other=0)
    b_D = tl.where((o_t[:, None] >= o_t[None, :]) & m_t[:, None], tl.exp(b_G[:, None] - b_G[None, :]), 0)
    if beta is not None:
        b_D *= tl.load(beta + o_G, mask=m_t, other=0)[None, :]
    b_v = tl.load(p_v + o_row[:, None] * s_v + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0)
    b_o *= tl.exp(b_G)[:, None]
    b_o = tl.dot((b_s * b_D).to(b_v.dtype), b_v, b_o, input_precision=PRECISION, out_dtype=ACC) * scale
    if skip is not None:
        b_o += tl.load(skip + i_h) * b_v.to(ACC)
    p_o = o + (o_row * H + i_h)[:, None] * V + o_v[None, :]
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])
