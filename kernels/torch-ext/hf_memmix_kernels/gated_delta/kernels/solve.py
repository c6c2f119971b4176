"""The inverse T = (I + A Diag(beta))^-1 of every chunk, and what it is applied to: W = T (e^G * K) and Y = T V.

The blocks of BC tokens on the diagonal are inverted by substitution, row by row, all at once. Then pairs of blocks are
merged: the inverse of [[P, 0], [R, Q]] has -Q^-1 R P^-1 below its diagonal.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from ...gla.kernels.tiles import locate_chunk
from .tiles import load_decays


@triton.jit
def invert(A, beta, bos, length, i_h, H, BT: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr, SOLVE: tl.constexpr):
    """T [BT, BT] of a chunk; rows and columns beyond its length are those of the identity."""
    o_b, o_c = tl.arange(0, BT // BC), tl.arange(0, BC)
    # the blocks on the diagonal [blocks, BC, BC]
    o_i, o_j = o_b[:, None] * BC + o_c[None, :], o_b[:, None] * BC + o_c[None, :]
    m_i = o_i < length
    b_beta = tl.load(beta + (bos + o_j) * H + i_h, mask=m_i, other=0)
    p_A = A + ((bos + o_i) * H + i_h)[:, :, None] * BT + o_j[:, None, :]
    m_A = m_i[:, :, None] & m_i[:, None, :] & (o_c[:, None] > o_c[None, :])[None, :, :]
    b_L = tl.load(p_A, mask=m_A, other=0) * b_beta[:, None, :]
    b_T = tl.zeros([BT // BC, BC, BC], ACC) + (o_c[:, None] == o_c[None, :]).to(ACC)[None, :, :]
    for i in range(1, BC):
        m_row = (o_c == i)[None, :, None]
        b_row = tl.sum(tl.where(m_row, b_L, 0), 1)
        b_sum = tl.sum(b_row[:, :, None] * b_T, 1)
        b_T = tl.where(m_row, b_T - b_sum[:, None, :], b_T)
    m_own = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_T = tl.reshape(tl.where(m_own, b_T[:, :, None, :], tl.zeros([BT // BC, BC, BT // BC, BC], ACC)), [BT, BT])
    if BT > BC:
        o_t = tl.arange(0, BT)
        m_t = o_t < length
        b_beta = tl.load(beta + (bos + o_t) * H + i_h, mask=m_t, other=0)
        p_A = A + ((bos + o_t) * H + i_h)[:, None] * BT + o_t[None, :]
        b_L = tl.load(p_A, mask=m_t[:, None] & (o_t[:, None] > o_t[None, :]), other=0) * b_beta[None, :]
        b_T = merge(b_T, b_L, o_t, BC, ACC, SOLVE)
        if BT > 2 * BC:
            b_T = merge(b_T, b_L, o_t, 2 * BC, ACC, SOLVE)
    return b_T


@triton.jit
def merge(b_T, b_L, o_t, SIZE: tl.constexpr, ACC: tl.constexpr, SOLVE: tl.constexpr):
    """The inverse with blocks of 2 SIZE tokens from that with blocks of SIZE tokens."""
    later, earlier = (o_t // SIZE)[:, None], (o_t // SIZE)[None, :]
    b_R = tl.where((later == earlier + 1) & (later % 2 == 1), b_L, 0)
    b_R = tl.dot(b_R, b_T, input_precision=SOLVE, out_dtype=ACC)
    return b_T - tl.dot(b_T, b_R, input_precision=SOLVE, out_dtype=ACC)


@launched
@triton.jit
def gated_delta_solve_kernel(
    inputs, outputs, layout, sizes, strides,
    RK: tl.constexpr, RV: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """T, W and Y of one chunk and one head."""
    k, v, G, beta, A = inputs
    solution, W, Y = outputs
    T, NT, N, H, K, V = sizes
    s_k, s_v = strides
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t, o_row = o_t < length, bos + o_t
    b_T = invert(A, beta, bos, length, i_h, H, BT, BC, ACC, SOLVE).to(W.dtype.element_ty)
    if solution is not None:
        tl.store(solution + (o_row * H + i_h)[:, None] * BT + o_t[None, :], b_T, mask=m_t[:, None])
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        mask = m_t[:, None] & (o_k < K)[None, :]
        b_k = tl.load(k + o_row[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=mask, other=0)
        b_G = load_decays(G, o_row, i_h, H, K, o_k, mask, CHANNELS)
        b_W = tl.dot(b_T, (b_k.to(ACC) * tl.exp(b_G)).to(b_k.dtype), input_precision=PRECISION, out_dtype=ACC)
        tl.store(W + (o_row * H + i_h)[:, None] * K + o_k[None, :], b_W.to(W.dtype.element_ty), mask=mask)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        mask = m_t[:, None] & (o_v < V)[None, :]
        b_v = tl.load(v + o_row[:, None] * s_v + i_h // RV * V + o_v[None, :], mask=mask, other=0)
        b_Y = tl.dot(b_T, b_v, input_precision=PRECISION, out_dtype=ACC)
        tl.store(Y + (o_row * H + i_h)[:, None] * V + o_v[None, :], b_Y.to(Y.dtype.element_ty), mask=mask)
