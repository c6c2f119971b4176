"""The products of all pairs of tokens of a chunk, with the decay between them.

    A_tj = sum_d k_t k_j e^(G_t - G_j) for j < t,    B_tj = sum_d q_t k_j e^(G_t - G_j) for j <= t

With one decay per head they are products of matrices times a matrix of decays. With one per channel, the pairs within
a block of BC tokens have a decay of their own, and all others meet at the first token of the later block: its
exponents G_t - G_first and G_first - G_j are never positive, so nothing overflows. Where no channel decays by more
than e^-LIMIT within the block, its own pairs meet there, too: G_first - G_j is then positive, but small enough.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from ...gla.kernels.tiles import locate_chunk


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_cumsum_kernel(
    g, G, layout, T, NT, N, width, FLOOR: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, PACKED: tl.constexpr
):
    """G [rows, width] = cumsum of g, which is at least FLOOR, inside each chunk."""
    i_c, i_w = tl.program_id(0), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_w = tl.arange(0, BT), i_w * BW + tl.arange(0, BW)
    mask = (o_t < length)[:, None] & (o_w < width)[None, :]
    offset = (bos + o_t)[:, None] * width + o_w[None, :]
    b_g = tl.load(g + offset, mask=mask, other=0)
    tl.store(G + offset, tl.cumsum(tl.where(b_g < FLOOR, FLOOR, b_g), 0), mask=mask)


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_pairs_kernel(
    inputs, outputs, layout, T, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A and B of one chunk and one head, with one decay per head."""
    q, k, G = inputs
    A, B = outputs
    NT, N, H, K, V = sizes
    s_q, s_k = strides
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t, o_row = o_t < length, bos + o_t
    b_A = tl.zeros([BT, BT], ACC)
    b_B = tl.zeros([BT, BT], ACC)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        mask = m_t[:, None] & (o_k < K)[None, :]
        b_q = tl.load(q + o_row[:, None] * s_q + i_h // RQ * K + o_k[None, :], mask=mask, other=0)
        b_k = tl.load(k + o_row[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=mask, other=0)
        b_A = tl.dot(b_k, tl.trans(b_k), b_A, input_precision=PRECISION, out_dtype=ACC)
        b_B = tl.dot(b_q, tl.trans(b_k), b_B, input_precision=PRECISION, out_dtype=ACC)
    b_G = tl.load(G + o_row * H + i_h, mask=m_t, other=0)
    m_causal = (o_t[:, None] >= o_t[None, :]) & m_t[:, None]
    b_D = tl.where(m_causal, tl.exp(b_G[:, None] - b_G[None, :]), 0)
    o_pair = (o_row * H + i_h)[:, None] * BT + o_t[None, :]
    tl.store(A + o_pair, tl.where(o_t[:, None] > o_t[None, :], b_A * b_D, 0), mask=m_t[:, None])
    tl.store(B + o_pair, (b_B * b_D).to(B.dtype.element_ty), mask=m_t[:, None])


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_pairs_of_channels_kernel(
    inputs, outputs, layout, T, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
    APPLY: tl.constexpr, LIMIT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """BC rows of A and B of one chunk and one head, with one decay per channel."""
    q, k, G = inputs
    A, B = outputs
    NT, N, H, K, V = sizes
    s_q, s_k = strides
    i_b, i_c, i_h = tl.program_id(0) % (BT // BC), tl.program_id(0) // (BT // BC), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if i_b * BC >= length:
        return
    o_i, o_j, first = i_b * BC + tl.arange(0, BC), tl.arange(0, BT), i_b * BC
    o_row, o_col = bos + o_i, bos + o_j
    b_A = tl.zeros([BC, BT], ACC)
    b_B = tl.zeros([BC, BT], ACC)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        m_i = (o_i < length)[:, None] & m_k[None, :]
        b_q = tl.load(q + o_row[:, None] * s_q + i_h // RQ * K + o_k[None, :], mask=m_i, other=0).to(ACC)
        b_k = tl.load(k + o_row[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=m_i, other=0).to(ACC)
        b_G = tl.load(G + (o_row * H + i_h)[:, None] * K + o_k[None, :], mask=m_i, other=0)
        b_first = tl.load(G + ((bos + first) * H + i_h) * K + o_k, mask=m_k, other=0)
        slow = tl.max(b_first - tl.min(tl.where(m_i, b_G, b_first[None, :]), 0), 0) <= LIMIT
        met = tl.minimum(first + tl.where(slow, BC, 0), length)  # tokens before it meet at the first one
        if met > 0:
            m_j = (o_j < met)[:, None] & m_k[None, :]
            b_keys = tl.load(k + o_col[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=m_j, other=0).to(ACC)
            b_Gj = tl.load(G + (o_col * H + i_h)[:, None] * K + o_k[None, :], mask=m_j, other=0)
            b_early = tl.trans(tl.exp(tl.where(m_j, b_first[None, :] - b_Gj, float("-inf"))) * b_keys)
            b_late = tl.exp(tl.where(m_i, b_G - b_first[None, :], float("-inf")))
            b_A = tl.dot(b_late * b_k, b_early, b_A, input_precision=APPLY, out_dtype=ACC)
            b_B = tl.dot(b_late * b_q, b_early, b_B, input_precision=APPLY, out_dtype=ACC)
        for j in range(met, tl.minimum(first + BC, length)):
            row = bos + j
            b_kj = tl.load(k + row * s_k + i_h // RK * K + o_k, mask=m_k, other=0).to(ACC)
            b_Gj = tl.load(G + (row * H + i_h) * K + o_k, mask=m_k, other=0)
            m_later = (o_i >= j)[:, None] & m_i
            b_own = tl.exp(tl.where(m_later, b_G - b_Gj[None, :], float("-inf"))) * b_kj[None, :]
            here = o_j[None, :] == j
            b_A += tl.where(here, tl.sum(b_own * b_k, 1)[:, None], 0)
            b_B += tl.where(here, tl.sum(b_own * b_q, 1)[:, None], 0)
    o_pair = (o_row * H + i_h)[:, None] * BT + o_j[None, :]
    m_pair = (o_i < length)[:, None] & (o_j < BT)[None, :]
    tl.store(A + o_pair, tl.where(o_i[:, None] > o_j[None, :], b_A, 0), mask=m_pair)
    b_B = tl.where(o_i[:, None] >= o_j[None, :], b_B, 0)
    tl.store(B + o_pair, b_B.to(B.dtype.element_ty), mask=m_pair)
