"""GKA's decode step in one launch: state update, ridge, solve and read-out of one token, the state updated in place.

    H <- e^g H + beta^2 k k^T;  U <- e^g U + beta^2 v k^T;  o = scale * U (q + alpha (CH(H + ridge |H| I, q) - q))

One program owns one (sequence, head) and keeps -s H, s = 2 / (L + mu), in registers. With P = I - s (H + ridge |H| I)
and r = s q, a Chebyshev step is xi_i = omega_i (P xi_{i-1} + r) - (omega_i - 1) xi_{i-2}. The next phase of the
refinement starts from the scaled residual r - xi + P xi, so no other product with H is needed. H is symmetric, so the
product may sum over rows. The pointer of H is not specialised: because the compiler does not know its alignment, it
gives every thread whole columns of H. A step is then D multiply-adds per thread and one exchange of the vector,
without shuffles and partial sums.
"""

import triton
import triton.language as tl

from ..._page_offset import state_offset


@triton.jit
def _relaxed(b_h, b_x, shrink):
    """(I - s (H + ridge |H| I)) x, from -s H and shrink = 1 - s ridge |H|: the identity is never rounded into H."""
    return shrink * b_x + tl.sum(b_h * b_x[:, None], 0)


@triton.jit
def _chebyshev(b_h, b_r, shrink, N: tl.constexpr):
    """N Chebyshev steps for the scaled right side b_r = s q."""
    omega = tl.full([], 2.0, b_r.dtype)
    b_x, b_prev = b_r, tl.zeros_like(b_r)
    # two steps per iteration, so that the two vectors swap roles without a copy
    for _ in range(N // 2):
        omega = 4 / (4 - shrink * shrink * omega)
        b_prev = omega * (_relaxed(b_h, b_x, shrink) + b_r) - (omega - 1) * b_prev
        omega = 4 / (4 - shrink * shrink * omega)
        b_x = omega * (_relaxed(b_h, b_prev, shrink) + b_r) - (omega - 1) * b_x
    if N % 2 == 1:
        omega = 4 / (4 - shrink * shrink * omega)
        b_x = omega * (_relaxed(b_h, b_x, shrink) + b_r) - (omega - 1) * b_prev
    return b_x


@triton.jit(do_not_specialize=["h"])
def gka_step_kernel(
    q, k, v, log_decay, alpha, beta, h, u, pages, h_stride, u_stride, o,
    ridge, scale, heads,
    D: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, PHASES: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One token of one (sequence, head): updates h [D, D] and u [V, D] in place and writes o [V]."""
    i_s = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_s // heads, i_s % heads
    i_k = i_b * (heads // GROUPS) + i_h // GROUPS
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m_dd = m_d[:, None] & m_d[None, :]
    p_h = h + state_offset(i_s, heads, D * D, pages, h_stride) + o_d[:, None] * D + o_d[None, :]
    b_h = tl.load(p_h, mask=m_dd, other=0)
    b_decay = tl.exp(tl.load(log_decay + i_s).to(ACC))
    b_write = tl.load(beta + i_s).to(ACC)
    b_write *= b_write
    b_k = tl.load(k + i_k * D + o_d, mask=m_d, other=0).to(ACC)
    b_q = tl.load(q + i_s * D + o_d, mask=m_d, other=0).to(ACC)

    b_h = b_decay * b_h + (b_write * b_k)[:, None] * b_k[None, :]
    tl.store(p_h, b_h, mask=m_dd)
    b_squared = tl.sum(tl.sum(b_h * b_h, 0), 0)
    # mu = ridge |H| and L = |H| + mu make s mu a constant; a state without content is solved by x = 0
    b_norm = tl.sqrt(tl.where(b_squared > 0, b_squared, 1))
    b_step = tl.where(b_squared > 0, 2 / (b_norm * (1 + 2 * ridge)), 0)
    shrink = 1 / (1 + 2 * ridge)
    b_h = -b_step * b_h
    b_r = b_step * b_q
    b_x = tl.zeros_like(b_q)
    for i in tl.static_range(len(PHASES)):
        b_xi = _chebyshev(b_h, b_r, shrink, PHASES[i])
        b_x += b_xi
        if i + 1 < len(PHASES):
            b_r = b_r - b_xi + _relaxed(b_h, b_xi, shrink)

    b_m = scale * (b_q + tl.load(alpha + i_s).to(ACC) * (b_x - b_q))
    p_us = u + state_offset(i_s, heads, V * D, pages, u_stride)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        # loaded transposed, so that the read-out also sums over rows: the threads of a warp hold D
        p_u = p_us + o_v[None, :] * D + o_d[:, None]
        m_dv = m_d[:, None] & m_v[None, :]
        b_v = tl.load(v + i_k * V + o_v, mask=m_v, other=0).to(ACC)
        b_u = b_decay * tl.load(p_u, mask=m_dv, other=0) + (b_write * b_k)[:, None] * b_v[None, :]
        tl.store(p_u, b_u, mask=m_dv)
        b_o = tl.sum(b_u * b_m[:, None], 0)
        tl.store(o + i_s * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
