"""GKA's forward kernels except the solver: the scan over chunk states, and the read-out."""

import triton
import triton.language as tl

from .tiles import (
    decay_from,
    dot,
    load_gate,
    load_rows,
    load_state,
    locate_chunk,
    locate_sequence,
    split_dot,
    store_rows,
)


@triton.jit(do_not_specialize=["length", "per_sequence"])
def gka_fwd_kernel_scan(
    inputs, initial, states, final, layout, length, per_sequence,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """States before every chunk. A program has one [TILE, TILE] tile of H and of U^T and takes the chunks in order.

    Each sequence has one slot more for U^T than it has chunks: see `gka_bwd_kernel_scan`.
    """
    k, v, log_decay, beta = inputs
    h0, u0 = initial
    H0, UT0 = states
    h_final, u_final = final
    tiles: tl.constexpr = (DK // TILE) * (DK // TILE)
    i_tile, i_nh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    i_0, j_0 = (i_tile // (DK // TILE)) * TILE, (i_tile % (DK // TILE)) * TILE
    i, j = i_0 + tl.arange(0, TILE), j_0 + tl.arange(0, TILE)
    token, rows, chunk, chunks = locate_sequence(i_n, layout, length, per_sequence)

    in_h, in_u = (i < D)[:, None] & (j < D)[None, :], (i < D)[:, None] & (j < DVR)[None, :]
    at_h = i_nh * D * D + i[:, None] * D + j[None, :]
    at_u = i_nh * D * DVR + j[None, :] * D + i[:, None]  # U is [DK, D], its tile here transposed
    b_h = tl.load(h0 + at_h, mask=in_h, other=0.0)
    b_u = tl.load(u0 + at_u, mask=in_u, other=0.0)

    gate = token * H + i_h
    key = (token * HK + i_h // (H // HK)) * D
    value = (token * HK + i_h // (H // HK)) * DVR
    state = chunk * H + i_h
    for _ in range(chunks):
        dtype: tl.constexpr = k.dtype.element_ty
        p_h = H0 + state * DK * DK + i[:, None] * DK + j[None, :]
        p_u = UT0 + (state + i_n * H) * DK * DK + i[:, None] * DK + j[None, :]
        tl.store(p_h, b_h.to(dtype))
        tl.store(p_u, b_u.to(dtype))
        g = load_gate(log_decay + gate, rows, H, C)
        b = load_gate(beta + gate, rows, H, C)
        total = tl.sum(g, 0)
        weight = tl.exp(total - tl.cumsum(g, 0)) * b * b
        b_ki = load_rows(k + key + i_0, rows, HK * D, D - i_0, C, TILE)
        written = tl.trans((b_ki.to(tl.float32) * weight[:, None]).to(dtype))
        decay = tl.exp(total)
        b_h = decay * b_h + dot(written, load_rows(k + key + j_0, rows, HK * D, D - j_0, C, TILE))
        b_u = decay * b_u + dot(written, load_rows(v + value + j_0, rows, HK * DVR, DVR - j_0, C, TILE))
        gate += C * H
        key += C * HK * D
        value += C * HK * DVR
        state += H
        rows -= C
    tl.store(h_final + at_h, b_h, mask=in_h)
    tl.store(u_final + at_u, b_u, mask=in_u)


@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_fwd_kernel_read(
    inputs, UT0, x, o, layout, N, length, per_sequence, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """o = scale * U_t (q + alpha (x - q)) of one chunk and head."""
    q, k, v, log_decay, alpha, beta = inputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    b_q = load_rows(q + head * D, rows, H * D, D, C, DK).to(tl.float32)
    b_x = load_rows(x + head * D, rows, H * D, D, C, DK)
    # reading amplifies rounding of x by up to its condition number: x goes in two parts
    mixed = b_q + load_gate(alpha + head, rows, H, C)[:, None] * (b_x - b_q)
    b_k = load_rows(k + kv_head * D, rows, HK * D, D, C, DK)
    b_v = load_rows(v + kv_head * DVR, rows, HK * DVR, DVR, C, DK)
    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    b = load_gate(beta + head, rows, H, C)
    scores = split_dot(mixed, tl.trans(b_k)) * decay_from(G, C) * (b * b)[None, :]
    b_UT0 = load_state(UT0 + ((i_chunk + i_n).to(tl.int64) * H + i_h) * DK * DK, DK, DK)
    b_o = split_dot(mixed, b_UT0) * tl.exp(G)[:, None] + dot(scores.to(b_v.dtype), b_v)
    store_rows(o + head * DVR, scale * b_o, rows, H * DVR, DVR, C, DK)
