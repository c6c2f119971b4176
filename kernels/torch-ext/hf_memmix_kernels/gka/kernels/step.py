"""GKA's decode step in one launch: state update, ridge, solve and read-out of one token, the state updated in place.

    H <- e^g H + beta^2 k k^T;  U <- e^g U + beta^2 v k^T;  o = scale * U (q + alpha (CH(H + ridge |H| I, q) - q))

One program owns one (sequence, head) and keeps -s H, s = 2 / (L + mu), in registers. With P = I - s (H + ridge |H| I)
and r = s q, a Chebyshev step is xi_i = omega_i (P xi_{i-1} + r) - (omega_i - 1) xi_{i-2}. The next phase of the
refinement starts from the scaled residual r - xi + P xi, so no other product with H is needed. H is symmetric, so the
product may sum over rows. The pointer of H is not specialised: because the compiler does not know its alignment, it
gives every thread whole columns of H. A step is then D multiply-adds per thread and one exchange of the vector,
without shuffles and partial sums.

With LOW, the registers of a multiprocessor cannot hold H in float32. The iterations then multiply by -s H in float16
on the tensor cores, and the residual between two phases uses the float32 state in memory, which corrects what the
rounding of H changed.
"""

import triton
import triton.language as tl

from ..._page_offset import state_offset
from ..._recorder import launched


@triton.jit
def _product(b_h, b_x):
    """-s H x, for -s H [D, D] in float16 or in the dtype of x."""
    if b_h.dtype == tl.float16:
        # the sum of two float16 numbers, high and low, is x to 22 bits. A product has at least 16 rows, so both fit
        high = b_x.to(tl.float16)
        low = (b_x - high.to(b_x.dtype)).to(tl.float16)
        row = tl.arange(0, 16)[:, None]
        parts = tl.where(row == 0, high[None, :], tl.where(row == 1, low[None, :], 0.0))
        return tl.sum(tl.dot(parts, b_h), 0)
    else:
        return tl.sum(b_h * b_x[:, None], 0)


@triton.jit
def _relaxed(b_h, b_x, shrink):
    """(I - s (H + ridge |H| I)) x, from -s H and shrink = 1 - s ridge |H|: the identity is never rounded into H."""
    return shrink * b_x + _product(b_h, b_x)


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


@triton.jit
def _advance(h, k, b_k, b_decay, b_write, i_0, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """Update rows i_0 .. i_0 + ROWS of H in place, and return them."""
    o_r, o_d = i_0 + tl.arange(0, ROWS), tl.arange(0, BD)
    mask = (o_r < D)[:, None] & (o_d < D)[None, :]
    p_h = h + o_r[:, None] * D + o_d[None, :]
    b_r = tl.load(k + o_r, mask=o_r < D, other=0).to(b_k.dtype)
    b_h = b_decay * tl.load(p_h, mask=mask, other=0) + (b_write * b_r)[:, None] * b_k[None, :]
    tl.store(p_h, b_h, mask=mask)
    return b_h


@launched
@triton.jit(do_not_specialize=["h"])
def gka_step_kernel(
    q, k, v, log_decay, alpha, beta, h, u, pages, h_stride, u_stride, o,
    ridge, scale, heads,
    D: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, PHASES: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    LOW: tl.constexpr, ASM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one (sequence, head): updates h [D, D] and u [V, D] in place and writes o [V]."""
    i_s = tl.program_id(0).to(tl.int64)
    i_b, i_h = i_s // heads, i_s % heads
    i_k = i_b * (heads // GROUPS) + i_h // GROUPS
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    p_hs = h + state_offset(i_s, heads, D * D, pages, h_stride)
    p_us = u + state_offset(i_s, heads, V * D, pages, u_stride)
    b_decay = tl.exp(tl.load(log_decay + i_s).to(ACC))
    b_write = tl.load(beta + i_s).to(ACC)
    b_write *= b_write
    b_k = tl.load(k + i_k * D + o_d, mask=m_d, other=0).to(ACC)
    b_q = tl.load(q + i_s * D + o_d, mask=m_d, other=0).to(ACC)

    if LOW:
        b_squared = tl.zeros([], ACC)
        for i_0 in range(0, D, 64):
            b_h = _advance(p_hs, k + i_k * D, b_k, b_decay, b_write, i_0, D, BD, 64)
            b_squared += tl.sum(tl.sum(b_h * b_h, 0), 0)
    else:
        b_h = _advance(p_hs, k + i_k * D, b_k, b_decay, b_write, 0, D, BD, BD)
        b_squared = tl.sum(tl.sum(b_h * b_h, 0), 0)
    if LOW and ASM:
        # U is read after the solve: 128 bytes per address are on their way to the L2 cache until then
        p_line = p_us + tl.arange(0, BD * BD // 32) % (V * D // 32) * 32
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line], tl.int32, is_pure=False, pack=1
        )
    # mu = ridge |H| and L = |H| + mu make s mu a constant; a state without content is solved by x = 0
    b_norm = tl.sqrt(tl.where(b_squared > 0, b_squared, 1))
    b_step = tl.where(b_squared > 0, 2 / (b_norm * (1 + 2 * ridge)), 0)
    shrink = 1 / (1 + 2 * ridge)
    b_r = b_step * b_q
    if LOW:
        tl.debug_barrier()  # other threads wrote the rows that a thread reads now
        p_h = p_hs + o_d[:, None] * D + o_d[None, :]
        m_h = m_d[:, None] & m_d[None, :]
        b_h = (-b_step * tl.load(p_h, mask=m_h, other=0)).to(tl.float16)
        # in units in which float16 holds the solutions of all phases
        b_unit = tl.max(tl.abs(b_r), 0)
        b_unit = tl.where(b_unit > 0, b_unit, 1)
        b_r /= b_unit
    else:
        b_h = -b_step * b_h
    b_x = tl.zeros_like(b_q)
    for i in tl.static_range(len(PHASES)):
        b_xi = _chebyshev(b_h, b_r, shrink, PHASES[i])
        b_x += b_xi
        if i + 1 < len(PHASES):
            if LOW:
                image = tl.sum(tl.load(p_h, mask=m_h, other=0) * (b_step * b_xi)[:, None], 0)
                b_r = b_r - b_xi + shrink * b_xi - image
            else:
                b_r = b_r - b_xi + _relaxed(b_h, b_xi, shrink)
    if LOW:
        b_x *= b_unit

    b_m = scale * (b_q + tl.load(alpha + i_s).to(ACC) * (b_x - b_q))
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
