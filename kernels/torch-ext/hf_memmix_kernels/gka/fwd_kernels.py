"""GKA's forward kernels: the scan over chunk states, and the solve with the readout."""

import triton
import triton.language as tl

from .tiles import (
    chunk_tokens,
    decay_from,
    dot,
    load_gate,
    load_rows,
    load_state,
    solve,
    split_dot,
    state_norm,
    store_rows,
)


@triton.jit
def gka_fwd_kernel_scan(
    k, v, log_decay, beta, h0, u0, H0, UT0, h_final, u_final, cu, first,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, TILES_J: tl.constexpr,
):  # fmt: skip
    """States before every chunk, one [BI, BJ] tile of H and of U^T a program, sequential over a sequence's chunks."""
    i_tile, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    i_0, j_0 = (i_tile // TILES_J) * BI, (i_tile % TILES_J) * BJ
    rows, cols = i_0 + tl.arange(0, BI), j_0 + tl.arange(0, BJ)
    start, end = tl.load(cu + i_n), tl.load(cu + i_n + 1)

    in_h = (rows < D)[:, None] & (cols < D)[None, :]
    in_u = (rows < D)[:, None] & (cols < DVR)[None, :]
    at_h = i_nh * D * D + rows[:, None] * D + cols[None, :]
    at_u = i_nh * D * DVR + cols[None, :] * D + rows[:, None]  # U is [DV, D], its tile here transposed
    b_h = tl.load(h0 + at_h, mask=in_h, other=0.0)
    b_u = tl.load(u0 + at_u, mask=in_u, other=0.0)

    k += (i_h // (H // HK)) * D
    v += (i_h // (H // HK)) * DVR
    log_decay += i_h
    beta += i_h
    for i_chunk in range(tl.load(first + i_n), tl.load(first + i_n + 1)):
        at = (i_chunk * H + i_h) * DK  # int64, as i_h is
        tl.store(
            H0 + at * DK + rows[:, None] * DK + cols[None, :], b_h.to(k.dtype.element_ty), mask=cols[None, :] < DK
        )
        tl.store(
            UT0 + at * DV + rows[:, None] * DV + cols[None, :], b_u.to(k.dtype.element_ty), mask=cols[None, :] < DV
        )
        tokens = start + tl.arange(0, C)
        g = load_gate(log_decay, tokens, end, H)
        b = load_gate(beta, tokens, end, H)
        G = tl.cumsum(g, 0)
        total = tl.sum(g, 0)
        weight = (tl.exp(total - G) * b * b)[:, None]
        # loaded transposed rather than transposed after: the dot's left operand
        in_k = (tokens < end)[None, :] & (rows < D)[:, None]
        kT = tl.load(k + tokens[None, :].to(tl.int64) * (HK * D) + rows[:, None], mask=in_k, other=0.0)
        b_k = load_rows(k, tokens, end, HK * D, j_0, D, BJ).to(tl.float32) * weight
        b_v = load_rows(v, tokens, end, HK * DVR, j_0, DVR, BJ).to(tl.float32) * weight
        decay = tl.exp(total)
        b_h = decay * b_h + dot(kT, b_k.to(kT.dtype))
        b_u = decay * b_u + dot(kT, b_v.to(kT.dtype))
        start += C
    tl.store(h_final + at_h, b_h, mask=in_h)
    tl.store(u_final + at_u, b_u, mask=in_u)


@triton.jit
def gka_fwd_kernel_solve(
    q, k, v, log_decay, alpha, beta, H0, UT0, o, x, cu, first, sequence, N, scale, steps, counts, ridge,
    PHASES: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x and o of one chunk and head."""
    i_h, i_chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(sequence + i_chunk) >= N:
        return
    _, tokens, end = chunk_tokens(i_chunk, sequence, first, cu, C)
    i_hk = i_h // (H // HK)

    G = tl.cumsum(load_gate(log_decay + i_h, tokens, end, H), 0)
    b = load_gate(beta + i_h, tokens, end, H)
    b_k = load_rows(k + i_hk * D, tokens, end, HK * D, 0, D, DK)
    b_H0 = load_state(H0, i_chunk, i_h, H, DK, DK)
    norm = state_norm(b_k, b_H0, G, b, C)
    q += i_h * D
    b_x = solve(
        q, q, tl.full([C], 1.0, tl.float32), tokens, end, H * D, D, b_k, b_H0, G, b, norm, steps, counts, ridge,
        C, DK, PHASES, False,
    )  # fmt: skip
    store_rows(x + i_h * D, b_x, tokens, end, H * D, D, DK)

    # the readout amplifies rounding of x by up to its condition number: x goes in two parts
    b_q = load_rows(q, tokens, end, H * D, 0, D, DK).to(tl.float32)
    mixed = b_q + load_gate(alpha + i_h, tokens, end, H)[:, None] * (b_x - b_q)
    b_v = load_rows(v + i_hk * DVR, tokens, end, HK * DVR, 0, DVR, DV)
    scores = split_dot(mixed, tl.trans(b_k)) * decay_from(G, C) * (b * b)[None, :]
    b_o = split_dot(mixed, load_state(UT0, i_chunk, i_h, H, DK, DV)) * tl.exp(G)[:, None]
    b_o += dot(scores.to(b_v.dtype), b_v)
    store_rows(o + i_h * DVR, scale * b_o, tokens, end, H * DVR, DVR, DV)
