"""Lattice backward for "dec" with projection: only the adjoint g is sequential.

Forward keeps h and p = S^T h of every token, and an update needs nothing else. The states are therefore recomputed
without reductions, and what reads them, dq = S'^T do and dk, runs as matrix products (dec_backward_windows.py).
`lattice_adjoint_kernel` goes back in time with g.

s' = a s + b h, a = beta (1 - alpha p), b = beta alpha, alpha = -gamma k, beta = 1 / |s + alpha P(s) h|. With g the
gradient of s', x = s . g, w = h . g (per slot), sigma = s' . g = a x + b w and D = beta (g - sigma s'):

    r = s . D = beta (x - beta sigma),  dalpha = h . D - p r,  dz = sum_i alpha_i (D_i - r_i s_i) = -dv
    g <- (1 - alpha p) D - alpha r h + k dz,  dk = -gamma dalpha + S^T dz,  dgamma = -sum_i k_i dalpha_i
"""

import triton
import triton.language as tl

from ...._recorder import launched
from .dec_backward_windows import window_of
from .forward import load_group, sequence
from .tiles import (
    entries,
    fetch_rows,
    inverse_norm,
    over_entries,
    over_shares,
    over_slots_but,
    rescale,
    slots,
)


@triton.jit
def rule(k, p, hh, gamma):
    """alpha, 1 - alpha p and beta of an update."""
    alpha = -gamma * k
    return alpha, 1 - alpha * p, rescale(alpha, p, hh)


@triton.jit
def move(S, a, b, h):
    """The tile after an update."""
    return slots(a) * S + slots(b) * entries(h)


