"""Step sizes and decays: dt = softplus(x + bias), g = -e^A_log dt. A program holds R tokens of BH heads."""

import triton
import triton.language as tl

from ..._recorder import launched


@triton.jit
def softplus(b_z):
    """log(1 + e^z), exact to rounding also for small e^z; z itself from 20 on, as in torch."""
    b_e = tl.exp(tl.minimum(b_z, 20))
    b_u = 1 + b_e
    b_log = tl.where(b_u == 1, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1, 1, b_u - 1)))
    return tl.where(b_z > 20, b_z, b_log)


@triton.jit
def _step_sizes(b_x, b_bias, limits):
    """x + bias with x clamped, dt, and where the gradient of dt passes to the sum, and from there to x."""
    limit, low, high = limits
    b_z = tl.where(b_x > limit, limit, tl.where(b_x < -limit, -limit, b_x)) + b_bias
    b_dt = softplus(b_z)
    m_z, m_x = (b_dt >= low) & (b_dt <= high), tl.abs(b_x) <= limit
    return b_z, tl.where(b_dt < low, low, tl.where(b_dt > high, high, b_dt)), m_z, m_x


@launched
@triton.jit
def decay_fwd_kernel(
    inputs, dt, g, rows, H, stride, limits,
    R: tl.constexpr, BH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dt and g [rows, H]; rows of x are `stride` elements apart."""
    x, bias, A_log = inputs
    i_r, o_h = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, BH)
    m_h = o_h < H
    m = (i_r < rows)[:, None] & m_h[None, :]
    b_x = tl.load(x + i_r[:, None] * stride + o_h[None, :], mask=m, other=0).to(ACC)
    b_bias = tl.load(bias + o_h, mask=m_h, other=0).to(ACC)[None, :]
    b_rate = -tl.exp(tl.load(A_log + o_h, mask=m_h, other=0).to(ACC))[None, :]
    _, b_dt, _, _ = _step_sizes(b_x, b_bias, limits)
    o = i_r[:, None] * H + o_h[None, :]
    tl.store(dt + o, b_dt, mask=m)
    tl.store(g + o, b_rate * b_dt, mask=m)


@launched
@triton.jit
def decay_bwd_kernel(
    upstream, inputs, dx, dparams, rows, H, stride, limits,
    R: tl.constexpr, BH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dx of R tokens, and their share of the gradients of bias and A_log [2, H]."""
    ddt, dg = upstream
    x, bias, A_log = inputs
    i_r, o_h = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.arange(0, BH)
    m_h = o_h < H
    m = (i_r < rows)[:, None] & m_h[None, :]
    o = i_r[:, None] * H + o_h[None, :]
    b_x = tl.load(x + i_r[:, None] * stride + o_h[None, :], mask=m, other=0).to(ACC)
    b_bias = tl.load(bias + o_h, mask=m_h, other=0).to(ACC)[None, :]
    b_rate = -tl.exp(tl.load(A_log + o_h, mask=m_h, other=0).to(ACC))[None, :]
    b_z, b_dt, m_z, m_x = _step_sizes(b_x, b_bias, limits)
    b_ddt, b_dA = tl.zeros([R, BH], ACC), tl.zeros([BH], ACC)
    if ddt is not None:
        b_ddt += tl.load(ddt + o, mask=m, other=0).to(ACC)
    if dg is not None:
        b_drate = tl.load(dg + o, mask=m, other=0).to(ACC) * b_rate
        b_ddt += b_drate
        b_dA += tl.sum(b_drate * b_dt, 0)
    b_dz = tl.where(m_z, b_ddt / (1 + tl.exp(-b_z)), 0)
    tl.store(dx + o, tl.where(m_x, b_dz, 0).to(dx.dtype.element_ty), mask=m)
    p = dparams + tl.program_id(0).to(tl.int64) * 2 * H + o_h
    tl.store(p, tl.sum(b_dz, 0), mask=m_h)
    tl.store(p + H, b_dA, mask=m_h)
