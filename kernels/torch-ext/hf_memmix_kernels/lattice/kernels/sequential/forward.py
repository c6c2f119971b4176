"""Lattice forward, token by token: one program per head holds the slots of the head in registers.

    z = S k, h from z and v;  p_i = s_i . h;  s_i <- a_i s_i + b_i h;  y = S q

The critical chain of a token is two dependent reductions for "dec", over the slots (across warps) and over the entries
of a slot (within a warp), and one reduction for "enc" and "sim". y is not on the chain: threads keep their shares of
it and add them up once per GROUP tokens. Inputs are loaded one group ahead. The kernel stores the state before every
CHECKPOINT-th token for backward, and h and p of every token if the backward of the variant needs them.
"""

import triton
import triton.language as tl

from ...._recorder import launched
from .tiles import (
    advance,
    coefficients,
    direction,
    entries,
    inverse_norm,
    known,
    over_entries,
    over_shares,
    over_slots,
    share_over_slots,
    slots,
)


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
def load_group(p, offsets, mask, stride, left, GROUP: tl.constexpr):
    """The next GROUP tokens in their stored dtype; zeros beyond the `left` ones, so that nothing is written there."""
    rows = ()
    for i in tl.static_range(GROUP):
        rows = rows + (tl.load(p + i * stride + offsets, mask=mask & (i < left), other=0),)
    return rows


@launched
@triton.jit
def lattice_fwd_kernel(
    inputs, start_state, outputs, saved, saves, cu_seqlens, T, l1,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    VARIANT: tl.constexpr, PROJECT: tl.constexpr, L1: tl.constexpr,
    CHECKPOINT: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All tokens of one (sequence, head); start_state, final_state and kept are tiles, h and p as v and k or None.

    `saves` is a value and not a constant on purpose: without a branch in the loop, the loads for the next group would
    sink to where they are used.
    """
    q, k, v, gamma, log_decay = inputs
    o, final_state = outputs
    kept, h, p = saved
    i_s = tl.program_id(0).to(tl.int64)
    i_h = i_s % H
    start, length, row = sequence(i_s // H, cu_seqlens, T, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = slots(o_m) * (D1 * D2) + entries(o_d)
    o_t, o_y = tl.arange(0, GROUP)[:, None], tl.arange(0, D1 * D2)[None, :]
    m_m, m_d = o_m < M, o_d < D
    m_h = entries(m_d) & slots(o_m == 0)
    S = tl.load(start_state + i_s * (BM * D1 * D2) + o_s)
    at = start * H + i_h
    q, k, v, gamma, o = q + at * M, k + at * M, v + at * D, gamma + at, o + at * D
    kept += (row * H + i_h) * (BM * D1 * D2) + o_s
    if log_decay is not None:
        log_decay += at
    if h is not None:
        h, p = h + at * D, p + at * M
    qs, ks = load_group(q, o_m, m_m, H * M, length, GROUP), load_group(k, o_m, m_m, H * M, length, GROUP)
    vs, gammas = load_group(v, o_d, m_d, H * D, length, GROUP), load_group(gamma, 0, True, H, length, GROUP)
    decays = gammas if log_decay is None else load_group(log_decay, 0, True, H, length, GROUP)
    for t in range(0, length, GROUP):
        left = length - t - GROUP
        q, k, v, gamma = q + GROUP * H * M, k + GROUP * H * M, v + GROUP * H * D, gamma + GROUP * H
        qs_next, ks_next = load_group(q, o_m, m_m, H * M, left, GROUP), load_group(k, o_m, m_m, H * M, left, GROUP)
        vs_next, gammas_next = load_group(v, o_d, m_d, H * D, left, GROUP), load_group(gamma, 0, True, H, left, GROUP)
        decays_next = gammas_next
        if log_decay is not None:
            log_decay += GROUP * H
            decays_next = load_group(log_decay, 0, True, H, left, GROUP)
        if t % BLOCK == 0:
            if PROJECT and not L1:
                S *= slots(inverse_norm(S))  # the closed form of the norm drifts
            if (t % CHECKPOINT == 0) & (saves != 0):
                tl.store(kept, S)
                kept += H * BM * D1 * D2
        shares, ps = (), ()
        for i in tl.static_range(GROUP):
            b_k, b_v, b_gamma = ks[i].to(ACC), vs[i].to(ACC), gammas[i].to(ACC)
            b_mu = tl.full([], 1, ACC) if log_decay is None else tl.exp(decays[i].to(ACC))
            inverse = b_k if PROJECT else inverse_norm(S)
            if VARIANT == "enc" or VARIANT == "sim":
                b_h = known(b_v, VARIANT)
            else:
                b_read = b_k if PROJECT or VARIANT == "ttt" or VARIANT == "delta" else b_k * inverse
                b_h = direction(over_slots(S * slots(b_read), WARPS, LANES), b_v, VARIANT)
            b_p = b_k if VARIANT == "ttt" or VARIANT == "delta" else over_entries(S * entries(b_h))
            _, b_alpha, b_keep = coefficients(b_k, b_p, inverse, b_gamma, b_mu, VARIANT, PROJECT)
            S = advance(S, b_h, b_p, b_alpha, b_keep, b_gamma * l1, PROJECT, L1)
            shares = shares + (share_over_slots(S * slots(qs[i].to(ACC)), WARPS, LANES),)
            if h is not None:
                # stored as a tile of which one slot is written, because Triton would rearrange a vector before its
                # store
                h_s = h + i * (H * D) + entries(o_d) + 0 * slots(o_m)
                tl.store(h_s, tl.broadcast_to(entries(b_h), S.shape), mask=m_h & (t + i < length) & (saves != 0))
                ps = ps + (tl.reshape(b_p, [1, BM]),)
        if h is not None:
            mask = (t + o_t < length) & m_m[None, :] & (saves != 0)
            tl.store(p + o_t * (H * M) + o_m[None, :], over_shares(ps, GROUP), mask=mask)
        b_o = over_shares(shares, GROUP)
        tl.store(o + o_t * (H * D) + o_y, b_o.to(o.dtype.element_ty), mask=(t + o_t < length) & (o_y < D))
        o += GROUP * H * D
        if h is not None:
            h, p = h + GROUP * H * D, p + GROUP * H * M
        qs, ks, vs, gammas, decays = qs_next, ks_next, vs_next, gammas_next, decays_next
    if PROJECT and not L1:
        S *= slots(inverse_norm(S))
    tl.store(final_state + i_s * (BM * D1 * D2) + o_s, S)
