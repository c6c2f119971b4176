"""Lattice backward for "dec" with projection: only the adjoint g is sequential.

Forward keeps h and p = S^T h of every token, which is all that an update needs: states are found again without
reductions, and what reads them, dq = S'^T do and dk, by matrix products of whole windows (`lattice_slots_kernel`).
`lattice_adjoint_kernel` walks back with g.

s' = a s + b h, a = beta (1 - alpha p), b = beta alpha, alpha = -gamma k, beta = 1 / |s + alpha P(s) h|. With g those
of s', x = s . g, w = h . g (per slot), sigma = s' . g = a x + b w and D = beta (g - sigma s'):

    r = s . D = beta (x - beta sigma),  dalpha = h . D - p r,  dz = sum_i alpha_i (D_i - r_i s_i) = -dv
    g <- (1 - alpha p) D - alpha r h + k dz,  dk = -gamma dalpha + S^T dz,  dgamma = -sum_i k_i dalpha_i
"""

import triton
import triton.language as tl

from .dual_tiles import join, load_column, load_rows, pairs, write_rule
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
def lattice_norm_kernel(v, hh, rows, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr):
    """|v|^2 of every row."""
    o_r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    o_d = tl.arange(0, BD)
    mask = (o_r < rows)[:, None] & (o_d < D)[None, :]
    b_v = tl.load(v + o_r[:, None] * D + o_d[None, :], mask=mask, other=0).to(hh.dtype.element_ty)
    tl.store(hh + o_r, tl.sum(b_v * b_v, 1), mask=o_r < rows)


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
def lattice_middle_kernel(
    k, gamma, h, hh, p, kept, middle, cu_seqlens, first, sequence_of, T, N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    CHECKPOINT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The tile in the middle of a window of one head, if tokens follow it."""
    HALF: tl.constexpr = CHECKPOINT // 2
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, tokens, row = window_of(i_c, cu_seqlens, first, sequence_of, T, N, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = (row * H + i_h) * (BM * D1 * D2) + slots(o_m) * (D1 * D2) + entries(o_d)
    at = begin * H + i_h
    k, p, h, gamma, hh = k + at * M, p + at * M, h + at * D, gamma + at, hh + at
    if tokens > HALF:
        S = tl.load(kept + o_s)
        ks, ps, hs, hhs, gammas = load_pair(k, p, h, hh, gamma, 0, HALF, o_m, o_d, H, M, D)
        for t in range(0, HALF, 2):
            ks_next, ps_next, hs_next, hhs_next, gammas_next = load_pair(
                k, p, h, hh, gamma, t + 2, HALF - t - 2, o_m, o_d, H, M, D
            )
            for j in tl.static_range(2):
                S = move(S, hs[j], *rule(ks[j].to(ACC), ps[j], hhs[j], gammas[j].to(ACC)))
            ks, ps, hs, hhs, gammas = ks_next, ps_next, hs_next, hhs_next, gammas_next
        tl.store(middle + o_s, S * slots(inverse_norm(S)))


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
    dfinal, do, q, k, gamma, h, p, hh, kept, middle, dz, dalpha, dstart, scratch, cu_seqlens, T,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    WARPS: tl.constexpr, LANES: tl.constexpr,
    CHECKPOINT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dz and dalpha of all tokens of one (sequence, head), and dstart.

    Tokens go in pairs: `scratch` [CHECKPOINT / 4 tiles a program] holds the state before each pair of half a window,
    and the state between its tokens is found from it. A token that fills up the last pair writes nothing (gamma = 0).
    """
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
    q, k, p, dalpha = q + at * M, k + at * M, p + at * M, dalpha + at * M
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
        # forward over the half
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
            between = move(S, hs[0], alpha_0, keep_0, beta_0)
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
            # as tiles, of which one slot is stored: what a vector would be rearranged for
            tl.store(dz + at * (H * D) + o_one, tl.broadcast_to(entries(dz_0), S.shape), mask=m_one)
            tl.store(dz + (at + 1) * (H * D) + o_one, tl.broadcast_to(entries(dz_1), S.shape), mask=m_one & two)
            both = over_shares((tl.reshape(dalpha_0, [1, BM]), tl.reshape(dalpha_1, [1, BM])), 2)
            tl.store(dalpha + (at + o_t) * (H * M) + o_m[None, :], both, mask=m_m[None, :] & ((o_t == 0) | two))
            ks, ps, qs, dos, hs, hhs, gammas = ks_next, ps_next, qs_next, dos_next, hs_next, hhs_next, gammas_next
        tl.debug_barrier()
    tl.store(dstart + i_s * TILE + o_s, g)


@triton.jit
def lattice_slots_kernel(
    x, k, gamma, h, hh, p, kept, dalpha, dx, dv, dgamma, cu_seqlens, first, sequence_of, T, N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, MB: tl.constexpr,
    WIDE: tl.constexpr, CHECKPOINT: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x = do: dq = S'^T x of one window of one head. x = dz, where there is dalpha: dk, dv and dgamma.

    Within a window s_t = (a_t ... a_1) s_0 + sum_j (a_t ... a_{j+1}) b_j h_j: see dual_tiles.py.
    """
    C: tl.constexpr = CHECKPOINT
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, tokens, row = window_of(i_c, cu_seqlens, first, sequence_of, T, N, C)
    at, o_t, o_d = begin * H + i_h, tl.arange(0, C), tl.arange(0, WIDE)
    kept += (row * H + i_h) * (BM * BD)
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_h = load_rows(h + at * D, o_t, o_d, D, H * D, tokens, ACC)
    b_x = load_rows(x + at * D, o_t, o_d, D, H * D, tokens, ACC)
    score = tl.dot(b_x, tl.trans(b_h), input_precision=PRECISION, out_dtype=ACC)
    own, b_dgamma = tl.sum(b_x * b_h, 1)[:, None], tl.zeros([C], ACC)
    for i_m in tl.range(0, BM, MB, num_stages=1):
        o_m = i_m + tl.arange(0, MB)
        o_k = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        m_k = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_p, b_k = tl.load(p + o_k, mask=m_k, other=0), tl.load(k + o_k, mask=m_k, other=0).to(ACC)
        _, _, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, "sim")
        prefix, suffix, product = tl.full([C, MB], 1, ACC), tl.full([C, MB], 1, ACC), a
        found = tl.zeros([C, MB], ACC)
        for level in tl.static_range(LEVELS):
            second, mask, _ = pairs(o_t, 1 << level)
            found += prefix * tl.dot(tl.where(mask, score, 0), b * suffix, input_precision=PRECISION, out_dtype=ACC)
            prefix, suffix, product = join(prefix, suffix, product, second, 1 << level)
        m_s = (o_d < BD)[:, None] & (o_m < BM)[None, :]
        S = tl.load(kept + o_m[None, :] * BD + o_d[:, None], mask=m_s, other=0)
        found += prefix * tl.dot(b_x, S, input_precision=PRECISION, out_dtype=ACC)
        if dalpha is None:
            found = a * found + b * own
        else:
            b_dalpha = tl.load(dalpha + o_k, mask=m_k, other=0)
            found -= b_gamma * b_dalpha
            b_dgamma -= tl.sum(b_k * b_dalpha, 1)
        tl.store(dx + o_k, found.to(dx.dtype.element_ty), mask=m_k)
    if dalpha is not None:
        tl.store(dgamma + at + o_t * H, b_dgamma.to(dgamma.dtype.element_ty), mask=o_t < tokens)
        o_v = at * D + o_t[:, None] * (H * D) + o_d[None, :]
        tl.store(dv + o_v, (-b_x).to(dv.dtype.element_ty), mask=(o_t < tokens)[:, None] & (o_d < D)[None, :])
