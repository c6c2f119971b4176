"""The inverse T = (I + A Diag(beta))^-1 of every chunk, and what it is applied to: W = T (e^G * K) and Y = T V.

The blocks of BC tokens on the diagonal are inverted by substitution, row by row; those below them follow from
T_ij = -T_ii sum_k L_ik T_kj, where L is A Diag(beta) and k runs from j to i - 1. T stays in the dtype of sums, and its
products have operands of TF32: rounded to 16 bits, T would give the largest error of the whole op where tokens repeat.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from ...gla.kernels.tiles import locate_chunk
from .tiles import load_end


@triton.jit
def block(A, beta, bos, length, i_h, H, row, col, BT: tl.constexpr, BC: tl.constexpr):
    """Block [BC, BC] of A Diag(beta) below the diagonal."""
    o_i, o_j = row * BC + tl.arange(0, BC), col * BC + tl.arange(0, BC)
    m_i, m_j = o_i < length, o_j < length
    b_A = tl.load(A + ((bos + o_i) * H + i_h)[:, None] * BT + o_j[None, :], mask=m_i[:, None] & m_j[None, :], other=0)
    return b_A * tl.load(beta + (bos + o_j) * H + i_h, mask=m_j, other=0)[None, :]


@triton.jit
def own_inverse(A, beta, bos, length, i_h, H, row, BT: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr):
    """The inverse [BC, BC] of a block on the diagonal; rows beyond the chunk are those of the identity."""
    o = tl.arange(0, BC)
    b_beta = tl.load(beta + (bos + row * BC + o) * H + i_h, mask=row * BC + o < length, other=0)
    b_T = (o[:, None] == o[None, :]).to(ACC)
    for i in range(1, BC):
        t = row * BC + i
        p_A = A + ((bos + t) * H + i_h) * BT + row * BC + o
        b_row = tl.load(p_A, mask=(o < i) & (t < length), other=0) * b_beta
        b_T = tl.where((o == i)[:, None], b_T - tl.sum(b_row[:, None] * b_T, 0)[None, :], b_T)
    return b_T


@triton.jit
def product(a, b, ACC: tl.constexpr, SOLVE: tl.constexpr):
    return tl.dot(a, b, input_precision=SOLVE, out_dtype=ACC)


@triton.jit
def put(solution, b_T, bos, length, i_h, H, row, col, BT: tl.constexpr, BC: tl.constexpr):
    o_i, o_j = row * BC + tl.arange(0, BC), col * BC + tl.arange(0, BC)
    tl.store(solution + ((bos + o_i) * H + i_h)[:, None] * BT + o_j[None, :], b_T, mask=(o_i < length)[:, None])


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_invert_kernel(
    inputs, solution, layout, T, sizes,
    BT: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr, SOLVE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """T of one chunk of two or four blocks and one head; blocks above the diagonal are not written."""
    beta, A = inputs
    NT, N, H = sizes
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    tl.static_assert(BT == 2 * BC or BT == 4 * BC)
    T00 = own_inverse(A, beta, bos, length, i_h, H, 0, BT, BC, ACC)
    T11 = own_inverse(A, beta, bos, length, i_h, H, 1, BT, BC, ACC)
    L10 = block(A, beta, bos, length, i_h, H, 1, 0, BT, BC)
    T10 = -product(T11, product(L10, T00, ACC, SOLVE), ACC, SOLVE)
    put(solution, T00, bos, length, i_h, H, 0, 0, BT, BC)
    put(solution, T10, bos, length, i_h, H, 1, 0, BT, BC)
    put(solution, T11, bos, length, i_h, H, 1, 1, BT, BC)
    if BT == 4 * BC:
        T22 = own_inverse(A, beta, bos, length, i_h, H, 2, BT, BC, ACC)
        L20 = block(A, beta, bos, length, i_h, H, 2, 0, BT, BC)
        L21 = block(A, beta, bos, length, i_h, H, 2, 1, BT, BC)
        T21 = -product(T22, product(L21, T11, ACC, SOLVE), ACC, SOLVE)
        T20 = -product(T22, product(L20, T00, ACC, SOLVE) + product(L21, T10, ACC, SOLVE), ACC, SOLVE)
        put(solution, T20, bos, length, i_h, H, 2, 0, BT, BC)
        put(solution, T21, bos, length, i_h, H, 2, 1, BT, BC)
        put(solution, T22, bos, length, i_h, H, 2, 2, BT, BC)
        T33 = own_inverse(A, beta, bos, length, i_h, H, 3, BT, BC, ACC)
        L30 = block(A, beta, bos, length, i_h, H, 3, 0, BT, BC)
        L31 = block(A, beta, bos, length, i_h, H, 3, 1, BT, BC)
        L32 = block(A, beta, bos, length, i_h, H, 3, 2, BT, BC)
        T32 = -product(T33, product(L32, T22, ACC, SOLVE), ACC, SOLVE)
        T31 = -product(T33, product(L31, T11, ACC, SOLVE) + product(L32, T21, ACC, SOLVE), ACC, SOLVE)
        b_R = product(L30, T00, ACC, SOLVE) + product(L31, T10, ACC, SOLVE) + product(L32, T20, ACC, SOLVE)
        put(solution, -product(T33, b_R, ACC, SOLVE), bos, length, i_h, H, 3, 0, BT, BC)
        put(solution, T31, bos, length, i_h, H, 3, 1, BT, BC)
        put(solution, T32, bos, length, i_h, H, 3, 2, BT, BC)
        put(solution, T33, bos, length, i_h, H, 3, 3, BT, BC)


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_apply_kernel(
    inputs, outputs, layout, scale, T, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ACC: tl.constexpr, APPLY: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """W and Y of one chunk and one head; with one decay per channel also scale e^G Q and e^(G_C - G) K."""
    q, k, v, G, solution = inputs
    W, Y, read, write = outputs
    NT, N, H, K, V = sizes
    s_q, s_k, s_v = strides
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t, o_row = o_t < length, bos + o_t
    m_T = m_t[:, None] & (o_t[:, None] >= o_t[None, :])
    b_T = tl.load(solution + (o_row * H + i_h)[:, None] * BT + o_t[None, :], mask=m_T, other=0)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        mask = m_t[:, None] & (o_v < V)[None, :]
        b_v = tl.load(v + o_row[:, None] * s_v + i_h // RV * V + o_v[None, :], mask=mask, other=0).to(ACC)
        b_Y = tl.dot(b_T, b_v, input_precision=APPLY, out_dtype=ACC)
        tl.store(Y + (o_row * H + i_h)[:, None] * V + o_v[None, :], b_Y.to(Y.dtype.element_ty), mask=mask)
    if not CHANNELS:  # one decay per head scales columns of T
        b_T *= tl.exp(tl.load(G + o_row * H + i_h, mask=m_t, other=0))[None, :]
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        mask = m_t[:, None] & (o_k < K)[None, :]
        o_x = (o_row * H + i_h)[:, None] * K + o_k[None, :]
        b_k = tl.load(k + o_row[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=mask, other=0).to(ACC)
        b_decayed = b_k
        if CHANNELS:
            b_G = tl.load(G + o_x, mask=mask, other=0)
            b_decayed = b_k * tl.exp(b_G)
        b_W = tl.dot(b_T, b_decayed, input_precision=APPLY, out_dtype=ACC)
        tl.store(W + o_x, b_W.to(W.dtype.element_ty), mask=mask)
        if CHANNELS:
            b_end = load_end(G, bos + length - 1, i_h, H, K, o_k, CHANNELS)
            tl.store(write + o_x, (b_k * tl.exp(b_end - b_G)).to(write.dtype.element_ty), mask=mask)
            b_q = tl.load(q + o_row[:, None] * s_q + i_h // RQ * K + o_k[None, :], mask=mask, other=0).to(ACC)
            tl.store(read + o_x, (b_q * (scale * tl.exp(b_G))).to(read.dtype.element_ty), mask=mask)
