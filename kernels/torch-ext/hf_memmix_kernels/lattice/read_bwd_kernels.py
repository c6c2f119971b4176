"""Lattice backward for "dec" with projection, in three passes: only the adjoint g is sequential.

Forward keeps h, which is all that a token adds to the slots: p = S^T h, and with it the states of every window of
CHECKPOINT tokens, are found again for all windows at once (`lattice_replay_kernel`, which also reads dq = S'^T do).
`lattice_adjoint_kernel` then walks back with g alone, over states that it advances without reductions, and
`lattice_key_kernel` finds dk for all windows at once.

s' = a s + b h, a = beta (1 - alpha p), b = beta alpha, alpha = -gamma k, beta = 1 / |s + alpha P(s) h|. With g those
of s', x = s . g, w = h . g (per slot), sigma = s' . g = a x + b w and D = beta (g - sigma s'):

    r = s . D = beta (x - beta sigma),  dalpha = h . D - p r,  dz = sum_i alpha_i (D_i - r_i s_i) = -dv
    g <- (1 - alpha p) D - alpha r h + k dz,  dk = -gamma dalpha + S^T dz,  dgamma = -sum_i k_i dalpha_i
"""

import triton
import triton.language as tl

from .fwd_kernels import load_group, sequence
from .tiles import (
    entries,
    inverse_norm,
    over_entries,
    over_shares,
    over_slots_but,
    rescale,
    slots,
)


