"""Lattice "enc" and "sim" backward: as forward, only scalars a slot are found token by token.

With dS_t the gradient of s_t from its reads and all later tokens, u = h . dS_t, z = s_t . dS_t and x = s_{t-1} . dS_t,

    dalpha = beta (u - p x - beta alpha n z),  g = alpha^2 dalpha - a b z (+ dc for "enc"),  dc = -gamma dalpha
    dS_{t-1} = a dS_t + g h_t + q_{t-1} dy_{t-1},  dh_t = sum_i b dS_t + g s_{t-1} - b^2 z h_t

where x = (z - b u) / a, and s_{t-1} . (a dS_t + g h_t) = a x + g p: no state is needed. Where a is near 0, the slots
are found again (`lattice_careful_adjoint_kernel`). Multiples of s in its own gradient mean nothing, and are taken out
before every window. The readouts, dq_t = S_t^T dy_t too, are again linear.
"""

import triton
import triton.language as tl

from .dual_fwd_kernels import span
from .dual_tiles import (
    columns,
    exact_dot,
    from_columns,
    join,
    load_column,
    load_group,
    load_row,
    load_rows,
    locate,
    pairs,
    write_rule,
)
from .tiles import known

# 1 - alpha p, and with it a, below which (z - b u) / a has lost too many digits
NEAR = tl.constexpr(1 / 16)


