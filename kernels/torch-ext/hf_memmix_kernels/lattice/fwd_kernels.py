"""Lattice forward and decode, token by token: one program a head holds its slots in registers.

    z = S k, h from z and v;  p_i = s_i . h;  s_i <- a_i s_i + b_i h;  y = S q

The chain of a token is two dependent reductions for "dec", over the slots (across warps) and over their entries (in a
warp), and one for "enc" and "sim". y is not on it: it is read together with the next token's z. Inputs are loaded one
token ahead. The states before every CHECKPOINT-th token are kept for backward.
"""

import triton
import triton.language as tl

from .tiles import advance, coefficients, direction, entries, inverse_norm, known, over_entries, slots


@triton.jit
def sequence(i_n, cu_seqlens, T, CHECKPOINT: tl.constexpr):
    """First token, length and first checkpoint of a sequence."""
    if cu_seqlens is None:
        start, length = i_n * T, T
        row = i_n * tl.cdiv(T, CHECKPOINT)
    else:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1) - start).to(tl.int32)
        row = start // CHECKPOINT + i_n
    return start, length, row


@triton.jit
def load_write(k, v, gamma, log_decay, at, mask, o_m, o_d, M: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr):
    """k [M], v [D1, D2], gamma and mu of the token at row `at` of [tokens * heads]; zeros and mu = 1 where masked."""
    b_k = tl.load(k + at * M + o_m, mask=mask & (o_m < M), other=0).to(ACC)
    b_v = tl.load(v + at * D + o_d, mask=mask & (o_d < D), other=0).to(ACC)
    b_gamma = tl.load(gamma + at, mask=mask, other=0).to(ACC)
    b_mu = tl.full([], 1, ACC)
    if log_decay is not None:
        b_mu = tl.exp(tl.load(log_decay + at, mask=mask, other=0).to(ACC))
    return b_k, b_v, b_gamma, b_mu


@triton.jit
def lattice_fwd_kernel(
    q, k, v, gamma, log_decay, start_state, o, final_state, kept, cu_seqlens, T, l1,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    VARIANT: tl.constexpr, PROJECT: tl.constexpr, L1: tl.constexpr, SAVE: tl.constexpr,
    CHECKPOINT: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All tokens of one (sequence, head); start_state, final_state and kept are tiles."""
    READS: tl.constexpr = VARIANT != "enc" and VARIANT != "sim"
    i_s = tl.program_id(0).to(tl.int64)
    i_h = i_s % H
    start, length, row = sequence(i_s // H, cu_seqlens, T, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = slots(o_m) * (D1 * D2) + entries(o_d)
    m_d = o_d < D
    S = tl.load(start_state + i_s * (BM * D1 * D2) + o_s)
    at = start * H + i_h
    b_k, b_v, b_gamma, b_mu = load_write(k, v, gamma, log_decay, at, length > 0, o_m, o_d, M, D, ACC)
    b_q = tl.zeros([BM], ACC)
    q_next = tl.load(q + at * M + o_m, mask=(length > 0) & (o_m < M), other=0).to(ACC)
    for t in range(0, length):
        at = (start + t) * H + i_h
        more = t + 1 < length
        k_next, v_next, gamma_next, mu_next = load_write(k, v, gamma, log_decay, at + H, more, o_m, o_d, M, D, ACC)
        q_after = tl.load(q + (at + H) * M + o_m, mask=more & (o_m < M), other=0).to(ACC)
        if t % BLOCK == 0:
            if SAVE:  # noqa: SIM102 (a constant, then a value)
                if t % CHECKPOINT == 0:
                    tl.store(kept + ((row + t // CHECKPOINT) * H + i_h) * (BM * D1 * D2) + o_s, S)
            if PROJECT and not L1:
                S *= slots(inverse_norm(S))  # the closed form of the norm drifts
        inverse = b_k if PROJECT else inverse_norm(S)
        if READS:
            b_read = b_k if PROJECT or VARIANT == "ttt" or VARIANT == "delta" else b_k * inverse
            b_zy = tl.sum(tl.join(S * slots(b_read), S * slots(b_q)), 0)
            b_z, b_y = tl.split(b_zy)
            tl.store(o + (at - H) * D + o_d, b_y.to(o.dtype.element_ty), mask=m_d & (t > 0))
            b_h = direction(b_z, b_v, VARIANT)
        else:
            b_h = known(b_v, VARIANT)
        b_p = b_k if VARIANT == "ttt" or VARIANT == "delta" else over_entries(S * entries(b_h))
        _, b_alpha, b_keep = coefficients(b_k, b_p, inverse, b_gamma, b_mu, VARIANT, PROJECT)
        S = advance(S, b_h, b_p, b_alpha, b_keep, b_gamma * l1, PROJECT, L1)
        b_q = q_next
        if not READS:
            b_y = tl.sum(S * slots(b_q), 0)
            tl.store(o + at * D + o_d, b_y.to(o.dtype.element_ty), mask=m_d)
        b_k, b_v, b_gamma, b_mu, q_next = k_next, v_next, gamma_next, mu_next, q_after
    if READS:
        b_y = tl.sum(S * slots(b_q), 0)
        last = (start + length - 1) * H + i_h
        tl.store(o + last * D + o_d, b_y.to(o.dtype.element_ty), mask=m_d & (length > 0))
    if PROJECT and not L1:
        S *= slots(inverse_norm(S))
    tl.store(final_state + i_s * (BM * D1 * D2) + o_s, S)


@triton.jit
def lattice_step_kernel(
    q, k, v, gamma, log_decay, state, o, l1,
    M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    VARIANT: tl.constexpr, PROJECT: tl.constexpr, L1: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One token of one (sequence, head): state [D, M] advanced in place, o [D]."""
    i_s = tl.program_id(0).to(tl.int64)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    m_s = entries(o_d < D) & slots(o_m < M)
    p_s = state + i_s * (D * M) + entries(o_d) * M + slots(o_m)
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
