"""The decode step of Lattice: one token per sequence and head, the state updated in place."""

import triton
import triton.language as tl

from ...._page_offset import state_offset
from ...._recorder import launched
from .forward import load_write
from .tiles import advance, coefficients, direction, entries, inverse_norm, known, over_entries, slots


@launched
@triton.jit
def lattice_step_kernel(
    q, k, v, gamma, log_decay, state, pages, stride, o, l1, heads,
    M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    VARIANT: tl.constexpr, PROJECT: tl.constexpr, L1: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one (sequence, head): updates the state [D, M] in place and writes o [D]."""
    i_s = tl.program_id(0).to(tl.int64)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    m_s = entries(o_d < D) & slots(o_m < M)
    p_s = state + state_offset(i_s, heads, D * M, pages, stride) + entries(o_d) * M + slots(o_m)
    S = tl.load(p_s, mask=m_s, other=0)
    b_k, b_v, b_gamma, b_mu = load_write(k, v, gamma, log_decay, i_s, True, o_m, o_d, M, D, ACC)
    b_q = tl.load(q + i_s * M + o_m, mask=o_m < M, other=0).to(ACC)
    inverse = b_k if PROJECT else inverse_norm(S)
    if VARIANT == "enc" or VARIANT == "sim":
        b_h = known(b_v, VARIANT)
    else:
        b_read = b_k if PROJECT or VARIANT == "ttt" or VARIANT == "delta" else b_k * inverse
        b_h = direction(tl.sum(S * slots(b_read), 0), b_v, VARIANT)
    b_p = b_k if VARIANT == "ttt" or VARIANT == "delta" else over_entries(S * entries(b_h))
    _, b_alpha, b_keep = coefficients(b_k, b_p, inverse, b_gamma, b_mu, VARIANT, PROJECT)
    S = advance(S, b_h, b_p, b_alpha, b_keep, b_gamma * l1, PROJECT, L1)
    if PROJECT and not L1:
        S *= slots(inverse_norm(S))
    tl.store(p_s, S, mask=m_s)
    b_o = tl.sum(S * slots(b_q), 0)
    tl.store(o + i_s * D + o_d, b_o.to(o.dtype.element_ty), mask=o_d < D)