@triton.jit
def lattice_read_adjoint_kernel(
    do, k, v, hh, gamma, states, p, dq, reads, flags, cu_seqlens, first, sequence, T, N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq of one window of one head, also as `reads`; its flag is set where a is so small that x loses digits."""
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start, tokens = locate(i_c, cu_seqlens, first, sequence, T, N, C)
    at, o_t, o_d = start * H + i_h, tl.arange(0, C), tl.arange(0, BD)
    states += (i_c.to(tl.int64) * H + i_h) * (M * D)
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_h = known(load_rows(v + at * D, o_t, o_d, D, H * D, tokens, ACC), VARIANT)
    b_do = load_rows(do + at * D, o_t, o_d, D, H * D, tokens, ACC)
    own = tl.sum(b_do * b_h, 1)[:, None]
    score = tl.dot(b_do, tl.trans(b_h), input_precision=PRECISION, out_dtype=ACC)
    nearest = tl.full([C], 1, ACC)
    for i_m in tl.range(0, M, MB, num_stages=1):
        o_m = i_m + tl.arange(0, MB)
        o_q = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        mask_q = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_p = tl.load(p + o_q, mask=mask_q, other=0)
        b_k = tl.load(k + o_q, mask=mask_q, other=0).to(ACC)
        _, alpha, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        nearest = tl.minimum(nearest, tl.min(tl.abs(1 - alpha * b_p), 1))
        prefix, suffix, product = tl.full([C, MB], 1, ACC), tl.full([C, MB], 1, ACC), a
        b_dq = tl.zeros([C, MB], ACC)
        for level in tl.static_range(LEVELS):
            second, mask, _ = pairs(o_t, 1 << level)
            b_dq += prefix * tl.dot(tl.where(mask, score, 0), b * suffix, input_precision=PRECISION, out_dtype=ACC)
            prefix, suffix, product = join(prefix, suffix, product, second, 1 << level)
        S = load_rows(states, o_m, o_d, D, D, M, ACC)
        b_dq += prefix * tl.dot(b_do, tl.trans(S), input_precision=PRECISION, out_dtype=ACC)
        b_dq = a * b_dq + b * own
        tl.store(dq + o_q, b_dq.to(dq.dtype.element_ty), mask=mask_q)
        tl.store(reads + o_q, b_dq, mask=mask_q)
    tl.store(flags + i_c * H + i_h, (tl.min(nearest, 0) < NEAR).to(tl.int32))


@triton.jit
def replay(
    S, k, v, hh, gamma, p, o_m, o_d, steps, H: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    VARIANT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The slots after `steps` more tokens, whose p is known."""
    for t in range(0, steps):
        b_p = tl.load(p + t * (H * M) + o_m, mask=o_m < M, other=0)
        b_k = tl.load(k + t * (H * M) + o_m, mask=o_m < M, other=0).to(ACC)
        b_h = known(tl.load(v + t * (H * D) + o_d, mask=o_d < D, other=0).to(ACC), VARIANT)
        _, _, _, _, a, b = write_rule(b_p, b_k, tl.load(gamma + t * H).to(ACC), tl.load(hh + t * H), VARIANT)
        S = a[:, None] * S + b[:, None] * b_h[None, :]
    return S


@triton.jit
def tangent(E, S):
    """E_i minus its part along the unit slot s_i."""
    return E - tl.sum(E * S, 1)[:, None] * S


@triton.jit
def token_adjoint(u, z, x, p, k, gamma, hh, VARIANT: tl.constexpr):
    """dalpha and g of a token."""
    _, alpha, beta, n, a, b = write_rule(p, k, gamma, hh, VARIANT)
    dalpha = beta * (u - p * x - beta * alpha * n * z)
    g = alpha * alpha * dalpha - a * b * z
    return dalpha, g - gamma * dalpha if VARIANT == "enc" else g


@triton.jit
def load_tokens(q, k, p, reads, gamma, gram, cross, o_m, left, H: tl.constexpr, M: tl.constexpr, P: tl.constexpr):
    """Of a chunk: q, k, p, reads, gamma, |h|^2 and do . h; zeros where there is no token."""
    m_m = o_m < M
    qs, ks = load_group(q, o_m, m_m, H * M, left, P), load_group(k, o_m, m_m, H * M, left, P)
    ps, rs = load_group(p, o_m, m_m, H * M, left, P), load_group(reads, o_m, m_m, H * M, left, P)
    hhs, dhs = load_group(gram, 0, True, P + 1, left, P), load_group(cross, 0, True, P + 1, left, P)
    return qs, ks, ps, rs, load_group(gamma, 0, True, H, left, P), hhs, dhs


@triton.jit
def earlier(u, a, read, g, cross, gram, t: tl.constexpr):
    """a (u_j + q do . h_j) + g h . h_j for tokens j < t, where read = a q."""
    parts = ()
    for j in tl.static_range(t):
        parts = parts + (a * u[j] + read * cross[j] + g * gram[j],)
    return parts


@triton.jit
def any_flag(flags, length, H: tl.constexpr, C: tl.constexpr):
    """Whether a flag of a sequence's windows is set."""
    found = tl.zeros([64], tl.int32)
    for i_c in range(0, tl.cdiv(length, C), 64):
        o_c = i_c + tl.arange(0, 64)
        found |= tl.load(flags + o_c * H, mask=o_c < tl.cdiv(length, C), other=0)
    return tl.max(found, 0) > 0


@triton.jit
def lattice_careful_adjoint_kernel(
    do, dfinal, q, k, v, hh, gamma, states, final, p, reads, flags, dalpha, z, ends, dstart, cu_seqlens, first, T,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`lattice_walk_adjoint_kernel` of flagged sequences and heads: where a is near 0, the slots are found again."""
    i_s = (tl.program_id(0) // tl.cdiv(M, MB)).to(tl.int64)
    i_n, i_h = i_s // H, i_s % H
    start, length, window = span(i_n, cu_seqlens, first, T, C)
    o_m, o_d = tl.program_id(0) % tl.cdiv(M, MB) * MB + tl.arange(0, MB), tl.arange(0, BD)
    m_m, m_d, o_s = o_m < M, o_d < D, o_m[:, None] * D + o_d[None, :]
    m_s = m_m[:, None] & m_d[None, :]
    at = window * H + i_h
    states, ends, flags = states + at * (M * D), ends + at * (M * D), flags + at
    if any_flag(flags, length, H, C):
        at = start * H + i_h
        q, k, p, reads, dalpha, z = q + at * M, k + at * M, p + at * M, reads + at * M, dalpha + at * M, z + at * M
        do, v, hh, gamma = do + at * D, v + at * D, hh + at, gamma + at
        E = load_rows(dfinal + i_s * (M * D), o_m, o_d, D, D, M, ACC)
        E = tangent(E, load_rows(final + i_s * (M * D), o_m, o_d, D, D, M, ACC))
        for i_c in range(0, tl.cdiv(length, C)):
            i_w = tl.cdiv(length, C) - 1 - i_c
            tl.store(ends + i_w * (H * M * D) + o_s, E, mask=m_s)
            begin, along = i_w * C, tl.zeros([MB], ACC)
            tokens = tl.minimum(length - begin, C)
            S_0 = load_rows(states + i_w * (H * M * D), o_m, o_d, D, D, M, ACC)
            for r in range(0, tokens):
                t = tokens - 1 - r
                o_k, o_v, o_g = (begin + t) * (H * M) + o_m, (begin + t) * (H * D) + o_d, (begin + t) * H
                b_q, b_k = tl.load(q + o_k, mask=m_m, other=0).to(ACC), tl.load(k + o_k, mask=m_m, other=0).to(ACC)
                b_p, b_read = tl.load(p + o_k, mask=m_m, other=0), tl.load(reads + o_k, mask=m_m, other=0)
                b_h = known(tl.load(v + o_v, mask=m_d, other=0).to(ACC), VARIANT)
                b_do = tl.load(do + o_v, mask=m_d, other=0).to(ACC)
                b_gamma, b_hh = tl.load(gamma + o_g).to(ACC), tl.load(hh + o_g)
                dS = E + b_q[:, None] * b_do[None, :]
                u, b_z = tl.sum(dS * b_h[None, :], 1), along + b_q * b_read
                _, alpha, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
                here = tl.abs(1 - alpha * b_p) < NEAR
                x = (b_z - b * u) / tl.where(here, 1, a)
                if tl.max(here.to(tl.int32), 0) > 0:
                    S = replay(
                        S_0, k + begin * (H * M), v + begin * (H * D), hh + begin * H, gamma + begin * H,
                        p + begin * (H * M), o_m, o_d, t, H, M, D, VARIANT, ACC,
                    )  # fmt: skip
                    x = tl.where(here, tl.sum(S * dS, 1), x)
                b_dalpha, g = token_adjoint(u, b_z, x, b_p, b_k, b_gamma, b_hh, VARIANT)
                along = a * x + g * b_p
                E = a[:, None] * dS + g[:, None] * b_h[None, :]
                tl.store(dalpha + o_k, b_dalpha, mask=m_m)
                tl.store(z + o_k, b_z, mask=m_m)
            E = tangent(E, S_0)
        tl.store(dstart + i_s * (M * D) + o_s, E, mask=m_s)


@triton.jit
def lattice_walk_adjoint_kernel(
    do, dfinal, q, k, v, gamma, gram, cross, states, final, p, reads, flags, dalpha, z, ends, dstart,
    cu_seqlens, first, T,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dalpha and z of all tokens and the gradients of the states after every window, for MB slots of one head.

    Chunks as forward: E is asked once, u_j = h_j . E, and takes on a chunk once; between, a token changes u alone.
    """
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1  # h = v or -v
    i_s = (tl.program_id(0) // tl.cdiv(M, MB)).to(tl.int64)
    i_n, i_h = i_s // H, i_s % H
    start, length, window = span(i_n, cu_seqlens, first, T, C)
    o_m = tl.program_id(0) % tl.cdiv(M, MB) * MB + tl.arange(0, MB)
    o_t, o_d, m_m = tl.arange(0, 2 * P)[:, None], tl.arange(0, BD), o_m < M
    o_s, m_s = o_m[:, None] * D + o_d[None, :], m_m[:, None] & (o_d < D)[None, :]
    at = start * H + i_h
    q, k, p, reads, dalpha, z = q + at * M, k + at * M, p + at * M, reads + at * M, dalpha + at * M, z + at * M
    do, v, gamma = do + at * D, v + at * D, gamma + at
    at = window * H + i_h
    flags, states, ends = flags + at, states + at * (M * D), ends + at * (M * D)
    gram, cross = gram + at * (C * P), cross + at * (C * P)
    flagged = any_flag(flags, length, H, C)  # left to the other kernel
    length = tl.where(flagged, 0, length)
    E = load_rows(dfinal + i_s * (M * D), o_m, o_d, D, D, M, ACC)
    E = tangent(E, load_rows(final + i_s * (M * D), o_m, o_d, D, D, M, ACC))
    if length > 0:
        tl.store(ends + (length - 1) // C * (H * M * D) + o_s, E, mask=m_s)
    along = tl.zeros([MB], ACC)  # s_t . E_t
    # rows of do, then of v
    o_x = tl.where(o_t < P, do, v) + (o_t % P) * (H * D) + o_d[None, :]
    chunks = tl.cdiv(length, P)
    t = (chunks - 1) * P
    o_g = t // C * (H * C * P) + t % C * P
    left = length - t
    b_x = tl.load(o_x + t * (H * D), mask=(o_t % P < left) & (o_d < D)[None, :] & (t >= 0), other=0)
    now = load_tokens(
        q + t * (H * M), k + t * (H * M), p + t * (H * M), reads + t * (H * M), gamma + t * H, gram + o_g, cross + o_g,
        o_m, tl.where(t >= 0, left, 0), H, M, P,
    )  # fmt: skip
    for i_c in tl.range(0, chunks, num_stages=1):
        t = (chunks - 1 - i_c) * P
        o_g, before = t // C * (H * C * P) + t % C * P, t - P
        o_b, left = before // C * (H * C * P) + before % C * P, tl.where(before >= 0, P, 0)
        x_next = tl.load(o_x + before * (H * D), mask=(before >= 0) & (o_d < D)[None, :] & (o_t >= 0), other=0)
        next_tokens = load_tokens(
            q + before * (H * M), k + before * (H * M), p + before * (H * M), reads + before * (H * M),
            gamma + before * H, gram + o_b, cross + o_b, o_m, left, H, M, P,
        )  # fmt: skip
        qs, ks, ps, rs, gammas, hhs, dhs = now
        b_y = b_x.to(ACC)
        u = columns(SIGN * exact_dot(E, tl.trans(b_y), PRECISION, ACC))[P:]
        scales, reading, writing = (), (), ()
        for i in tl.static_range(P - 1, -1, -1):
            o_r, o_k = o_g + i * P, (t + i) * (H * M) + o_m
            cross_row, gram_row = load_row(cross + o_r, 0, i), load_row(gram + o_r, 0, i)
            b_q, b_k, b_gamma = qs[i].to(ACC), ks[i].to(ACC), gammas[i].to(ACC)
            _, _, _, _, a, b = write_rule(ps[i], b_k, b_gamma, hhs[i], VARIANT)
            b_u, b_z = u[i] + b_q * dhs[i], along + b_q * rs[i]
            rest = b_z - b * b_u
            b_dalpha, g = token_adjoint(b_u, b_z, rest / a, ps[i], b_k, b_gamma, hhs[i], VARIANT)
            along = rest + g * ps[i]
            tl.store(dalpha + o_k, b_dalpha, mask=m_m & (t + i < length))
            tl.store(z + o_k, b_z, mask=m_m & (t + i < length))
            u = earlier(u, a, a * b_q, g, cross_row, gram_row, i)
            scales, reading, writing = (a,) + scales, (a * b_q,) + reading, (SIGN * g,) + writing
        kept, weights, other = tl.full([MB], 1, ACC), (), ()
        for i in tl.static_range(P):
            weights, other = weights + (reading[i] * kept,), other + (writing[i] * kept,)
            kept *= scales[i]
        E = kept[:, None] * E + exact_dot(from_columns(weights + other), b_y, PRECISION, ACC)
        if t % C == 0:
            E = tangent(E, load_rows(states + t // C * (H * M * D), o_m, o_d, D, D, M, ACC))
            along = tl.zeros([MB], ACC)
            if t > 0:
                tl.store(ends + (t // C - 1) * (H * M * D) + o_s, E, mask=m_s)
        b_x, now = x_next, next_tokens
    tl.store(dstart + i_s * (M * D) + o_s, E, mask=m_s & ~flagged)


@triton.jit
def lattice_write_adjoint_kernel(
    do, q, k, v, hh, gamma, states, p, dalpha, z, ends, dk, dv, dgamma, cu_seqlens, first, sequence, T, N,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk, dv and dgamma of one window of one head."""
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start, tokens = locate(i_c, cu_seqlens, first, sequence, T, N, C)
    at, o_t, o_d = start * H + i_h, tl.arange(0, C), tl.arange(0, BD)
    o_w = (i_c.to(tl.int64) * H + i_h) * (M * D)
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_dgamma, own_h, own_do = tl.zeros([C], ACC), tl.zeros([C], ACC), tl.zeros([C], ACC)
    b_dh, score_h, score_do = tl.zeros([C, BD], ACC), tl.zeros([C, C], ACC), tl.zeros([C, C], ACC)
    for i_m in tl.range(0, M, MB, num_stages=1):
        o_m = i_m + tl.arange(0, MB)
        o_k = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        mask_k = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_p, b_k = tl.load(p + o_k, mask=mask_k, other=0), tl.load(k + o_k, mask=mask_k, other=0).to(ACC)
        b_dalpha, b_z = tl.load(dalpha + o_k, mask=mask_k, other=0), tl.load(z + o_k, mask=mask_k, other=0)
        b_q = tl.load(q + o_k, mask=mask_k, other=0).to(ACC)
        c, alpha, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        dc = -b_gamma * b_dalpha
        tl.store(dk + o_k, (-dc if VARIANT == "enc" else dc).to(dk.dtype.element_ty), mask=mask_k)
        g = alpha * alpha * b_dalpha - a * b * b_z
        if VARIANT == "enc":
            g += dc
        b_dgamma -= tl.sum(c * b_dalpha, 1)
        own_h -= tl.sum(b * b * b_z, 1)
        own_do += tl.sum(b_q * b, 1)
        read = b_q * a
        prefix, suffix, product = tl.full([C, MB], 1, ACC), tl.full([C, MB], 1, ACC), a
        for level in tl.static_range(LEVELS):
            second, mask, transposed = pairs(o_t, 1 << level)
            scale = tl.where(second, prefix, suffix)
            # of a pair one row writes, b, and one reads, g or read: each row has one of them at a level
            both = tl.where(second, g, b) * scale
            found = tl.dot(both, tl.trans(both), input_precision=PRECISION, out_dtype=ACC)
            score_h += tl.where(mask | transposed, found, 0)
            both = tl.where(second, read, b) * scale
            found = tl.dot(both, tl.trans(both), input_precision=PRECISION, out_dtype=ACC)
            score_do += tl.where(transposed, found, 0)
            prefix, suffix, product = join(prefix, suffix, product, second, 1 << level)
        S, E = load_rows(states + o_w, o_m, o_d, D, D, M, ACC), load_rows(ends + o_w, o_m, o_d, D, D, M, ACC)
        b_dh = tl.dot(g * prefix, S, b_dh, input_precision=PRECISION, out_dtype=ACC)
        b_dh = tl.dot(b * suffix, E, b_dh, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dgamma + at + o_t * H, b_dgamma.to(dgamma.dtype.element_ty), mask=o_t < tokens)
    b_h = known(load_rows(v + at * D, o_t, o_d, D, H * D, tokens, ACC), VARIANT)
    b_dh = tl.dot(score_h, b_h, b_dh, input_precision=PRECISION, out_dtype=ACC) + own_h[:, None] * b_h
    b_do = load_rows(do + at * D, o_t, o_d, D, H * D, tokens, ACC)
    b_dh = tl.dot(score_do, b_do, b_dh, input_precision=PRECISION, out_dtype=ACC) + own_do[:, None] * b_do
    o_v = at * D + o_t[:, None] * (H * D) + o_d[None, :]
    mask_v = (o_t < tokens)[:, None] & (o_d < D)[None, :]
    tl.store(dv + o_v, known(b_dh, VARIANT).to(dv.dtype.element_ty), mask=mask_v)
