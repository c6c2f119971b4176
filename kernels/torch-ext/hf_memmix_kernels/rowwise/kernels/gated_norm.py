"""RMSNorm with a gate before or after it. A program holds R rows of D channels."""

import triton
import triton.language as tl

from ..._recorder import launched


@triton.jit
def _activation(b_g, GELU: tl.constexpr):
    """act(g) and its derivative."""
    if GELU:
        b_half = 0.5 + 0.5 * tl.erf(b_g * 0.7071067811865476)
        return b_g * b_half, b_half + b_g * tl.exp(-0.5 * b_g * b_g) * 0.3989422804014327
    b_s = 1 / (1 + tl.exp(-b_g))
    return b_g * b_s, b_s * (1 + b_g * (1 - b_s))


@triton.jit
def _cut(b_y, limit):
    """b_y clamped to [-limit, limit]; NaN stays NaN."""
    return tl.where(b_y > limit, limit, tl.where(b_y < -limit, -limit, b_y))


@triton.jit
def _gate_offsets(i_r, o_d, place, D: tl.constexpr):
    """Where the rows of the gate lie: `per_token` rows one after another, and the tokens `stride` elements apart."""
    per_token, stride = place
    return ((i_r // per_token).to(tl.int64) * stride + i_r % per_token * D)[:, None] + o_d[None, :]


@launched
@triton.jit
def gated_norm_fwd_kernel(
    y, gate, weight, out, rows, groups, eps, limits, place,
    D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, HAS_GATE: tl.constexpr, GELU: tl.constexpr,
    NORM_FIRST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The output of R rows."""
    limit, gate_limit = limits
    i_r, o_d = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, BD)
    m = (i_r < rows)[:, None] & (o_d < D)[None, :]
    o = i_r[:, None] * D + o_d[None, :]
    b_y = tl.load(y + o, mask=m, other=0).to(ACC)
    b_y = _cut(b_y, limit)
    b_w = tl.load(weight + (i_r % groups)[:, None] * D + o_d[None, :], mask=m, other=0).to(ACC)
    if HAS_GATE:
        b_g = tl.load(gate + _gate_offsets(i_r, o_d, place, D), mask=m, other=0).to(ACC)
        b_a, _ = _activation(_cut(b_g, gate_limit), GELU)
        if NORM_FIRST:
            b_w *= b_a
        else:
            b_y *= b_a
    b_scale = 1 / tl.sqrt(tl.sum(b_y * b_y, 1) / D + eps)
    tl.store(out + o, (b_y * b_scale[:, None] * b_w).to(out.dtype.element_ty), mask=m)


@launched
@triton.jit
def gated_norm_bwd_kernel(
    do, inputs, grads, per_group, rows, groups, eps, limits, place,
    LOOPS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, HAS_GATE: tl.constexpr,
    GELU: tl.constexpr, NORM_FIRST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dy and dgate of LOOPS times R rows of one group, and the share of these rows in the gradient of its weights.

    n = u / rms(u); with dn the gradient of n, du = (dn - n mean(dn n)) / rms(u).
    """
    y, gate, weight = inputs
    dy, dgate, dweight = grads
    limit, gate_limit = limits
    i_g, i_p = tl.program_id(0) // per_group, tl.program_id(0) % per_group
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_w = tl.load(weight + i_g * D + o_d, mask=m_d, other=0).to(ACC)[None, :]
    b_dw = tl.zeros([BD], ACC)
    for loop in range(LOOPS):
        i_m = (i_p.to(tl.int64) * LOOPS + loop) * R + tl.arange(0, R)  # row number within this group
        i_r = i_m * groups + i_g
        m = (i_r < rows)[:, None] & m_d[None, :]
        o = i_r[:, None] * D + o_d[None, :]
        b_y = tl.load(y + o, mask=m, other=0).to(ACC)
        b_do = tl.load(do + o, mask=m, other=0).to(ACC)
        b_outside = tl.abs(b_y) > limit
        b_y = _cut(b_y, limit)
        b_u, b_a, b_slope = b_y, b_do, b_do
        if HAS_GATE:
            b_g = tl.load(gate + _gate_offsets(i_r, o_d, place, D), mask=m, other=0).to(ACC)
            b_a, b_slope = _activation(_cut(b_g, gate_limit), GELU)
            b_slope = tl.where(tl.abs(b_g) > gate_limit, 0, b_slope)
            if not NORM_FIRST:
                b_u = b_y * b_a
        b_scale = (1 / tl.sqrt(tl.sum(b_u * b_u, 1) / D + eps))[:, None]
        b_n = b_u * b_scale
        b_dn = b_do * b_w
        if HAS_GATE and NORM_FIRST:
            tl.store(dgate + o, (b_dn * b_n * b_slope).to(dgate.dtype.element_ty), mask=m)
            b_dn *= b_a
            b_do *= b_a
        b_dw += tl.sum(b_do * b_n, 0)
        b_du = b_scale * (b_dn - b_n * (tl.sum(b_dn * b_n, 1) / D)[:, None])
        if HAS_GATE and not NORM_FIRST:
            tl.store(dgate + o, (b_du * b_y * b_slope).to(dgate.dtype.element_ty), mask=m)
            b_du *= b_a
        tl.store(dy + o, tl.where(b_outside, 0, b_du).to(dy.dtype.element_ty), mask=m)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * D + o_d, b_dw.to(dweight.dtype.element_ty), mask=m_d)
