"""One iteration of multiple shooting on a GPU: computes every chunk of time exactly, from the state that enters it.

DEER corrects its trajectory token by token. Here the trajectory of a chunk is always one that the recurrence can take,
so it overflows only if the recurrence itself does.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import LINEAR, SIGMOID, gates, load_gates, load_rows, scaled

# a larger slope comes from a start too far from the solution; then the end of the chunk is used without a slope
STEEP = tl.constexpr(4.0)
# without a slope the error after an iteration is as large as the move times the slope, so a smaller move is required
SLOPELESS = tl.constexpr(1e4)


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
@triton.jit(do_not_specialize=("T", "chunks", "length", "gate_t", "gate_d"))
def coffee_chunk_kernel(
    inputs, states, maps, worst, T, chunks, length, gate_t, gate_d,
    D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, L: tl.constexpr, P: tl.constexpr, FORM: tl.constexpr,
    GATE: tl.constexpr, MATH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The end of a chunk of `length` tokens from the state `entering` it, and its slope A by that state; L lanes.

    `worst` is the largest |entering - entered| / (1 + |entering|), times the slope where that is above 1, and times
    SLOPELESS where the slope is not used.
    """
    u, lam, w, gate = inputs
    entered, entering = states
    A, ends = maps
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
    moved = tl.abs(x - tl.load(entered + o_c, mask=m_f, other=0)) / (1 + tl.abs(x))
    a = tl.zeros([L], ACC) + 1
    start = i_c * length
    left = tl.minimum(T - start, length)
    p_u = u + (i_n * T + start) * D + f
    p_g = gate + (i_n * T + start) * gate_t + f * gate_d if GATE else gate
    full = left // P * P
    us = load_rows(p_u, 0, D, m_f, left, P, ACC, True)
    factors = load_gates(p_g, 0, gate_t, m_f, left, P, ACC, GATE)
    for t in range(0, full, P):
        # rows of the next group are loaded while this one is worked on
        us_next = load_rows(p_u, P * D, D, m_f, left - t - P, P, ACC, True)
        if GATE:
            factors_next = load_gates(p_g, P * gate_t, gate_t, m_f, left - t - P, P, ACC, GATE)
        for k in tl.static_range(P):
            x, slope = local(x, us[k], factors[k], b_lam, b_w, b_w2, FORM, MATH)
            a *= slope
        us = us_next
        if GATE:
            factors = factors_next
            p_g += P * gate_t
        p_u += P * D
    for _t in range(full, left):
        us_one = load_rows(p_u, 0, D, m_f, 1, 1, ACC, False)
        factors_one = load_gates(p_g, 0, gate_t, m_f, 1, 1, ACC, GATE)
        x, slope = local(x, us_one[0], factors_one[0], b_lam, b_w, b_w2, FORM, MATH)
        a *= slope
        if GATE:
            p_g += gate_t
        p_u += D
    tl.store(ends + o_c, x, mask=m_f)
    # comparisons with what is not finite are false
    gentle = tl.abs(a) <= STEEP
    tl.store(A + o_c, tl.where(gentle, a, 0), mask=m_f)
    change = tl.where(tl.abs(a) <= 1, moved, moved * tl.abs(a))
    change = tl.where(gentle, change, change * SLOPELESS)
    change = tl.where(moved == 0, 0, tl.where(change <= 1e30, change, float("inf")))
    tl.store(worst + tl.program_id(0), tl.max(tl.where(m_f, change, 0), 0))
