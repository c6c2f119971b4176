"""Backward kernels of gla, one program per chunk: dq, dk and the decay's gradient, then dv.

RQ, RK and RV are the numbers of heads that share a head of q, k and v; RQ and RV are 1 or RK. A transposed score tile
is computed by a dot product of its own from the loaded operands, because Triton 3.4 to 3.7.0 miscompiles the transpose
of an accumulator on Hopper.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import locate_chunk


@launched
@triton.jit
def gla_bwd_kernel_dqkg(
    do, inputs, chunk_states, grads, layout, scale, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, HEADS: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dq, dk and the share of dg of one chunk, HEADS heads with one key head, one block of K.

    g_t decays what tokens i >= t read of the state before the chunk, what tokens j < t leave in the state after it,
    what i >= t read of j < t, and the state that passes through: dg_t sums these four, and nothing cancels.

    The RK / HEADS programs of a key head write their sums over heads to parts of their own.
    """
    q, k, v, G, beta = inputs
    states, dstates = chunk_states
    dq, dk, dg = grads
    T, NT, N, H, K, V, rows = sizes
    s_q, s_k, s_v = strides
    i_k, i_c, i_s = tl.program_id(0) % tl.cdiv(K, BK), tl.program_id(0) // tl.cdiv(K, BK), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_k = tl.arange(0, BT), i_k * BK + tl.arange(0, BK)
    m_t, m_k = o_t < length, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    o_row = bos + o_t
    i_kv = i_s * HEADS // RK
    # first element of this program's part of dk, and of dq if heads share it
    part = (i_s % (RK // HEADS)).to(tl.int64) * rows * (H // RK) * K
    o_sum = part + (o_row * (H // RK) + i_kv)[:, None] * K + o_k[None, :]
    m_causal = (o_t[:, None] >= o_t[None, :]) & m_t[:, None]
    m_anti = (o_t[:, None] <= o_t[None, :]) & m_t[None, :]
    b_k = tl.load(k + o_row[:, None] * s_k + i_kv * K + o_k[None, :], mask=m_tk, other=0)
    b_dk_sum = tl.zeros([BT, BK], ACC)
    b_dq_sum = tl.zeros([BT, BK], ACC)
    for i_g in range(HEADS):
        i_h = i_s * HEADS + i_g
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
            b_v = tl.load(v + o_row[:, None] * s_v + i_h // RV * V + o_v[None, :], mask=m_tv, other=0)
            b_do = tl.load(do + (o_row * H + i_h)[:, None] * V + o_v[None, :], mask=m_tv, other=0)
            b_h = tl.load(states + p_s + o_k[None, :] * V + o_v[:, None], mask=m_vk, other=0)
            b_dh = tl.load(dstates + p_s + o_k[None, :] * V + o_v[:, None], mask=m_vk, other=0)
            b_ds = tl.dot(b_do, tl.trans(b_v), b_ds, input_precision=PRECISION, out_dtype=ACC)
            b_dst = tl.dot(b_v, tl.trans(b_do), b_dst, input_precision=PRECISION, out_dtype=ACC)
            b_dq = tl.dot(b_do, b_h, b_dq, input_precision=PRECISION, out_dtype=ACC)
            b_dk = tl.dot(b_v, b_dh, b_dk, input_precision=PRECISION, out_dtype=ACC)
            b_inner += tl.sum(b_h.to(ACC) * b_dh.to(ACC), 0)
        o_G = i_h.to(tl.int64) * rows + bos
        b_G = tl.load(G + o_G + o_t, mask=m_t, other=0)
        b_end = tl.load(G + o_G + length - 1)
        b_q = tl.load(q + o_row[:, None] * s_q + i_h // RQ * K + o_k[None, :], mask=m_tk, other=0)
        b_dq *= (scale * tl.exp(b_G))[:, None]
        b_to_end = tl.exp(b_end - b_G)
        b_D = tl.where(m_causal, scale * tl.exp(b_G[:, None] - b_G[None, :]), 0)
        b_Dt = tl.where(m_anti, scale * tl.exp(b_G[None, :] - b_G[:, None]), 0)
        if beta is not None:
            b_beta = tl.load(beta + o_G + o_t, mask=m_t, other=0)
            b_to_end *= b_beta
            b_D *= b_beta[None, :]
            b_Dt *= b_beta[:, None]
        b_dk *= b_to_end[:, None]
        b_reads = tl.sum(b_dq * b_q.to(ACC), 1)
        b_writes = tl.sum(b_dk * b_k.to(ACC), 1)
        b_ds *= b_D
        b_dst *= b_Dt
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION, out_dtype=ACC)
        b_dk = tl.dot(b_dst.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION, out_dtype=ACC)
        if RQ == 1:
            p_dq = dq + (o_row * H + i_h)[:, None] * K + o_k[None, :]
            tl.store(p_dq, b_dq.to(dq.dtype.element_ty), mask=m_tk)
        else:
            b_dq_sum += b_dq
        b_pairs = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=ACC) * b_ds
        b_before = (o_t[:, None] < o_t[None, :]).to(b_k.dtype)
        b_pairs = tl.dot(b_pairs.to(b_k.dtype), b_before, input_precision=PRECISION, out_dtype=ACC)
        b_dg = tl.where(o_t[:, None] >= o_t[None, :], b_pairs + b_reads[:, None], b_writes[:, None])
        b_dg = tl.sum(b_dg, 0) + tl.sum(b_inner, 0) * tl.exp(b_end)
        tl.store(dg + i_k.to(tl.int64) * rows * H + o_row * H + i_h, b_dg, mask=m_t)
        b_dk_sum += b_dk
    tl.store(dk + o_sum, b_dk_sum.to(dk.dtype.element_ty), mask=m_tk)
    if RQ > 1:
        tl.store(dq + o_sum, b_dq_sum.to(dq.dtype.element_ty), mask=m_tk)


@launched
@triton.jit
def gla_bwd_kernel_dv(
    do, inputs, dstates, grads, layout, scale, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """dv, and the shares of dbeta and dskip, of one chunk, one value head with its RV heads, one block of V."""
    q, k, v, G, beta, skip = inputs
    dv, dbeta, dskip = grads
    T, NT, N, H, K, V, rows = sizes
    s_q, s_k, s_v = strides
    i_v, i_c, i_vh = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_t, m_v = o_t < length, o_v < V
    m_tv = m_t[:, None] & m_v[None, :]
    o_row = bos + o_t
    m_anti = (o_t[:, None] <= o_t[None, :]) & m_t[None, :]
    b_dv_sum = tl.zeros([BT, BV], ACC)
    b_v = tl.zeros([BT, BV], ACC)
    if beta is not None or skip is not None:
        b_v = tl.load(v + o_row[:, None] * s_v + i_vh * V + o_v[None, :], mask=m_tv, other=0).to(ACC)
    for i_g in range(RV):
        i_h = i_vh * RV + i_g
        p_q, p_k = q + i_h // RQ * K, k + i_h // RK * K
        p_s = (i_c.to(tl.int64) * H + i_h) * K * V
        b_dv = tl.zeros([BT, BV], ACC)
        b_st = tl.zeros([BT, BT], ACC)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < K
            m_tk = m_t[:, None] & m_k[None, :]
            b_k = tl.load(p_k + o_row[:, None] * s_k + o_k[None, :], mask=m_tk, other=0)
            b_q = tl.load(p_q + o_row[None, :] * s_q + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0)
            p_dh = dstates + p_s + o_k[:, None] * V + o_v[None, :]
            b_dh = tl.load(p_dh, mask=m_k[:, None] & m_v[None, :], other=0)
            b_st = tl.dot(b_k, b_q, b_st, input_precision=PRECISION, out_dtype=ACC)
            b_dv = tl.dot(b_k, b_dh, b_dv, input_precision=PRECISION, out_dtype=ACC)
        o_G = i_h.to(tl.int64) * rows + bos
        b_G = tl.load(G + o_G + o_t, mask=m_t, other=0)
        b_dv *= tl.exp(tl.load(G + o_G + length - 1) - b_G)[:, None]
        b_st *= tl.where(m_anti, scale * tl.exp(b_G[None, :] - b_G[:, None]), 0)
        b_do = tl.load(do + (o_row * H + i_h)[:, None] * V + o_v[None, :], mask=m_tv, other=0)
        b_dv = tl.dot(b_st.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION, out_dtype=ACC)
        if beta is not None:
            p_dbeta = dbeta + i_v.to(tl.int64) * rows * H + o_row * H + i_h
            tl.store(p_dbeta, tl.sum(b_dv * b_v, 1), mask=m_t)
            b_dv *= tl.load(beta + o_G + o_t, mask=m_t, other=0)[:, None]
        if skip is not None:
            b_dv += tl.load(skip + i_h) * b_do.to(ACC)
            b_dskip = tl.sum(tl.sum(b_do.to(ACC) * b_v, 1), 0)
            tl.store(dskip + (i_c.to(tl.int64) * tl.cdiv(V, BV) + i_v) * H + i_h, b_dskip)
        b_dv_sum += b_dv
    tl.store(dv + (o_row * (H // RV) + i_vh)[:, None] * V + o_v[None, :], b_dv_sum.to(dv.dtype.element_ty), mask=m_tv)
