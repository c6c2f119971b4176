"""The forward pass: softmax over the keys of the window, tile by tile, with a running maximum and sum."""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import LOG2E, capped, first_keys, reads


@launched
@triton.jit
def window_fwd_kernel(
    inputs, outputs, firsts, sizes, strides, window, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BM queries of one head: o, and the logarithm of the sum of e^scores (base 2)."""
    q, k, v = inputs
    o, lse = outputs
    T, keys, before = sizes
    i_q, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_q, o_n, o_d = i_q * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    m_q, m_d = o_q < T, o_d < D
    first = first_keys(firsts, strides[0], strides[1], i_b, o_q, m_q)
    rows = ((i_b * T + o_q[:, None]) * H + i_h) * D + o_d
    b_q = tl.load(q + rows, mask=m_q[:, None] & m_d, other=0)
    b_m, b_l = tl.full([BM], float("-inf"), ACC), tl.zeros([BM], ACC)
    b_o = tl.zeros([BM, BD], ACC)
    i_k = i_h // G
    start = tl.maximum(i_q * BM + before - window + 1, 0) // BN * BN
    end = tl.minimum(i_q * BM + BM + before, keys)
    for at in range(start, end, BN):
        o_k = at + o_n
        place = ((i_b * keys + o_k[:, None]) * (H // G) + i_k) * D + o_d
        m_k = (o_k < keys)[:, None] & m_d
        b_k = tl.load(k + place, mask=m_k, other=0)
        b_v = tl.load(v + place, mask=m_k, other=0)
        b_s = capped(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=ACC) * scale, softcap) * LOG2E
        b_s = tl.where(reads(o_q, o_k, first, before, window, keys), b_s, float("-inf"))
        largest = tl.maximum(b_m, tl.max(b_s, 1))
        safe = tl.where(largest == float("-inf"), 0, largest)  # a query that has read no key yet
        b_p = tl.exp2(b_s - safe[:, None])
        shrink = tl.exp2(b_m - safe)
        b_l = b_l * shrink + tl.sum(b_p, 1)
        b_o = b_o * shrink[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION, out_dtype=ACC)
        b_m = largest
    b_l = tl.where(b_l == 0, 1, b_l)  # queries beyond the last one
    b_o = b_o / b_l[:, None]
    tl.store(o + rows, b_o.to(o.dtype.element_ty), mask=m_q[:, None] & m_d)
    tl.store(lse + (i_b * H + i_h) * T + o_q, b_m + tl.log2(b_l), mask=m_q)
