"""The forward pass: softmax over sinks and keys of the window, tile by tile, with a running maximum and sum."""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import LOG2E, capped, load_sink, locate, reads


@triton.jit
def with_more(b_m, b_l, largest):
    """The maximum that is subtracted from new scores, and the factor of what was summed with an older maximum."""
    safe = tl.where(largest == float("-inf"), 0, largest)  # a query that has read no key yet
    shrink = tl.exp2(b_m - safe)
    return safe, shrink, b_l * shrink


@launched
@triton.jit(do_not_specialize=["T", "N", "rows", "past", "window"])
def window_fwd_kernel(
    inputs, outputs, layout, T, N, rows, past, window, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SINKS: tl.constexpr, PACKED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one head: o, and the logarithm of the sum of e^scores (base 2)."""
    q, k, v, sink_logits = inputs
    o, lse = outputs
    i_h = tl.program_id(1)
    i_n, i_t, bos, length, seen = locate(tl.program_id(0), layout, T, N, tl.cdiv(T, BM), PACKED)
    if PACKED and length <= 0:
        return
    o_q, o_n, o_d = i_t * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    m_q, m_d = o_q < length, o_d < D
    place = ((bos + o_q[:, None]) * H + i_h) * D + o_d
    b_q = tl.load(q + place, mask=m_q[:, None] & m_d, other=0)
    stride, first = (H // G) * D, (bos + i_n * past) * (H // G) + i_h // G
    p_k, p_v = k + first * D, v + first * D
    b_m, b_l = tl.full([BM], float("-inf"), ACC), tl.zeros([BM], ACC)
    if sink_logits is not None:
        b_m, b_l = b_l + tl.load(sink_logits + i_h).to(ACC) * LOG2E, b_l + 1
    b_o = tl.zeros([BM, BD], ACC)
    for i_s in range(SINKS):
        b_sk, b_sv = load_sink(p_k, p_v, i_s, stride, length + past, o_d, D, ACC)
        b_s = capped(tl.sum(b_q.to(ACC) * b_sk[None, :], 1) * scale, softcap) * LOG2E
        b_s = tl.where(i_s <= o_q + seen, b_s, float("-inf"))
        largest = tl.maximum(b_m, b_s)
        safe, shrink, b_l = with_more(b_m, b_l, largest)
        b_p = tl.exp2(b_s - safe)
        b_l += b_p
        b_o = b_o * shrink[:, None] + b_p[:, None] * b_sv[None, :]
        b_m = largest
    start = tl.maximum(i_t * BM + past - window + 1, 0)
    end = tl.minimum(i_t * BM + BM, length) + past
    for at in range(start, end, BN):
        o_k = at + o_n
        m_k = (o_k < end)[:, None] & m_d
        b_k = tl.load(p_k + o_k[:, None] * stride + o_d, mask=m_k, other=0)
        b_v = tl.load(p_v + o_k[:, None] * stride + o_d, mask=m_k, other=0)
        b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=ACC) * scale, softcap) * LOG2E
        b_s = tl.where(reads(o_q, o_k, seen, past, window, SINKS), b_s, float("-inf"))
        largest = tl.maximum(b_m, tl.max(b_s, 1))
        safe, shrink, b_l = with_more(b_m, b_l, largest)
        b_p = tl.exp2(b_s - safe[:, None])
        b_l += tl.sum(b_p, 1)
        b_o = b_o * shrink[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION, out_dtype=ACC)
        b_m = largest
    b_l = tl.where(b_l == 0, 1, b_l)  # queries beyond the last one
    b_o = b_o / b_l[:, None]
    tl.store(o + place, b_o.to(o.dtype.element_ty), mask=m_q[:, None] & m_d)
    tl.store(lse + i_h.to(tl.int64) * rows + bos + o_q, b_m + tl.log2(b_l), mask=m_q)