@triton.jit
def load_moves(a, b, h, at, left, o_m, o_d, H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    """a, b and h of GROUP tokens from `at` on, of which there are `left`."""
    return (
        load_group(a + at * (H * M), o_m, o_m < M, H * M, left, GROUP),
        load_group(b + at * (H * M), o_m, o_m < M, H * M, left, GROUP),
        load_group(h + at * (H * D), o_d, o_d < D, H * D, left, GROUP),
    )


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


@launched
@triton.jit
def lattice_middle_kernel(
    a, b, h, kept, middle, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    CHECKPOINT: tl.constexpr, GROUP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The tile in the middle of a window of one head, if tokens follow it."""
    HALF: tl.constexpr = CHECKPOINT // 2
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, tokens, row = window_of(i_c, layout, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = (row * H + i_h) * (BM * D1 * D2) + slots(o_m) * (D1 * D2) + entries(o_d)
    at = begin * H + i_h
    a, b, h = a + at * M, b + at * M, h + at * D
    if tokens > HALF:
        S = tl.load(kept + o_s)
        a_s, b_s, hs = load_moves(a, b, h, 0, HALF, o_m, o_d, H, M, D, GROUP)
        for t in range(0, HALF, GROUP):
            later = t + GROUP
            a_next, b_next, hs_next = load_moves(a, b, h, later, HALF - later, o_m, o_d, H, M, D, GROUP)
            for j in tl.static_range(GROUP):
                S = move(S, a_s[j], b_s[j], hs[j])
            a_s, b_s, hs = a_next, b_next, hs_next
        tl.store(middle + o_s, S * slots(inverse_norm(S)))


@triton.jit
def token_adjoint(g, S, h, q, do, p, hh, alpha, keep, beta, WARPS: tl.constexpr, LANES: tl.constexpr):
    """The adjoint of the slots before a token, without the term k dz; then dalpha and dz."""
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
def fetch_tokens(
    q, k, p, a, b, do, h, gamma, hh, at,
    TOKENS: tl.constexpr, H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Prefetch into L2 the inputs of TOKENS tokens from `at` on."""
    fetch_rows(q + at * (H * M), H * M, TOKENS, M, BM)
    fetch_rows(k + at * (H * M), H * M, TOKENS, M, BM)
    fetch_rows(p + at * (H * M), H * M, TOKENS, M, BM)
    fetch_rows(a + at * (H * M), H * M, TOKENS, M, BM)
    fetch_rows(b + at * (H * M), H * M, TOKENS, M, BM)
    fetch_rows(do + at * (H * D), H * D, TOKENS, D, BD)
    fetch_rows(h + at * (H * D), H * D, TOKENS, D, BD)
    fetch_rows(gamma + at * H, H, TOKENS, 1, 16)
    fetch_rows(hh + at * H, H, TOKENS, 1, 16)


@launched
@triton.jit
def lattice_adjoint_kernel(
    upstream, inputs, moves, states, grads, scratch, cu_seqlens, T,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr, CHECKPOINT: tl.constexpr, GROUP: tl.constexpr, ACC: tl.constexpr,
    FETCH: tl.constexpr,
):  # fmt: skip
    """dz and dalpha of all tokens of one (sequence, head), and dstart.

    Tokens go in pairs: `scratch` [CHECKPOINT / 4 tiles per program] holds the state before each pair of half a window,
    and the state between its tokens is found from it. A token that fills up the last pair writes nothing (gamma = 0).
    """
    dfinal, do = upstream
    q, k, gamma = inputs
    h, p, hh, a, b = moves
    kept, middle = states
    dz, dalpha, dstart = grads
    TILE: tl.constexpr = BM * D1 * D2
    HALF: tl.constexpr = CHECKPOINT // 2
    i_s = tl.program_id(0).to(tl.int64)
    i_h = i_s % H
    start, length, row = sequence(i_s // H, cu_seqlens, T, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = slots(o_m) * (D1 * D2) + entries(o_d)
    o_one, o_t = entries(o_d) + 0 * slots(o_m), tl.arange(0, 2)[:, None]
    m_m, m_d = o_m < M, o_d < D
    m_one = entries(m_d) & slots(o_m == 0)
    scratch += i_s * (HALF // 2 * TILE) + o_s
    kept, middle = kept + (row * H + i_h) * TILE + o_s, middle + (row * H + i_h) * TILE + o_s
    at = start * H + i_h
    q, k, p, a, b, dalpha = q + at * M, k + at * M, p + at * M, a + at * M, b + at * M, dalpha + at * M
    do, h, dz, gamma, hh = do + at * D, h + at * D, dz + at * D, gamma + at, hh + at
    g = tl.load(dfinal + i_s * TILE + o_s)
    halves = tl.cdiv(length, HALF)
    for i in range(0, halves):
        half = halves - 1 - i
        first = half.to(tl.int64) * HALF
        tokens = tl.minimum(length - half * HALF, HALF)
        if half % 2 == 0:
            S = tl.load(kept + first // CHECKPOINT * (H * TILE))
        else:
            S = tl.load(middle + first // CHECKPOINT * (H * TILE))
        if FETCH:
            # a pair of tokens takes less time than a load from HBM: fetch the inputs of the next half now
            earlier = tl.maximum(first - HALF, 0)
            fetch_tokens(q, k, p, a, b, do, h, gamma, hh, earlier, HALF, H, M, D, BM, D1 * D2)
        # forward over the half
        a_s, b_s, hs = load_moves(a, b, h, first, tokens, o_m, o_d, H, M, D, GROUP)
        for t in range(0, tokens, GROUP):
            later = t + GROUP
            a_next, b_next, hs_next = load_moves(a, b, h, first + later, tokens - later, o_m, o_d, H, M, D, GROUP)
            for j in tl.static_range(GROUP):
                if j % 2 == 0:
                    tl.store(scratch + (t + j) // 2 * TILE, S)
                S = move(S, a_s[j], b_s[j], hs[j])
            a_s, b_s, hs = a_next, b_next, hs_next
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
            between = move(S, beta_0 * keep_0, beta_0 * alpha_0, hs[0])
            g, dalpha_1, dz_1 = token_adjoint(
                g, between, hs[1], qs[1].to(ACC), dos[1].to(ACC), ps[1], hhs[1], alpha_1, keep_1, beta_1, WARPS, LANES
            )
            g += slots(k_1) * entries(dz_1)
            g, dalpha_0, dz_0 = token_adjoint(
                g, S, hs[0], qs[0].to(ACC), dos[0].to(ACC), ps[0], hhs[0], alpha_0, keep_0, beta_0, WARPS, LANES
            )
            g += slots(k_0) * entries(dz_0)
            S = tl.load(scratch + before * TILE)
            at, two = first + 2 * pair, 2 * pair + 1 < tokens
            # stored as tiles of which one slot is written, because Triton would rearrange a vector before its store
            tl.store(dz + at * (H * D) + o_one, tl.broadcast_to(entries(dz_0), S.shape), mask=m_one)
            tl.store(dz + (at + 1) * (H * D) + o_one, tl.broadcast_to(entries(dz_1), S.shape), mask=m_one & two)
            both = over_shares((tl.reshape(dalpha_0, [1, BM]), tl.reshape(dalpha_1, [1, BM])), 2)
            tl.store(dalpha + (at + o_t) * (H * M) + o_m[None, :], both, mask=m_m[None, :] & ((o_t == 0) | two))
            ks, ps, qs, dos, hs, hhs, gammas = ks_next, ps_next, qs_next, dos_next, hs_next, hhs_next, gammas_next
        tl.debug_barrier()
    tl.store(dstart + i_s * TILE + o_s, g)
