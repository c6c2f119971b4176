"""Lattice backward, token by token: windows of CHECKPOINT tokens, from the last to the first.

For each window the kernel first runs forward from the state kept before it, and stores h, p and the state before every
BLOCK tokens. Then, block by block from the last, it runs forward once more without reductions, stores the state before
each token in scratch memory that stays in the cache, and computes the adjoint in reverse. The recurrence is never
inverted, because a_i may be zero.

With x = s . g, w = h . g (per slot), sigma = s' . g = a x + b w, D = beta (g - sigma s') and r = s . D:

    dalpha = h . D - p r,   dh = sum_i alpha_i D_i - alpha_i r_i s_i,   g <- keep D - alpha r h
"""

import triton
import triton.language as tl

from ...._recorder import launched
from .forward import load_write, sequence
from .tiles import (
    advance,
    coefficients,
    direction,
    entries,
    inverse_norm,
    inverse_size,
    known,
    over_entries,
    rescale,
    shrink,
    slots,
    total,
)


@triton.jit
def load_read(q, do, at, mask, o_m, o_d, M: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr):
    """q [M] and do [D1, D2] of the token at row `at` of [tokens * heads]."""
    b_q = tl.load(q + at * M + o_m, mask=mask & (o_m < M), other=0).to(ACC)
    return b_q, tl.load(do + at * D + o_d, mask=mask & (o_d < D), other=0).to(ACC)


@triton.jit
def ttt_adjoint(z, v, h, dh):
    """Gradients of z and v through h = -P(z) v / |z|."""
    inverse = inverse_size(z)
    unit = z * inverse
    along_v, along_h = total(unit * v), total(unit * dh)
    dv = (unit * along_h - dh) * inverse
    dunit = (along_v * dh + along_h * v) * inverse
    dz = (dunit - unit * total(unit * dunit)) * inverse
    return dz - unit * inverse * total(h * dh), dv


@triton.jit
def write_adjoint(
    g, S, h, p, k, v, q, do, gamma, mu, l1, VARIANT: tl.constexpr, PROJECT: tl.constexpr, L1: tl.constexpr
):
    """Gradients of the slots before the update and of q, k, v; dgamma and dmu still to be summed over slots."""
    BASELINE: tl.constexpr = VARIANT == "ttt" or VARIANT == "delta"
    inverse = k if PROJECT else inverse_norm(S)
    c, alpha, keep = coefficients(k, p, inverse, gamma, mu, VARIANT, PROJECT)
    hh = total(h * h)
    if L1:
        new = slots(keep) * S + slots(alpha) * entries(h)
        kept, alive = shrink(new, gamma * l1)
        passed = (kept != 0) | (slots(alive) == 0)
        signs = tl.where(slots(alive), tl.where(kept > 0, 1.0, 0.0) - tl.where(kept < 0, 1.0, 0.0), 0.0)
        new = tl.where(slots(alive), kept, new)
        if PROJECT:
            scale = inverse_norm(new)
            new *= slots(scale)
        dq = over_entries(new * entries(do))
        g += slots(q) * entries(do)
        if PROJECT:
            g = slots(scale) * (g - slots(over_entries(new * g)) * new)
        dgamma = -l1 * over_entries(signs * g)
        g = tl.where(passed, g, 0)
        r, w = over_entries(S * g), over_entries(g * entries(h))
    else:
        dgamma = tl.zeros_like(k)
        read_S, read_h = over_entries(S * entries(do)), total(h * do)
        x, w = over_entries(S * g) + q * read_S, over_entries(g * entries(h)) + q * read_h
        g += slots(q) * entries(do)
        if PROJECT:
            scale = rescale(alpha, p, hh)
            a, b = scale * keep, scale * alpha
            sigma = a * x + b * w
            dq = a * read_S + b * read_h
            r, w = scale * (x - scale * sigma), scale * (w - (a * p + b * hh) * sigma)
            g = slots(scale) * g - slots(scale * sigma * a) * S - slots(scale * sigma * b) * entries(h)
        else:
            dq = keep * read_S + alpha * read_h
            r = x
    # g, r and w are now those of keep s + alpha h
    if BASELINE:
        dalpha = w
        dp, dnorm = tl.zeros_like(k), tl.zeros_like(k)
    elif PROJECT:
        dalpha = w - p * r
        dp, dnorm = -alpha * r, tl.zeros_like(k)
    else:
        back = inverse * inverse
        dalpha = w - p * back * r
        dp = -alpha * back * r
        dnorm = 2 * alpha * p * back * inverse * r - dalpha * alpha * inverse
    scaled = dalpha if PROJECT or BASELINE else dalpha * inverse
    dc = -gamma * scaled
    dgamma -= c * scaled
    if VARIANT == "enc":
        if PROJECT:
            dp += dc
        else:
            dp += dc * inverse
            dnorm -= dc * p * inverse * inverse
    dh = tl.sum(slots(alpha) * g if BASELINE else slots(alpha) * g + slots(dp) * S, 0)
    g = slots(keep) * g
    if not BASELINE:
        g += slots(dp) * entries(h)
    if VARIANT == "enc":
        dk, dv = -dc, dh
    elif VARIANT == "sim":
        dk, dv = dc, -dh
    else:
        if VARIANT == "ttt":
            dz, dv = ttt_adjoint(tl.sum(S * slots(k), 0), v, h, dh)
        else:
            dz, dv = dh, -dh
        dread = over_entries(S * entries(dz))
        if PROJECT or BASELINE:
            g += slots(k) * entries(dz)
            dk = dc + dread
        else:
            g += slots(k * inverse) * entries(dz)
            dk = dc + dread * inverse
            dnorm -= dread * k * inverse * inverse
    if not PROJECT and not BASELINE:
        g += slots(dnorm * inverse) * S
    return g, dq, dk, dv, dgamma, r


