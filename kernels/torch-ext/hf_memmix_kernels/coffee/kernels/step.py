"""The decode step of COFFEE: one token per sequence, the state read once and written once."""

import triton
import triton.language as tl

from ..._page_offset import state_offset
from ..._recorder import launched
from .forward import filtered
from .tiles import advance, load_states, scaled, store_states


@launched
@triton.jit(do_not_specialize=("gate_b", "gate_d"))
def coffee_step_kernel(
    u, lam, w, C, F, gate, state, pages, stride, y, gate_b, gate_d,
    D: tl.constexpr, N: tl.constexpr, S: tl.constexpr, NS: tl.constexpr, L: tl.constexpr, FORM: tl.constexpr,
    FILTER: tl.constexpr, GATE: tl.constexpr, MATH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, L lanes; the state is read once and written once."""
    BLOCKS: tl.constexpr = (D * S + L - 1) // L
    i_n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    lane = tl.program_id(0) % BLOCKS * L + tl.arange(0, L)
    f, split = lane // S, lane % S
    m_f = f < D
    b_lam = load_states(lam, f * N + split, m_f, S, NS, ACC, N - split)
    b_w = scaled(load_states(w, f * N + split, m_f, S, NS, ACC, N - split), NS, FORM, MATH)
    b_C = load_states(C, f * N + split, m_f, S, NS, ACC, N - split)
    b_F = b_C
    if FILTER:
        b_F = load_states(F, f * N + split, m_f, S, NS, ACC, N - split)
    o_x = state_offset(i_n, 1, D * N, pages, stride) + f * N + split
    x = load_states(state, o_x, m_f, S, NS, ACC, N - split)
    b_u = tl.load(u + i_n * D + f, mask=m_f, other=0).to(ACC)
    factor = b_u
    if GATE:
        factor = tl.load(gate + i_n * gate_b + f * gate_d, mask=m_f, other=0).to(ACC)
    x, phi = advance(x, b_u, factor, b_lam, b_w, NS, FORM, GATE, MATH)
    store_states(state, o_x, m_f, S, x, NS, N - split)
    b_y = filtered(x, b_C, b_F, NS, L, S, FILTER, MATH)
    tl.store(y + i_n * D + f, b_y.to(y.dtype.element_ty), mask=m_f & (split == 0))
