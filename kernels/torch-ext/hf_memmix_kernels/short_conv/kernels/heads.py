"""One token of all convolutions of a layer, then the rotation and unit norm of the heads of q and k.

One program computes one head of one convolution of one sequence, or BC channels of a convolution without heads. The
outputs of the convolutions are rounded, as if they were written to memory in between.
"""

import triton
import triton.language as tl

from ..._page_offset import state_offset
from ..._recorder import launched
from ...rowwise.kernels.unit_heads import rotate
from .step import advance


@triton.jit
def _convolved(x, weight, state, first, o_d, size, K: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr):
    """The rounded outputs of channels first + o_d, zero from o_d = size on; their states are shifted."""
    b_y = advance(x, weight, None, state, first + o_d, o_d < size, K, SILU, ACC, None)
    return b_y.to(x.dtype.element_ty).to(ACC)


@triton.jit
def _unit_head(
    x, weight, state, y, cos, sin, angle_stride, first, eps,
    D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr,
    K: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y = R z / (|R z| + eps) of the head of channels first .. first + D - 1, z the output of the convolution."""
    o_h, o_r = tl.arange(0, BH), tl.arange(0, BR)
    b_square = 0.0
    if HALF > 0:
        m_h = o_h < HALF
        b_1 = _convolved(x, weight, state, first, o_h, HALF, K, SILU, ACC)
        b_2 = _convolved(x, weight, state, first + HALF, o_h, HALF, K, SILU, ACC)
        b_cos = tl.load(cos + o_h * angle_stride, mask=m_h, other=0).to(ACC)
        b_sin = tl.load(sin + o_h * angle_stride, mask=m_h, other=0).to(ACC)
        b_1, b_2 = rotate(b_1, b_2, b_cos, b_sin)
        b_square += tl.sum(b_1 * b_1 + b_2 * b_2, 0)
    if 2 * HALF < D:
        b_rest = _convolved(x, weight, state, first + 2 * HALF, o_r, D - 2 * HALF, K, SILU, ACC)
        b_square += tl.sum(b_rest * b_rest, 0)
    b_scale = 1 / (tl.sqrt(b_square) + eps)
    y += first
    if HALF > 0:
        tl.store(y + o_h, (b_1 * b_scale).to(y.dtype.element_ty), mask=m_h)
        tl.store(y + HALF + o_h, (b_2 * b_scale).to(y.dtype.element_ty), mask=m_h)
    if 2 * HALF < D:
        m_r = o_r < D - 2 * HALF
        tl.store(y + 2 * HALF + o_r, (b_rest * b_scale).to(y.dtype.element_ty), mask=m_r)


@launched
@triton.jit
def short_conv_heads_kernel(
    x, weights, states, y, angles, pages, x_strides, page_strides, angle_strides, channels, programs, eps,
    DIMS: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    K: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Tuples have one entry per convolution: `programs` is how many work on it, DIMS its head size, 0 without norm."""
    i_b, i_p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = angles
    if HALF > 0:
        cos += i_b * angle_strides[0]
        sin += i_b * angle_strides[0]
    for part in tl.static_range(len(DIMS)):
        if (i_p >= 0) & (i_p < programs[part]):
            C = channels[part]
            p_x, p_y = x[part] + i_b * x_strides[part], y[part] + i_b * C
            p_s = states[part] + state_offset(i_b, 1, C * (K - 1), pages, page_strides[part])
            if DIMS[part] > 0:
                _unit_head(
                    p_x, weights[part], p_s, p_y, cos, sin, angle_strides[1], i_p * DIMS[part], eps,
                    DIMS[part], HALF, BH, BR, K, SILU, ACC,
                )  # fmt: skip
            else:
                o_c = i_p * BC + tl.arange(0, BC)
                b_y = advance(p_x, weights[part], None, p_s, o_c, o_c < C, K, SILU, ACC, None)
                tl.store(p_y + o_c, b_y.to(p_y.dtype.element_ty), mask=o_c < C)
        i_p -= programs[part]
