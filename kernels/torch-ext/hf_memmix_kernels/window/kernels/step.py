"""The decode step of a window: writes the token into its slot and attends to the slots that are filled."""

import triton
import triton.language as tl

from ..._page_offset import same_for_all
from ..._recorder import launched
from .tiles import capped


@launched
@triton.jit
def window_step_kernel(
    inputs, states, pages, strides, o, limits, scale, softcap,
    G: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One row and one key/value head with its G query heads. Each program has a count of tokens of its own."""
    q, k, v, sink_logits = inputs
    s_q, s_k, s_v = strides[:3]
    window, sinks = limits
    i_s = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_s // HK, i_s % HK
    if pages is None:
        p_k, p_v = states[0] + i_b * (window + sinks) * HK * D, states[1] + i_b * (window + sinks) * HK * D
        p_n = states[2] + i_b * HK
    else:
        page = tl.load(pages + i_b).to(tl.int64)
        p_k, p_v = states[0] + page * strides[3], states[1] + page * strides[4]
        p_n = states[2] + page * strides[5]
    seen = tl.maximum(same_for_all(p_n + i_h, pages), 0)  # a page of garbage may hold any number
    own = seen
    if seen >= sinks:
        own = sinks + (seen - sinks) % window
    filled = tl.minimum(seen, window + sinks)
    o_g, o_d, o_n = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, BN)
    m_g, m_d = o_g < G, o_d < D
    b_q = tl.load(q + i_b * s_q + (i_h * G + o_g[:, None]) * D + o_d, mask=m_g[:, None] & m_d, other=0)
    b_k = tl.load(k + i_b * s_k + i_h * D + o_d, mask=m_d, other=0)
    b_v = tl.load(v + i_b * s_v + i_h * D + o_d, mask=m_d, other=0)
    # the token itself first: what the slots hold of it cannot be read in the program that writes it
    b_m = capped(tl.sum(b_q.to(ACC) * b_k.to(ACC)[None, :], 1) * scale, softcap)
    b_l = tl.full([BG], 1, ACC)
    b_o = tl.zeros([BG, BD], ACC) + b_v.to(ACC)[None, :]
    if sink_logits is not None:
        b_sink = tl.load(sink_logits + i_h * G + o_g, mask=m_g, other=0).to(ACC)
        largest = tl.maximum(b_m, b_sink)
        b_l = tl.exp(b_m - largest) + tl.exp(b_sink - largest)
        b_o *= tl.exp(b_m - largest)[:, None]
        b_m = largest
    for start in range(0, filled, BN):
        slot = start + o_n
        m_n = (slot < filled) & (slot != own)
        place = (slot.to(tl.int64) * HK + i_h)[:, None] * D + o_d
        c_k = tl.load(p_k + place, mask=m_n[:, None] & m_d, other=0).to(b_q.dtype)
        c_v = tl.load(p_v + place, mask=m_n[:, None] & m_d, other=0).to(b_q.dtype)
        b_s = capped(tl.dot(b_q, tl.trans(c_k), input_precision=PRECISION, out_dtype=ACC) * scale, softcap)
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        largest = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.exp(b_s - largest[:, None])
        shrink = tl.exp(b_m - largest)
        b_l = b_l * shrink + tl.sum(b_p, 1)
        b_o = b_o * shrink[:, None] + tl.dot(b_p.to(c_v.dtype), c_v, input_precision=PRECISION, out_dtype=ACC)
        b_m = largest
    b_o /= b_l[:, None]
    tl.store(
        o + (i_b * HK * G + i_h * G + o_g[:, None]) * D + o_d, b_o.to(o.dtype.element_ty), mask=m_g[:, None] & m_d
    )
    place = (own.to(tl.int64) * HK + i_h) * D + o_d
    tl.store(p_k + place, b_k.to(states[0].dtype.element_ty), mask=m_d)
    tl.store(p_v + place, b_v.to(states[1].dtype.element_ty), mask=m_d)
    tl.store(p_n + i_h, seen + 1)
