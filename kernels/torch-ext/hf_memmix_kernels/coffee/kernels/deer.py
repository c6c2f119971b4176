"""One Newton iteration of DEER on a GPU: one program per chunk of time, all lanes in parallel.

A program corrects its chunk of the trajectory, x'_k = f(x_{k-1}) + J_k (x'_{k-1} - x_{k-1}), from the state that
enters the chunk. In the same pass it forms the chunk's map of the next update, d_end = A d_start + R, at the new
states.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import LINEAR, SIGMOID, gates, load_gates, load_rows, scaled


@triton.jit
def local(x, u, factor, lam, w, w2, FORM: tl.constexpr, MATH: tl.constexpr):
    """f(x) and its slope."""
    phi = gates((x,), u, w2, 1, FORM, MATH)[0]
    v = lam * x + u
    s = phi * factor
    J = 1 + lam * s
    if FORM == SIGMOID:
        J += w * ((phi - phi * phi) * factor) * v
    elif FORM == LINEAR:
        J += w * factor * v
    return x + s * v, J


@launched
@triton.jit(do_not_specialize=("T", "chunks", "gate_t", "gate_d"))
def coffee_deer_kernel(
    inputs, states, maps, worst, T, chunks, gate_t, gate_d,
    D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, L: tl.constexpr, P: tl.constexpr, LC: tl.constexpr,
    FORM: tl.constexpr, GATE: tl.constexpr, INIT: tl.constexpr, MATH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One chunk of LC tokens, L lanes; trajectory [B, chunks * LC, D, NP], the state constant beyond T.

    INIT writes the first guess, the state that enters the chunk everywhere, and only forms the map.
    """
    u, lam, w, gate = inputs
    trajectory, entered, entering = states
    A, R, ends = maps
    BLOCKS: tl.constexpr = (D * NP + L - 1) // L
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_n = row // chunks
    i_c = (row % chunks).to(tl.int32)
    lane = tl.program_id(0) % BLOCKS * L + tl.arange(0, L)
    f, j = lane // NP, lane % NP
    m_f = f < D
    m_p = m_f & (j < N)
    b_lam = tl.load(lam + f * N + j, mask=m_p, other=0).to(ACC)
    b_w = tl.load(w + f * N + j, mask=m_p, other=0).to(ACC)
    b_w2 = scaled((b_w,), 1, FORM, MATH)
    o_c = row * (D * NP) + lane
    x = tl.load(entering + o_c, mask=m_f, other=0)
    x_old = x
    if not INIT:
        x_old = tl.load(entered + o_c, mask=m_f, other=0)
    a = tl.zeros([L], ACC) + 1
    r = tl.zeros([L], ACC)
    change = tl.zeros([L], ACC)
    start = i_c * LC
    p_u = u + (i_n * T + start) * D + f
    p_g = gate + (i_n * T + start) * gate_t + f * gate_d if GATE else gate
    p_x = trajectory + row * LC * (D * NP) + lane
    for t in range(0, LC, P):
        left = T - start - t
        us = load_rows(p_u, 0, D, m_f, left, P, ACC, True)
        factors = load_gates(p_g, 0, gate_t, m_f, left, P, ACC, GATE)
        if not INIT:
            olds = load_rows(p_x, 0, D * NP, m_f, P, P, ACC, False)
        for k in tl.static_range(P):
            x_next = x
            if not INIT:
                value, J = local(x_old, us[k], factors[k], b_lam, b_w, b_w2, FORM, MATH)
                x_next = value + J * (x - x_old)
                x_old = olds[k]
                moved = tl.abs(x_next - x_old) / (1 + tl.abs(x_next))
                # what is not finite stays so
                change = tl.where(moved <= 1e30, tl.maximum(change, moved), float("inf"))
            value, J = local(x, us[k], factors[k], b_lam, b_w, b_w2, FORM, MATH)
            r = J * r + (value - x_next)
            a = a * J
            x = x_next
            tl.store(p_x + k * (D * NP), x, mask=m_f)
        p_u += P * D
        p_x += P * D * NP
        if GATE:
            p_g += P * gate_t
    tl.store(A + o_c, a, mask=m_f)
    tl.store(R + o_c, r, mask=m_f)
    tl.store(ends + o_c, x, mask=m_f)
    if not INIT:
        tl.store(worst + tl.program_id(0), tl.max(tl.where(m_f, change, 0), 0))
