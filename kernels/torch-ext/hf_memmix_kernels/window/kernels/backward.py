"""The backward pass: the weights are computed again from the scores, for queries and for keys.

    dv = P^T do;   dS = P * (do v^T - rowsum(do o));   dq = scale dS k;   dk = scale dS^T q

All later queries of a sequence read its sinks. So each tile of queries keeps its part of their gradients, and a third
pass adds the parts.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from ...gla.kernels.tiles import locate_sequence
from .tiles import LOG2E, capped, load_sink, locate, reads


@triton.jit
def weights_and_gradients(b_s, b_dp, b_lse, b_delta, valid, softcap):
    """P and the gradient of scale q k, both [BM, BN], from scale q k and do v."""
    b_s = capped(b_s, softcap)
    b_p = tl.where(valid, tl.exp2(b_s * LOG2E - b_lse[:, None]), 0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    if softcap is not None:
        b_ds *= 1 - (b_s / softcap) * (b_s / softcap)
    return b_p, b_ds


@launched
@triton.jit(do_not_specialize=["T", "N", "rows", "past", "window"])
def window_bwd_kernel_dq(
    inputs, upstream, grads, layout, T, N, rows, past, window, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one head: dq, rowsum(do o), and its part of the gradients of the sinks."""
    q, k, v = inputs
    do, o, lse = upstream
    dq, delta, parts = grads
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    i_n, i_t, bos, length, seen = locate(i_c, layout, T, N, tl.cdiv(T, BM), PACKED)
    if PACKED and length <= 0:
        return
    o_q, o_n, o_d = i_t * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    m_q, m_d = o_q < length, o_d < D
    place, m_place = ((bos + o_q[:, None]) * H + i_h) * D + o_d, m_q[:, None] & m_d
    b_q = tl.load(q + place, mask=m_place, other=0)
    b_do = tl.load(do + place, mask=m_place, other=0)
    of_head = i_h.to(tl.int64) * rows + bos + o_q
    b_lse = tl.load(lse + of_head, mask=m_q, other=0)
    b_delta = tl.sum(b_do.to(ACC) * tl.load(o + place, mask=m_place, other=0).to(ACC), 1)
    tl.store(delta + of_head, b_delta, mask=m_q)
    stride, first = (H // G) * D, (bos + i_n * past) * (H // G) + i_h // G
    p_k, p_v = k + first * D, v + first * D
    b_dq = tl.zeros([BM, BD], ACC)
    for i_s in range(SINKS):
        b_sk, b_sv = load_sink(p_k, p_v, i_s, stride, length + past, o_d, D, ACC)
        b_s = tl.sum(b_q.to(ACC) * b_sk[None, :], 1)[:, None] * scale
        b_dp = tl.sum(b_do.to(ACC) * b_sv[None, :], 1)[:, None]
        valid = (m_q & (i_s <= o_q + seen))[:, None]
        b_p, b_ds = weights_and_gradients(b_s, b_dp, b_lse, b_delta, valid, softcap)
        b_dq += b_ds * b_sk[None, :]
        part = parts + ((i_c.to(tl.int64) * H + i_h) * SINKS + i_s) * 2 * D + o_d
        tl.store(part, tl.sum(b_ds * b_q.to(ACC), 0), mask=m_d)
        tl.store(part + D, tl.sum(b_p * b_do.to(ACC), 0), mask=m_d)
    start = tl.maximum(i_t * BM + past - window + 1, 0)
    end = tl.minimum(i_t * BM + BM, length) + past
    for at in range(start, end, BN):
        o_k = at + o_n
        m_k = (o_k < end)[:, None] & m_d
        b_k = tl.load(p_k + o_k[:, None] * stride + o_d, mask=m_k, other=0)
        b_v = tl.load(p_v + o_k[:, None] * stride + o_d, mask=m_k, other=0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=ACC) * scale
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION, out_dtype=ACC)
        valid = reads(o_q, o_k, seen, past, window, SINKS) & m_q[:, None]
        _, b_ds = weights_and_gradients(b_s, b_dp, b_lse, b_delta, valid, softcap)
        b_dq += tl.dot(b_ds.to(b_k.dtype), b_k, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dq + place, (b_dq * scale).to(dq.dtype.element_ty), mask=m_place)


