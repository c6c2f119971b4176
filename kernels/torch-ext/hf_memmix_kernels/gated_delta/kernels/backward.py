"""The backward kernels of one chunk, after the scan in reverse: first the errors, then queries, keys and decays.

    dX = T^T (beta dW),   dv = dX,   dA = -(dX X^T) beta,   dB = s (do X^T) beta
    dbeta_j = X_j . dW_j - sum_t A_tj (dX X^T)_tj
    dq = e^G s do S^T + (pairs of dB),   dk = -e^G dX S^T + e^(G_C - G) beta X dS^T + (pairs of dA and dB)

g_t decays what tokens i >= t read of the state before the chunk, what tokens j < t leave in the state after it, what
i >= t read of j < t, and the state that passes through: dg_t sums these four. A token's pair with itself has no decay
and is kept out of the sums, because beside fast decays its rounding would stay.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from ...gla.kernels.tiles import locate_chunk
from .tiles import load_decays, load_end


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_bwd_errors_kernel(
    do, inputs, grads, layout, scale, T, sizes,
    BT: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, APPLY: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """dX, dA, dB and dbeta of one chunk and one head."""
    beta, A, solution, X, dwrites = inputs
    dX, dA, dB, dbeta = grads
    NT, N, H, K, V = sizes
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t = tl.arange(0, BT)
    m_t, o_row = o_t < length, bos + o_t
    o_pair = (o_row * H + i_h)[:, None] * BT + o_t[None, :]
    b_beta = tl.load(beta + o_row * H + i_h, mask=m_t, other=0)
    m_T = m_t[None, :] & (o_t[:, None] <= o_t[None, :])
    b_T = tl.load(solution + (o_row * H + i_h)[None, :] * BT + o_t[:, None], mask=m_T, other=0)  # turned
    b_between = tl.zeros([BT, BT], ACC)
    b_dB = tl.zeros([BT, BT], ACC)
    b_dbeta = tl.zeros([BT], ACC)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        o_x = (o_row * H + i_h)[:, None] * V + o_v[None, :]
        b_dw = tl.load(dwrites + o_x, mask=m_tv, other=0).to(ACC)
        b_X = tl.load(X + o_x, mask=m_tv, other=0)
        b_do = tl.load(do + o_x, mask=m_tv, other=0)
        b_dbeta += tl.sum(b_X.to(ACC) * b_dw, 1)
        b_dX = tl.dot(b_T, b_dw * b_beta[:, None], input_precision=APPLY, out_dtype=ACC).to(b_X.dtype)
        tl.store(dX + o_x, b_dX, mask=m_tv)
        b_between = tl.dot(b_dX, tl.trans(b_X), b_between, input_precision=PRECISION, out_dtype=ACC)
        b_dB = tl.dot(b_do, tl.trans(b_X), b_dB, input_precision=PRECISION, out_dtype=ACC)
    b_A = tl.load(A + o_pair, mask=m_t[:, None], other=0)
    tl.store(dbeta + o_row * H + i_h, b_dbeta - tl.sum(b_A * b_between, 0), mask=m_t)
    b_dA = tl.where(o_t[:, None] > o_t[None, :], -b_between * b_beta[None, :], 0)
    b_dB = tl.where(o_t[:, None] >= o_t[None, :], scale * b_dB * b_beta[None, :], 0)
    tl.store(dA + o_pair, b_dA.to(dA.dtype.element_ty), mask=m_t[:, None])
    tl.store(dB + o_pair, b_dB.to(dB.dtype.element_ty), mask=m_t[:, None])


@triton.jit
def chunk_grads(
    do, q, k, G, beta, X, dX, states, dstates, bos, length, o_t, o_k, i_c, i_h, scale, H, K, V, s_q, s_k,
    RQ: tl.constexpr, RK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The tokens' keys, queries and decays; dq and dk by the states before and after the chunk; <S, dS> by channel."""
    m_t, m_k, o_row = o_t < length, o_k < K, bos + o_t
    m_tk = m_t[:, None] & m_k[None, :]
    b_dq = tl.zeros([BT, BK], ACC)
    b_dk = tl.zeros([BT, BK], ACC)
    b_end = tl.zeros([BT, BK], ACC)
    b_inner = tl.zeros([BK], ACC)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        m_tv, m_vk = m_t[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
        o_x = (o_row * H + i_h)[:, None] * V + o_v[None, :]
        o_s = (i_c.to(tl.int64) * H + i_h) * K * V + o_k[None, :] * V + o_v[:, None]
        b_do = tl.load(do + o_x, mask=m_tv, other=0)
        b_X = tl.load(X + o_x, mask=m_tv, other=0)
        b_dX = tl.load(dX + o_x, mask=m_tv, other=0)
        b_h = tl.load(states + o_s, mask=m_vk, other=0)
        b_dh = tl.load(dstates + o_s, mask=m_vk, other=0)
        b_dq = tl.dot(b_do, b_h, b_dq, input_precision=PRECISION, out_dtype=ACC)
        b_dk = tl.dot(b_dX, b_h, b_dk, input_precision=PRECISION, out_dtype=ACC)
        b_end = tl.dot(b_X, b_dh, b_end, input_precision=PRECISION, out_dtype=ACC)
        b_inner += tl.sum(b_h.to(ACC) * b_dh.to(ACC), 0)
    b_q = tl.load(q + o_row[:, None] * s_q + i_h // RQ * K + o_k[None, :], mask=m_tk, other=0)
    b_k = tl.load(k + o_row[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=m_tk, other=0)
    b_G = load_decays(G, o_row, i_h, H, K, o_k, m_tk, CHANNELS)
    b_last = load_end(G, bos + length - 1, i_h, H, K, o_k, CHANNELS)
    b_beta = tl.load(beta + o_row * H + i_h, mask=m_t, other=0)
    b_dq *= scale * tl.exp(b_G)
    b_dk *= -tl.exp(b_G)
    b_end *= b_beta[:, None] * tl.exp(b_last - b_G)
    return b_q, b_k, b_G, b_last, b_dq, b_dk, b_end, b_inner


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_bwd_keys_kernel(
    do, inputs, pairs, chunks, grads, layout, scale, T, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk and the share of dg of one chunk, one head, one block of K, with one decay per head."""
    q, k, G, beta = inputs
    A, B, dA, dB = pairs
    X, dX, states, dstates = chunks
    dq, dk, dg = grads
    NT, N, H, K, V, rows = sizes
    s_q, s_k = strides
    i_k, i_c, i_h = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_k = tl.arange(0, BT), i_k * BK + tl.arange(0, BK)
    m_t, o_row = o_t < length, bos + o_t
    b_q, b_k, _, b_last, b_dq, b_dk, b_end, b_inner = chunk_grads(
        do, q, k, G, beta, X, dX, states, dstates, bos, length, o_t, o_k, i_c, i_h, scale, H, K, V, s_q, s_k,
        RQ, RK, BT, BK, BV, ACC, PRECISION, False,
    )  # fmt: skip
    b_reads = tl.sum(b_dq * b_q.to(ACC) + b_dk * b_k.to(ACC), 1)
    b_writes = tl.sum(b_end * b_k.to(ACC), 1)
    b_dk += b_end
    o_pair = (o_row * H + i_h)[:, None] * BT + o_t[None, :]
    b_G = tl.load(G + o_row * H + i_h, mask=m_t, other=0)
    m_lower = o_t[:, None] >= o_t[None, :]
    b_D = tl.where(m_lower & m_t[:, None], tl.exp(b_G[:, None] - b_G[None, :]), 0)
    b_dA = tl.load(dA + o_pair, mask=m_t[:, None], other=0)
    b_dB = tl.load(dB + o_pair, mask=m_t[:, None], other=0)
    b_PA, b_PB = b_dA.to(ACC) * b_D, (b_dB.to(ACC) * b_D).to(b_k.dtype)
    b_dq = tl.dot(b_PB, b_k, b_dq, input_precision=PRECISION, out_dtype=ACC)
    b_dk = tl.dot((b_PA + tl.trans(b_PA)).to(b_k.dtype), b_k, b_dk, input_precision=PRECISION, out_dtype=ACC)
    b_dk = tl.dot(tl.trans(b_PB), b_q, b_dk, input_precision=PRECISION, out_dtype=ACC)
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    o_out = (o_row * H + i_h)[:, None] * K + o_k[None, :]
    tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_tk)
    b_pairs = tl.zeros([BT, BT], ACC)
    if i_k == 0:  # A and B are sums over all channels
        b_A = tl.load(A + o_pair, mask=m_t[:, None], other=0)
        b_B = tl.load(B + o_pair, mask=m_t[:, None], other=0)
        b_own = tl.where(o_t[:, None] > o_t[None, :], b_A * b_dA.to(ACC) + b_B.to(ACC) * b_dB.to(ACC), 0)
        b_before = (o_t[:, None] < o_t[None, :]).to(b_k.dtype)
        b_pairs = tl.dot(b_own.to(b_k.dtype), b_before, input_precision=PRECISION, out_dtype=ACC)
    b_dg = tl.sum(tl.where(m_lower, b_pairs + b_reads[:, None], b_writes[:, None]), 0)
    b_dg += tl.sum(tl.sum(b_inner[None, :] * tl.exp(b_last), 1), 0)
    tl.store(dg + i_k.to(tl.int64) * rows * H + o_row * H + i_h, b_dg, mask=m_t)


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_bwd_keys_of_channels_kernel(
    do, inputs, pairs, chunks, grads, layout, scale, T, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, LIMIT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one chunk, one head, one block of K, with one decay per channel."""
    q, k, G, beta = inputs
    dA, dB = pairs
    X, dX, states, dstates = chunks
    dq, dk, dg = grads
    NT, N, H, K, V = sizes
    s_q, s_k = strides
    i_k, i_c, i_h = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_k = tl.arange(0, BT), i_k * BK + tl.arange(0, BK)
    m_t, m_k, o_row = o_t < length, o_k < K, bos + o_t
    m_tk = m_t[:, None] & m_k[None, :]
    b_q, b_k, b_G, b_last, b_dq, b_dk, b_end, b_inner = chunk_grads(
        do, q, k, G, beta, X, dX, states, dstates, bos, length, o_t, o_k, i_c, i_h, scale, H, K, V, s_q, s_k,
        RQ, RK, BT, BK, BV, ACC, PRECISION, True,
    )  # fmt: skip
    o_pair = (o_row * H + i_h)[:, None] * BT + o_t[None, :]
    # Where no channel decays by more than e^-LIMIT between the token in the middle of the chunk and the others, all
    # pairs meet there; where none does within a block, each block's pairs, and those with earlier blocks, meet in its
    # middle; else only pairs of different blocks meet, at the first token of the later one.
    middle = tl.minimum(BT // 2, length - 1)
    b_middle = tl.load(G + ((bos + middle) * H + i_h) * K + o_k, mask=m_k, other=0)[None, :]
    size = tl.where(tl.max(tl.where(m_tk, tl.abs(b_G - b_middle), 0)) <= LIMIT, BT, BC)
    b_blocks = tl.reshape(b_G, [BT // BC, BC, BK])
    own = (size == BT) | (tl.max(tl.max(b_blocks, 1) - tl.min(b_blocks, 1)) <= LIMIT)
    b_rows_q = tl.zeros([BT, BK], ACC)
    b_rows_k = tl.zeros([BT, BK], ACC)
    b_columns = tl.zeros([BT, BK], ACC)
    for first in range(0, length, size):
        meeting = tl.minimum(first + tl.where(own, size // 2, 0), length - 1)
        m_late, m_early = m_t & (o_t >= first) & (o_t < first + size), m_t & (o_t < first + tl.where(own, size, 0))
        b_meeting = tl.load(G + ((bos + meeting) * H + i_h) * K + o_k, mask=m_k, other=0)[None, :]
        b_late = tl.exp(tl.where(m_late[:, None], b_G - b_meeting, float("-inf")))
        b_early = tl.exp(tl.where(m_early[:, None], b_meeting - b_G, float("-inf")))
        m_pair = m_late[:, None] & m_early[None, :] & (o_t[:, None] > o_t[None, :])
        b_dA = tl.load(dA + o_pair, mask=m_pair, other=0)
        b_dB = tl.load(dB + o_pair, mask=m_pair, other=0)
        b_keys = (b_early * b_k.to(ACC)).to(b_k.dtype)
        b_lk, b_lq = (b_late * b_k.to(ACC)).to(b_k.dtype), (b_late * b_q.to(ACC)).to(b_k.dtype)
        b_rows_q += b_late * tl.dot(b_dB, b_keys, input_precision=PRECISION, out_dtype=ACC)
        b_rows_k += b_late * tl.dot(b_dA, b_keys, input_precision=PRECISION, out_dtype=ACC)
        b_column = tl.dot(tl.trans(b_dA), b_lk, input_precision=PRECISION, out_dtype=ACC)
        b_columns += b_early * tl.dot(tl.trans(b_dB), b_lq, b_column, input_precision=PRECISION, out_dtype=ACC)
    # pairs within a block, except those of a token with itself
    o_block = o_t // BC * BC
    for i in range(tl.where(own, BC, 0), BC):
        o_o = o_block + i
        m_o = o_o < length
        m_ok = m_o[:, None] & m_k[None, :]
        o_other = bos + o_o
        b_ko = tl.load(k + o_other[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=m_ok, other=0).to(ACC)
        b_qo = tl.load(q + o_other[:, None] * s_q + i_h // RQ * K + o_k[None, :], mask=m_ok, other=0).to(ACC)
        b_Go = tl.load(G + (o_other * H + i_h)[:, None] * K + o_k[None, :], mask=m_ok, other=0)
        m_later, m_before = m_t & (o_t > o_o), m_o & (o_t < o_o)
        # the token reads the other one
        b_D = tl.exp(tl.where(m_later[:, None] & m_k[None, :], b_G - b_Go, float("-inf"))) * b_ko
        o_p = (o_row * H + i_h) * BT + o_o
        b_rows_q += tl.load(dB + o_p, mask=m_later, other=0).to(ACC)[:, None] * b_D
        b_rows_k += tl.load(dA + o_p, mask=m_later, other=0).to(ACC)[:, None] * b_D
        # the other one reads the token
        b_D = tl.exp(tl.where(m_before[:, None] & m_k[None, :], b_Go - b_G, float("-inf")))
        o_p = (o_other * H + i_h) * BT + o_t
        b_columns += tl.load(dA + o_p, mask=m_before, other=0).to(ACC)[:, None] * b_D * b_ko
        b_columns += tl.load(dB + o_p, mask=m_before, other=0).to(ACC)[:, None] * b_D * b_qo
    b_reads = (b_dq + b_rows_q) * b_q.to(ACC) + (b_dk + b_rows_k - b_columns) * b_k.to(ACC)
    m_after = (o_t[:, None] <= o_t[None, :]).to(ACC)
    m_past = (o_t[:, None] > o_t[None, :]).to(ACC)
    b_dg = tl.dot(m_after, b_reads, input_precision=SUMS, out_dtype=ACC)
    b_dg = tl.dot(m_past, b_end * b_k.to(ACC), b_dg, input_precision=SUMS, out_dtype=ACC)
    b_dg += b_inner[None, :] * tl.exp(b_last)
    b_self = tl.load(dB + (o_row * H + i_h) * BT + o_t, mask=m_t, other=0).to(ACC)[:, None]
    b_dq += b_rows_q + b_self * b_k.to(ACC)
    b_dk += b_rows_k + b_columns + b_end + b_self * b_q.to(ACC)
    o_out = (o_row * H + i_h)[:, None] * K + o_k[None, :]
    tl.store(dq + o_out, b_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=m_tk)
    tl.store(dg + o_out, b_dg, mask=m_tk)