@triton.jit
def window_of(i_c, cu_seqlens, first, sequence_of, T, N, CHECKPOINT: tl.constexpr):
    """First token, length and checkpoint of window i_c; windows beyond the last are empty."""
    if cu_seqlens is None:
        windows = tl.cdiv(T, CHECKPOINT)
        begin = i_c % windows * CHECKPOINT
        return (i_c // windows).to(tl.int64) * T + begin, tl.minimum(T - begin, CHECKPOINT), i_c.to(tl.int64)
    else:
        i_n = tl.load(sequence_of + i_c)
        last = tl.minimum(i_n, N - 1)
        start = tl.load(cu_seqlens + last).to(tl.int64)
        window = tl.where(i_n < N, i_c - tl.load(first + last), 0).to(tl.int64)
        left = (tl.load(cu_seqlens + last + 1) - start - window * CHECKPOINT).to(tl.int32)
        tokens = tl.where(i_n < N, tl.minimum(left, CHECKPOINT), 0)
        return start + window * CHECKPOINT, tokens, start // CHECKPOINT + last + window


@triton.jit
def rule(k, p, hh, gamma):
    """alpha, 1 - alpha p and beta of an update."""
    alpha = -gamma * k
    return alpha, 1 - alpha * p, rescale(alpha, p, hh)


@triton.jit
def move(S, h, alpha, keep, beta):
    """The tile after an update."""
    return slots(beta * keep) * S + slots(beta * alpha) * entries(h)


@triton.jit
def lattice_replay_kernel(
    do, k, gamma, h, hh, kept, states, p, dq, cu_seqlens, first, sequence_of, T, N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    CHECKPOINT: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p and dq of a window, and the tiles `states` before every STRIDE-th of its tokens."""
    TILE: tl.constexpr = BM * D1 * D2
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, tokens, row = window_of(i_c, cu_seqlens, first, sequence_of, T, N, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = slots(o_m) * (D1 * D2) + entries(o_d)
    m_m, m_d = o_m < M, o_d < D
    S = tl.load(kept + (row * H + i_h) * TILE + o_s)
    states += (row * (CHECKPOINT // STRIDE) * H + i_h) * TILE + o_s
    for t in range(0, tokens):
        at = (begin + t) * H + i_h
        if t % BLOCK == 0:
            S *= slots(inverse_norm(S))
        if t % STRIDE == 0:
            tl.store(states + t // STRIDE * (H * TILE), S)
        b_k, b_gamma = tl.load(k + at * M + o_m, mask=m_m, other=0).to(ACC), tl.load(gamma + at).to(ACC)
        b_do = tl.load(do + at * D + o_d, mask=m_d, other=0).to(ACC)
        b_h = tl.load(h + at * D + o_d, mask=m_d, other=0)
        b_p, b_hh = over_entries(S * entries(b_h)), tl.load(hh + at)
        S = move(S, b_h, *rule(b_k, b_p, b_hh, b_gamma))
        tl.store(p + at * M + o_m, b_p, mask=m_m)
        tl.store(dq + at * M + o_m, over_entries(S * entries(b_do)).to(dq.dtype.element_ty), mask=m_m)


@triton.jit
def load_pair(
    k, p, h, hh, gamma, at, left, o_m, o_d, H: tl.constexpr, M: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """k, p, h, |h|^2 and gamma of tokens `at` and the next, of which there are `left`."""
    return (
        load_group(k + at * (H * M), o_m, o_m < M, H * M, left, 2),
        load_group(p + at * (H * M), o_m, o_m < M, H * M, left, 2),
        load_group(h + at * (H * D), o_d, o_d < D, H * D, left, 2),
        load_group(hh + at * H, 0, True, H, left, 2),
        load_group(gamma + at * H, 0, True, H, left, 2),
    )


@triton.jit
def token_adjoint(g, S, h, q, do, p, hh, alpha, keep, beta, WARPS: tl.constexpr, LANES: tl.constexpr):
    """The adjoint of a token's slots but for k dz, then dalpha and dz."""
    g += slots(q) * entries(do)
    x, w = over_entries(S * g), over_entries(g * entries(h))
    a, b = beta * keep, beta * alpha
    sigma = a * x + b * w
    r = beta * (x - beta * sigma)
    dalpha = beta * (w - (a * p + b * hh) * sigma) - p * r
    # D = beta g - along a s - along b h
    along = beta * sigma
    share = slots(b) * g - slots(alpha * (r + along * a)) * S
    dz = over_slots_but(share, alpha * along * b, h, WARPS, LANES)
    g = slots(a) * g - slots(keep * along * a) * S - slots(alpha * r + keep * along * b) * entries(h)
    return g, dalpha, dz


@triton.jit
def lattice_adjoint_kernel(
    dfinal, do, q, k, gamma, h, p, hh, states, dz, dalpha, dstart, scratch, cu_seqlens, T,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr,
    CHECKPOINT: tl.constexpr, STRIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dz and dalpha of all tokens of one (sequence, head), and dstart.

    Tokens go in pairs: `scratch` [STRIDE / 2 tiles a program] holds the state before each pair of a block, and the
    state between its tokens is found from it. A token that fills up the last pair writes nothing (gamma = 0).
    """
    TILE: tl.constexpr = BM * D1 * D2
    i_s = tl.program_id(0).to(tl.int64)
    i_h = i_s % H
    start, length, row = sequence(i_s // H, cu_seqlens, T, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = slots(o_m) * (D1 * D2) + entries(o_d)
    o_one, o_t = entries(o_d) + 0 * slots(o_m), tl.arange(0, 2)[:, None]
    m_m, m_d = o_m < M, o_d < D
    m_one = entries(m_d) & slots(o_m == 0)
    scratch += i_s * (STRIDE // 2 * TILE) + o_s
    states += (row * (CHECKPOINT // STRIDE) * H + i_h) * TILE + o_s
    at = start * H + i_h
    q, k, p, dalpha = q + at * M, k + at * M, p + at * M, dalpha + at * M
    do, h, dz, gamma, hh = do + at * D, h + at * D, dz + at * D, gamma + at, hh + at
    g = tl.load(dfinal + i_s * TILE + o_s)
    blocks = tl.cdiv(length, STRIDE)
    for i in range(0, blocks):
        first = (blocks - 1 - i).to(tl.int64) * STRIDE
        tokens = tl.minimum(length - first, STRIDE).to(tl.int32)
        S = tl.load(states + first // STRIDE * (H * TILE))
        # forward over the block
        ks, ps, hs, hhs, gammas = load_pair(k, p, h, hh, gamma, first, tokens, o_m, o_d, H, M, D)
        for t in range(0, tokens, 2):
            ks_next, ps_next, hs_next, hhs_next, gammas_next = load_pair(
                k, p, h, hh, gamma, first + t + 2, tokens - t - 2, o_m, o_d, H, M, D
            )
            tl.store(scratch + t // 2 * TILE, S)
            for j in tl.static_range(2):
                S = move(S, hs[j], *rule(ks[j].to(ACC), ps[j], hhs[j], gammas[j].to(ACC)))
            ks, ps, hs, hhs, gammas = ks_next, ps_next, hs_next, hhs_next, gammas_next
        tl.debug_barrier()
        # and back
        pairs = (tokens + 1) // 2
        at, left = first + 2 * pairs - 2, tokens - 2 * pairs + 2
        ks, ps, hs, hhs, gammas = load_pair(k, p, h, hh, gamma, at, left, o_m, o_d, H, M, D)
        qs = load_group(q + at * (H * M), o_m, m_m, H * M, left, 2)
        dos = load_group(do + at * (H * D), o_d, m_d, H * D, left, 2)
        S = tl.load(scratch + (pairs - 1) * TILE)
        for j in range(0, pairs):
            pair = pairs - 1 - j
            before = tl.maximum(pair - 1, 0)
            at = first + 2 * before
            ks_next, ps_next, hs_next, hhs_next, gammas_next = load_pair(k, p, h, hh, gamma, at, 2, o_m, o_d, H, M, D)
            qs_next = load_group(q + at * (H * M), o_m, m_m, H * M, 2, 2)
            dos_next = load_group(do + at * (H * D), o_d, m_d, H * D, 2, 2)
            k_0, k_1 = ks[0].to(ACC), ks[1].to(ACC)
            alpha_0, keep_0, beta_0 = rule(k_0, ps[0], hhs[0], gammas[0].to(ACC))
            alpha_1, keep_1, beta_1 = rule(k_1, ps[1], hhs[1], gammas[1].to(ACC))
            middle = move(S, hs[0], alpha_0, keep_0, beta_0)
            g, dalpha_1, dz_1 = token_adjoint(
                g, middle, hs[1], qs[1].to(ACC), dos[1].to(ACC), ps[1], hhs[1], alpha_1, keep_1, beta_1, WARPS, LANES
            )
            g += slots(k_1) * entries(dz_1)
            g, dalpha_0, dz_0 = token_adjoint(
                g, S, hs[0], qs[0].to(ACC), dos[0].to(ACC), ps[0], hhs[0], alpha_0, keep_0, beta_0, WARPS, LANES
            )
            g += slots(k_0) * entries(dz_0)
            S = tl.load(scratch + before * TILE)
            at, two = first + 2 * pair, 2 * pair + 1 < tokens
            # as tiles, of which one slot is stored: what a vector would be rearranged for
            tl.store(dz + at * (H * D) + o_one, tl.broadcast_to(entries(dz_0), S.shape), mask=m_one)
            tl.store(dz + (at + 1) * (H * D) + o_one, tl.broadcast_to(entries(dz_1), S.shape), mask=m_one & two)
            both = over_shares((tl.reshape(dalpha_0, [1, BM]), tl.reshape(dalpha_1, [1, BM])), 2)
            tl.store(dalpha + (at + o_t) * (H * M) + o_m[None, :], both, mask=m_m[None, :] & ((o_t == 0) | two))
            ks, ps, qs, dos, hs, hhs, gammas = ks_next, ps_next, qs_next, dos_next, hs_next, hhs_next, gammas_next
        tl.debug_barrier()
    tl.store(dstart + i_s * TILE + o_s, g)


@triton.jit
def lattice_key_kernel(
    k, gamma, h, p, hh, kept, dz, dalpha, dk, dv, dgamma, cu_seqlens, first, sequence_of, T, N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    CHECKPOINT: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk, dv and dgamma of a window."""
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, tokens, row = window_of(i_c, cu_seqlens, first, sequence_of, T, N, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    m_m, m_d = o_m < M, o_d < D
    S = tl.load(kept + (row * H + i_h) * (BM * D1 * D2) + slots(o_m) * (D1 * D2) + entries(o_d))
    for t in range(0, tokens):
        at = (begin + t) * H + i_h
        if t % BLOCK == 0:
            S *= slots(inverse_norm(S))
        b_k, b_gamma = tl.load(k + at * M + o_m, mask=m_m, other=0).to(ACC), tl.load(gamma + at).to(ACC)
        b_dz = tl.load(dz + at * D + o_d, mask=m_d, other=0)
        b_h = tl.load(h + at * D + o_d, mask=m_d, other=0)
        b_p, b_hh = tl.load(p + at * M + o_m, mask=m_m, other=0), tl.load(hh + at)
        b_dalpha = tl.load(dalpha + at * M + o_m, mask=m_m, other=0)
        b_dk = over_entries(S * entries(b_dz)) - b_gamma * b_dalpha
        tl.store(dk + at * M + o_m, b_dk.to(dk.dtype.element_ty), mask=m_m)
        tl.store(dv + at * D + o_d, (-b_dz).to(dv.dtype.element_ty), mask=m_d)
        tl.store(dgamma + at, -tl.sum(b_k * b_dalpha, 0).to(dgamma.dtype.element_ty))
        S = move(S, b_h, *rule(b_k, b_p, b_hh, b_gamma))
