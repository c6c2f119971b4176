"""The decode step of short_conv: one token per sequence, the state shifted in place."""

import triton
import triton.language as tl

from ..._page_offset import state_offset
from ..._recorder import launched
from .tiles import cut


@triton.jit
def advance(
    x, weight, bias, state, o_c, m_c,
    K: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The output of channels o_c for one token of one sequence, in ACC; the state [C, K-1] is shifted by one."""
    p_s, p_w = state + o_c * (K - 1), weight + o_c * K
    b_x = cut(tl.load(x + o_c, mask=m_c, other=0).to(ACC), LIMIT)
    b_z = b_x * tl.load(p_w + K - 1, mask=m_c, other=0).to(ACC)
    if bias is not None:
        b_z += tl.load(bias + o_c, mask=m_c, other=0).to(ACC)
    past = ()
    for j in tl.static_range(K - 1):
        past = past + (tl.load(p_s + j, mask=m_c, other=0),)
        b_z += past[j].to(ACC) * tl.load(p_w + j, mask=m_c, other=0).to(ACC)
    tl.debug_barrier()  # with more threads than channels, several threads read what one of them writes
    for j in tl.static_range(K - 2):
        tl.store(p_s + j, past[j + 1], mask=m_c)
    tl.store(p_s + K - 2, b_x.to(state.dtype.element_ty), mask=m_c)
    if SILU:
        b_z = b_z / (1 + tl.exp(-b_z))
    return b_z


@launched
@triton.jit
def short_conv_step_kernel(
    x, weight, bias, state, pages, stride, y, C, x_stride,
    K: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and block of channels: y, and the state shifted by one."""
    i_b, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    state += state_offset(i_b, 1, C * (K - 1), pages, stride)
    b_y = advance(x + i_b * x_stride, weight, bias, state, o_c, m_c, K, SILU, ACC, LIMIT)
    tl.store(y + i_b * C + o_c, b_y.to(y.dtype.element_ty), mask=m_c)
