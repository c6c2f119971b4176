"""Lattice "enc" and "sim" forward, in two kernels: h does not depend on the state, only p_i = s_i . h is sequential.

`lattice_walk_kernel` finds p token by token; a warp holds a few slots of a head, and columns never meet. Given p, the
recurrence s_t = a_t s_{t-1} + b_t h_t is linear, and `lattice_read_kernel` reads y_t = S_t q_t of all windows at once:

    y_t = S_0 (q_t A_t) + sum_{j <= t} h_j (q_t . b_j A_t / A_j),  A_t = a_t ... a_1
"""

import triton
import triton.language as tl

from .dual_tiles import (
    cast,
    combine,
    inner,
    load_group,
    load_parts,
    load_slots,
    normalise,
    store_slots,
    write_rule,
)


@triton.jit
def lattice_norm_kernel(v, hh, rows, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr):
    """|v|^2 of every row."""
    o_r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    o_d = tl.arange(0, BD)
    mask = (o_r < rows)[:, None] & (o_d < D)[None, :]
    b_v = tl.load(v + o_r[:, None] * D + o_d[None, :], mask=mask, other=0).to(hh.dtype.element_ty)
    tl.store(hh + o_r, tl.sum(b_v * b_v, 1), mask=o_r < rows)


@triton.jit
def span(i_n, cu_seqlens, first, T, C: tl.constexpr):
    """First token, length and first window of a sequence."""
    if cu_seqlens is None:
        return i_n * T, T, i_n * tl.cdiv(T, C)
    else:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        return start, (tl.load(cu_seqlens + i_n + 1) - start).to(tl.int32), tl.load(first + i_n).to(tl.int64)


@triton.jit
def lattice_walk_kernel(
    k, v, hh, gamma, start_state, final_state, states, p, cu_seqlens, first, T,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, VARIANT: tl.constexpr, C: tl.constexpr, P: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p of all tokens and the states before every C-th one, for MB slots of one (sequence, head)."""
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1  # h = v or -v
    i_s = (tl.program_id(0) // tl.cdiv(M, MB)).to(tl.int64)
    i_n, i_h = i_s // H, i_s % H
    start, length, window = span(i_n, cu_seqlens, first, T, C)
    o_m = tl.program_id(0) % tl.cdiv(M, MB) * MB + tl.arange(0, MB)
    m_m = o_m < M
    S = load_slots(start_state + i_s * (M * D), o_m, M, D, D1, D2)
    at = start * H + i_h
    k, p, v, hh, gamma = k + at * M, p + at * M, v + at * D, hh + at, gamma + at
    states += (window * H + i_h) * (M * D)
    ks, vs = load_group(k, o_m, m_m, H * M, length, P), load_parts(v, H * D, length, P, D, D1, D2)
    hhs, gammas = load_group(hh, 0, True, H, length, P), load_group(gamma, 0, True, H, length, P)
    for t in range(0, length, P):
        left = length - t - P
        k, v, hh, gamma = k + P * H * M, v + P * H * D, hh + P * H, gamma + P * H
        ks_next, vs_next = load_group(k, o_m, m_m, H * M, left, P), load_parts(v, H * D, left, P, D, D1, D2)
        hhs_next, gammas_next = load_group(hh, 0, True, H, left, P), load_group(gamma, 0, True, H, left, P)
        if t % C == 0:
            S = normalise(S)
            store_slots(states, S, o_m, M, D, D2)
            states += H * (M * D)
        for i in tl.static_range(P):
            b_v = cast(vs[i], ACC)
            b_p = inner(S, b_v) * SIGN
            _, _, _, _, a, b = write_rule(b_p, ks[i].to(ACC), gammas[i].to(ACC), hhs[i], VARIANT)
            S = combine(a, S, b * SIGN, b_v)
            tl.store(p + i * (H * M) + o_m, b_p, mask=m_m & (t + i < length))
        p += P * H * M
        ks, vs, hhs, gammas = ks_next, vs_next, hhs_next, gammas_next
    store_slots(final_state + i_s * (M * D), normalise(S), o_m, M, D, D2)
