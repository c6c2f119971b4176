"""The decode step of the gated delta rule: one token per sequence and head, the state updated in place."""

import triton
import triton.language as tl

from ..._page_offset import state_offset
from ..._recorder import launched


@launched
@triton.jit
def gated_delta_step_kernel(
    inputs, state, pages, stride, o, scale, H, K, V, strides,
    RQ: tl.constexpr, RK: tl.constexpr, RV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """One token: the state's block of V columns is read once and written once."""
    q, k, v, g, beta = inputs
    s_q, s_k, s_v = strides
    i_s, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_h = i_s // H, i_s % H
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    p_s = state + state_offset(i_s, H, K * V, pages, stride) + o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0)
    b_q = tl.load(q + i_b * s_q + i_h // RQ * K + o_k, mask=m_k, other=0).to(ACC)
    b_k = tl.load(k + i_b * s_k + i_h // RK * K + o_k, mask=m_k, other=0).to(ACC)
    b_v = tl.load(v + i_b * s_v + i_h // RV * V + o_v, mask=m_v, other=0).to(ACC)
    if CHANNELS:
        b_s = b_s * tl.exp(tl.load(g + i_s * K + o_k, mask=m_k, other=0).to(ACC))[:, None]
    else:
        b_s = b_s * tl.exp(tl.load(g + i_s).to(ACC))
    b_v -= tl.sum(b_k[:, None] * b_s, 0)
    b_s += b_k[:, None] * (tl.load(beta + i_s).to(ACC) * b_v)[None, :]
    tl.store(p_s, b_s, mask=m_s)
    b_o = scale * tl.sum(b_q[:, None] * b_s, 0)
    tl.store(o + i_s * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