@launched
@triton.jit
def lattice_bwd_kernel(
    upstream, inputs, kept, grads, scratch, cu_seqlens, T, l1,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    VARIANT: tl.constexpr, PROJECT: tl.constexpr, L1: tl.constexpr,
    CHECKPOINT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """All tokens of one (sequence, head). dgamma and dmu [tokens, H, M] are shares to be summed over slots.

    AHEAD loads states one token ahead, if there are enough registers.

    Scratch of a program: BLOCK + CHECKPOINT / BLOCK tiles of `states`, CHECKPOINT rows [BM + D1 * D2] of `notes`.
    """
    do, dfinal = upstream
    q, k, v, gamma, log_decay = inputs
    dq, dk, dv, dgamma, dmu, dstart = grads
    states, notes = scratch
    READS: tl.constexpr = VARIANT != "enc" and VARIANT != "sim"
    BASELINE: tl.constexpr = VARIANT == "ttt" or VARIANT == "delta"
    TILE: tl.constexpr = BM * D1 * D2
    NOTE: tl.constexpr = BM + D1 * D2
    i_s = tl.program_id(0).to(tl.int64)
    i_h = i_s % H
    start, length, row = sequence(i_s // H, cu_seqlens, T, CHECKPOINT)
    o_m, o_d = tl.arange(0, BM), tl.arange(0, D1)[:, None] * D2 + tl.arange(0, D2)[None, :]
    o_s = slots(o_m) * (D1 * D2) + entries(o_d)
    m_m, m_d = o_m < M, o_d < D
    states += i_s * ((BLOCK + CHECKPOINT // BLOCK) * TILE) + o_s
    p_notes, h_notes = notes + i_s * (CHECKPOINT * NOTE) + o_m, notes + i_s * (CHECKPOINT * NOTE) + BM + o_d
    g = tl.load(dfinal + i_s * TILE + o_s)

    windows = tl.cdiv(length, CHECKPOINT)
    for i in range(0, windows):
        window = windows - 1 - i
        first = window * CHECKPOINT
        tokens = tl.minimum(length - first, CHECKPOINT)
        S = tl.load(kept + ((row + window) * H + i_h) * TILE + o_s)
        for block in range(0, tokens, BLOCK):
            if PROJECT and not L1:
                S *= slots(inverse_norm(S))
            tl.store(states + (BLOCK + block // BLOCK) * TILE, S)
            for t in range(block, tl.minimum(block + BLOCK, tokens)):
                at = (start + first + t) * H + i_h
                b_k, b_v, b_gamma, b_mu = load_write(k, v, gamma, log_decay, at, True, o_m, o_d, M, D, ACC)
                inverse = b_k if PROJECT else inverse_norm(S)
                if READS:
                    b_read = b_k if PROJECT or BASELINE else b_k * inverse
                    b_h = direction(tl.sum(S * slots(b_read), 0), b_v, VARIANT)
                    tl.store(h_notes + t * NOTE, b_h)
                else:
                    b_h = known(b_v, VARIANT)
                b_p = b_k if BASELINE else over_entries(S * entries(b_h))
                tl.store(p_notes + t * NOTE, b_p)
                _, b_alpha, b_keep = coefficients(b_k, b_p, inverse, b_gamma, b_mu, VARIANT, PROJECT)
                S = advance(S, b_h, b_p, b_alpha, b_keep, b_gamma * l1, PROJECT, L1)
        tl.debug_barrier()

        blocks = tl.cdiv(tokens, BLOCK)
        for j in range(0, blocks):
            block = (blocks - 1 - j) * BLOCK
            size = tl.minimum(tokens - block, BLOCK)
            S = tl.load(states + (BLOCK + block // BLOCK) * TILE)
            for t in range(0, size):
                tl.store(states + t * TILE, S)
                at = (start + first + block + t) * H + i_h
                b_k, b_v, b_gamma, b_mu = load_write(k, v, gamma, log_decay, at, True, o_m, o_d, M, D, ACC)
                b_p = tl.load(p_notes + (block + t) * NOTE)
                b_h = tl.load(h_notes + (block + t) * NOTE) if READS else known(b_v, VARIANT)
                inverse = b_k if PROJECT else inverse_norm(S)
                _, b_alpha, b_keep = coefficients(b_k, b_p, inverse, b_gamma, b_mu, VARIANT, PROJECT)
                S = advance(S, b_h, b_p, b_alpha, b_keep, b_gamma * l1, PROJECT, L1)
            tl.debug_barrier()
            last = (start + first + block + size - 1) * H + i_h
            S = tl.load(states + (size - 1) * TILE)
            b_k, b_v, b_gamma, b_mu = load_write(k, v, gamma, log_decay, last, True, o_m, o_d, M, D, ACC)
            b_q, b_do = load_read(q, do, last, True, o_m, o_d, M, D, ACC)
            b_p = tl.load(p_notes + (block + size - 1) * NOTE)
            b_h = tl.load(h_notes + (block + size - 1) * NOTE) if READS else known(b_v, VARIANT)
            for r in range(0, size):
                t = size - 1 - r
                at = (start + first + block + t) * H + i_h
                more = t > 0
                if AHEAD:
                    S_next = tl.load(states + (t - 1) * TILE, mask=more, other=0)
                k_next, v_next, gamma_next, mu_next = load_write(
                    k, v, gamma, log_decay, at - H, more, o_m, o_d, M, D, ACC
                )
                q_next, do_next = load_read(q, do, at - H, more, o_m, o_d, M, D, ACC)
                p_next = tl.load(p_notes + (block + t - 1) * NOTE, mask=more, other=0)
                h_next = (
                    tl.load(h_notes + (block + t - 1) * NOTE, mask=more, other=0) if READS else known(v_next, VARIANT)
                )
                g, b_dq, b_dk, b_dv, b_dgamma, b_dmu = write_adjoint(
                    g, S, b_h, b_p, b_k, b_v, b_q, b_do, b_gamma, b_mu, l1, VARIANT, PROJECT, L1
                )
                tl.store(dq + at * M + o_m, b_dq.to(dq.dtype.element_ty), mask=m_m)
                tl.store(dk + at * M + o_m, b_dk.to(dk.dtype.element_ty), mask=m_m)
                tl.store(dv + at * D + o_d, b_dv.to(dv.dtype.element_ty), mask=m_d)
                tl.store(dgamma + at * M + o_m, b_dgamma, mask=m_m)
                if dmu is not None:
                    tl.store(dmu + at * M + o_m, b_dmu * b_mu, mask=m_m)
                if not AHEAD:
                    S_next = tl.load(states + (t - 1) * TILE, mask=more, other=0)
                S, b_h, b_p, b_q, b_do = S_next, h_next, p_next, q_next, do_next
                b_k, b_v, b_gamma, b_mu = k_next, v_next, gamma_next, mu_next
            tl.debug_barrier()
    tl.store(dstart + i_s * TILE + o_s, g)