@launched
@triton.jit(do_not_specialize=["T", "N", "rows", "past", "window"])
def window_bwd_kernel_dkv(
    inputs, upstream, grads, layout, T, N, rows, past, window, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BN keys of one key/value head: the sum over its G query heads, without what reads them as sinks."""
    q, k, v = inputs
    do, lse, delta = upstream
    dk, dv = grads
    i_k = tl.program_id(1)
    i_n, i_t, bos, length, seen = locate(tl.program_id(0), layout, T, N, tl.cdiv(T + past, BN), PACKED)
    if PACKED and length < 0:
        return
    o_k, o_m, o_d = i_t * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BD)
    m_d = o_d < D
    place = ((bos + i_n * past + o_k[:, None]) * (H // G) + i_k) * D + o_d
    m_place = (o_k < length + past)[:, None] & m_d
    b_k = tl.load(k + place, mask=m_place, other=0)
    b_v = tl.load(v + place, mask=m_place, other=0)
    b_dk, b_dv = tl.zeros([BN, BD], ACC), tl.zeros([BN, BD], ACC)
    start = tl.maximum(i_t * BN - past, 0)
    end = tl.minimum(i_t * BN + BN - 1 - past + window, length)
    for i_g in range(G):
        i_h = i_k * G + i_g
        for at in range(start, end, BM):
            o_q = at + o_m
            m_q = o_q < length
            of_query, m_rows = ((bos + o_q[:, None]) * H + i_h) * D + o_d, m_q[:, None] & m_d
            b_q = tl.load(q + of_query, mask=m_rows, other=0)
            b_do = tl.load(do + of_query, mask=m_rows, other=0)
            of_head = i_h.to(tl.int64) * rows + bos + o_q
            b_lse = tl.load(lse + of_head, mask=m_q, other=0)
            b_delta = tl.load(delta + of_head, mask=m_q, other=0)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=ACC) * scale
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION, out_dtype=ACC)
            valid = reads(o_q, o_k, seen, past, window, SINKS) & m_q[:, None]
            b_p, b_ds = weights_and_gradients(b_s, b_dp, b_lse, b_delta, valid, softcap)
            b_dv += tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, input_precision=PRECISION, out_dtype=ACC)
            b_dk += tl.dot(tl.trans(b_ds.to(b_q.dtype)), b_q, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dk + place, (b_dk * scale).to(dk.dtype.element_ty), mask=m_place)
    tl.store(dv + place, b_dv.to(dv.dtype.element_ty), mask=m_place)


@launched
@triton.jit(do_not_specialize=["T", "past"])
def window_bwd_kernel_sinks(
    parts, grads, layout, T, past, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    SINKS: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk and dv of one sink of one sequence and one key/value head, the sum of the parts of tiles of BM queries."""
    dk, dv = grads
    cu_seqlens, first, _, _ = layout
    i_s, i_n, i_k = tl.program_id(0) % SINKS, tl.program_id(0) // SINKS, tl.program_id(1)
    bos, length = locate_sequence(i_n, cu_seqlens, T, PACKED)
    if PACKED:
        start, end = tl.load(first + i_n), tl.load(first + i_n + 1)
    else:
        start, end = i_n * tl.cdiv(T, BM), (i_n + 1) * tl.cdiv(T, BM)
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    m_d = o_d < D
    b_dk, b_dv = tl.zeros([BR, BD], ACC), tl.zeros([BR, BD], ACC)
    for i_g in range(G):
        for at in range(start, end, BR):
            tile = (at + o_r).to(tl.int64)[:, None]
            part = ((tile * H + i_k * G + i_g) * SINKS + i_s) * 2 * D + o_d
            mask = (tile < end) & m_d
            b_dk += tl.load(parts + part, mask=mask, other=0)
            b_dv += tl.load(parts + part + D, mask=mask, other=0)
    place, mask = ((bos + i_n * past + i_s) * (H // G) + i_k) * D + o_d, m_d & (i_s < length + past)
    tl.store(dk + place, (tl.sum(b_dk, 0) * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + place, tl.sum(b_dv, 0).to(dv.dtype.element_ty), mask=mask)
