"""The backward pass: the weights are computed again from the scores, for queries and for keys.

dv = P^T do;   dS = P * (do v^T - rowsum(do o));   dq = scale dS k;   dk = scale dS^T q
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import LOG2E, capped, first_keys, reads


@triton.jit
def weights_and_gradients(
    b_q, b_k, b_v, b_do, b_lse, b_delta, valid, scale, softcap, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    """P [BM, BN] and the gradient of scale q k, [BM, BN]."""
    b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=ACC) * scale, softcap)
    b_p = tl.where(valid, tl.exp2(b_s * LOG2E - b_lse[:, None]), 0)
    b_ds = b_p * (tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION, out_dtype=ACC) - b_delta[:, None])
    if softcap is not None:
        b_ds *= 1 - (b_s / softcap) * (b_s / softcap)
    return b_p, b_ds


@launched
@triton.jit
def window_bwd_kernel_dq(
    inputs, upstream, dq, firsts, sizes, strides, window, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one head."""
    q, k, v = inputs
    do, lse, delta = upstream
    T, keys, before = sizes
    i_q, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_q, o_n, o_d = i_q * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    m_q, m_d = o_q < T, o_d < D
    first = first_keys(firsts, strides[0], strides[1], i_b, o_q, m_q)
    rows = ((i_b * T + o_q[:, None]) * H + i_h) * D + o_d
    m_rows = m_q[:, None] & m_d
    b_q = tl.load(q + rows, mask=m_rows, other=0)
    b_do = tl.load(do + rows, mask=m_rows, other=0)
    b_lse = tl.load(lse + (i_b * H + i_h) * T + o_q, mask=m_q, other=0)
    b_delta = tl.load(delta + (i_b * H + i_h) * T + o_q, mask=m_q, other=0)
    b_dq = tl.zeros([BM, BD], ACC)
    i_k = i_h // G
    start = tl.maximum(i_q * BM + before - window + 1, 0) // BN * BN
    end = tl.minimum(i_q * BM + BM + before, keys)
    for at in range(start, end, BN):
        o_k = at + o_n
        place = ((i_b * keys + o_k[:, None]) * (H // G) + i_k) * D + o_d
        m_k = (o_k < keys)[:, None] & m_d
        b_k = tl.load(k + place, mask=m_k, other=0)
        b_v = tl.load(v + place, mask=m_k, other=0)
        valid = reads(o_q, o_k, first, before, window, keys) & m_q[:, None]
        _, b_ds = weights_and_gradients(
            b_q, b_k, b_v, b_do, b_lse, b_delta, valid, scale, softcap, ACC, PRECISION
        )  # fmt: skip
        b_dq += tl.dot(b_ds.to(b_k.dtype), b_k, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dq + rows, (b_dq * scale).to(dq.dtype.element_ty), mask=m_rows)


@launched
@triton.jit
def window_bwd_kernel_dkv(
    inputs, upstream, grads, firsts, sizes, strides, window, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BN keys of one key/value head: the sum over its G query heads."""
    q, k, v = inputs
    do, lse, delta = upstream
    dk, dv = grads
    T, keys, before = sizes
    i_n, i_k, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_k, o_m, o_d = i_n * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BD)
    m_d = o_d < D
    place = ((i_b * keys + o_k[:, None]) * (H // G) + i_k) * D + o_d
    m_place = (o_k < keys)[:, None] & m_d
    b_k = tl.load(k + place, mask=m_place, other=0)
    b_v = tl.load(v + place, mask=m_place, other=0)
    b_dk, b_dv = tl.zeros([BN, BD], ACC), tl.zeros([BN, BD], ACC)
    start = tl.maximum(i_n * BN - before, 0) // BM * BM
    end = tl.minimum(i_n * BN + BN - 1 - before + window, T)
    for i_g in range(G):
        i_h = i_k * G + i_g
        for at in range(start, end, BM):
            o_q = at + o_m
            m_q = o_q < T
            first = first_keys(firsts, strides[0], strides[1], i_b, o_q, m_q)
            rows = ((i_b * T + o_q[:, None]) * H + i_h) * D + o_d
            m_rows = m_q[:, None] & m_d
            b_q = tl.load(q + rows, mask=m_rows, other=0)
            b_do = tl.load(do + rows, mask=m_rows, other=0)
            b_lse = tl.load(lse + (i_b * H + i_h) * T + o_q, mask=m_q, other=0)
            b_delta = tl.load(delta + (i_b * H + i_h) * T + o_q, mask=m_q, other=0)
            valid = reads(o_q, o_k, first, before, window, keys) & m_q[:, None]
            b_p, b_ds = weights_and_gradients(
                b_q, b_k, b_v, b_do, b_lse, b_delta, valid, scale, softcap, ACC, PRECISION
            )  # fmt: skip
            b_dv += tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, input_precision=PRECISION, out_dtype=ACC)
            b_dk += tl.dot(tl.trans(b_ds.to(b_q.dtype)), b_q, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dk + place, (b_dk * scale).to(dk.dtype.element_ty), mask=m_place)
    tl.store(dv + place, b_dv.to(dv.dtype.element_ty), mask=m_place)
