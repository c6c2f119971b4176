"""The decode step of short_conv: one token per sequence, the state shifted in place."""

import triton
import triton.language as tl

from ..._page_offset import state_offset
from ..._recorder import launched
from .tiles import cut


@launched
@triton.jit
def short_conv_step_kernel(
    x, weight, bias, state, pages, stride, y, C, x_stride,
    K: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr, HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and block of channels: y, and the state shifted by one."""
    i_b, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_s = state + state_offset(i_b, 1, C * (K - 1), pages, stride) + o_c * (K - 1)
    b_x = cut(tl.load(x + i_b * x_stride + o_c, mask=m_c, other=0).to(ACC), LIMIT)
    b_z = b_x * tl.load(weight + o_c * K + K - 1, mask=m_c, other=0).to(ACC)
    if HAS_BIAS:
        b_z += tl.load(bias + o_c, mask=m_c, other=0).to(ACC)
    for j in tl.static_range(K - 1):
        b_s = tl.load(p_s + j, mask=m_c, other=0)
        b_z += b_s.to(ACC) * tl.load(weight + o_c * K + j, mask=m_c, other=0).to(ACC)
        if j > 0:
            tl.store(p_s + j - 1, b_s, mask=m_c)
    tl.store(p_s + K - 2, b_x.to(state.dtype.element_ty), mask=m_c)
    if SILU:
        b_z = b_z / (1 + tl.exp(-b_z))
    tl.store(y + i_b * C + o_c, b_z.to(y.dtype.element_ty), mask=m_c)
