"""GKA's scans over the chunks of a sequence: the states before every chunk, and their gradients at every chunk's end.

A program has one [TI, TJ] tile of one state: of H or of U^T, of E or of R^T (backward.py). It takes the chunks of its
part of the sequence in order. If there are few sequences, each is cut into equal parts, so that the programs fill the
GPU: a first launch (SUMS) computes what each part adds to the state, and in the second launch each program starts from
the initial state and the sums of the parts before its own.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import dot, load_gate, load_rows, locate_sequence


@triton.jit
def locate_tile(parts, H: tl.constexpr, DK: tl.constexpr, TI: tl.constexpr, TJ: tl.constexpr):
    """(sequence and head, part, whether the second of the two states, tile, its first row, its first column)."""
    columns: tl.constexpr = DK // TJ
    tiles: tl.constexpr = (DK // TI) * columns
    rest, i_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    second, rest = rest % 2, rest // 2
    return (rest // parts).to(tl.int64), rest % parts, second, i_tile, i_tile // columns * TI, i_tile % columns * TJ


@triton.jit
def locate_part(chunks, i_part, parts):
    """(first chunk, number of chunks) of a part."""
    size = (chunks + parts - 1) // parts
    first = tl.minimum(i_part * size, chunks)
    return first, tl.minimum(size, chunks - first)


@triton.jit
def forward_tile(
    state, k, other, log_decay, beta, states, rows, chunks,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    TI: tl.constexpr, TJ: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr, i_0, j_0,
):  # fmt: skip
    """(state, log-decay) after `chunks` chunks; without SUMS the tile before each chunk goes to `states`."""
    dtype: tl.constexpr = k.dtype.element_ty
    inside = tl.arange(0, TI)[:, None] * DK + tl.arange(0, TJ)[None, :]
    past = tl.full([], 0.0, tl.float32)
    for _ in tl.range(chunks, num_stages=STAGES):  # given here, it also prefetches what no product reads
        if not SUMS:
            tl.store(states + inside, state.to(dtype))
        g = load_gate(log_decay, rows, H, C)
        b = load_gate(beta, rows, H, C)
        total = tl.sum(g, 0)
        weight = tl.exp(total - tl.cumsum(g, 0)) * b * b
        b_k = load_rows(k, rows, HK * D, D - i_0, C, TI)
        b_other = load_rows(other, rows, HK * WIDTH, WIDTH - j_0, C, TJ)
        written = (b_other.to(tl.float32) * weight[:, None]).to(dtype)
        state = tl.exp(total) * state + dot(tl.trans(b_k), written)
        past += total
        k += C * HK * D
        other += C * HK * WIDTH
        log_decay += C * H
        beta += C * H
        states += H * DK * DK
        rows -= C
    return state, past


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "parts"])
def gka_fwd_kernel_scan(
    inputs, initial, states, final, partial, layout, length, per_sequence, parts,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    TI: tl.constexpr, TJ: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """States before every chunk, and after the last one.

    `partial` = (what each part adds [N * H, parts, 2, DK, DK] float32, its log-decay [N * H, parts]): written with
    SUMS, and read without; None if there is one part.
    """
    k, v, log_decay, beta = inputs
    h0, u0 = initial
    H0, UT0 = states
    h_final, u_final = final
    added, decays = partial
    i_nh, i_part, second, i_tile, i_0, j_0 = locate_tile(parts, H, DK, TI, TJ)
    if SUMS and i_part == parts - 1:
        return  # no part follows
    i_n, i_h = i_nh // H, i_nh % H
    token, rows, chunk, chunks = locate_sequence(i_n, layout, length, per_sequence)
    start, count = locate_part(chunks, i_part, parts)
    token += start * C
    rows -= start * C
    chunk += start
    i, j = i_0 + tl.arange(0, TI), j_0 + tl.arange(0, TJ)
    inside = i[:, None] * DK + j[None, :]
    width = tl.where(second == 1, DVR, D)
    valid = (i < D)[:, None] & (j < width)[None, :]
    gate, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    key, value = kv_head * D, kv_head * DVR
    state = (chunk * H + i_h) * DK * DK + i_0 * DK + j_0
    at_h = i_nh * D * D + i[:, None] * D + j[None, :]
    at_u = i_nh * D * DVR + j[None, :] * D + i[:, None]  # U is [DVR, D], its tile here transposed
    if SUMS:
        tile = tl.zeros([TI, TJ], tl.float32)
    elif second == 1:
        tile = tl.load(u0 + at_u, mask=valid, other=0.0)
    else:
        tile = tl.load(h0 + at_h, mask=valid, other=0.0)
    if not SUMS and added is not None:
        for p in range(i_part):
            before = added + ((i_nh * parts + p) * 2 + second) * DK * DK
            tile = tl.exp(tl.load(decays + i_nh * parts + p)) * tile + tl.load(before + inside)
    if second == 1:
        tile, past = forward_tile(
            tile, k + key + i_0, v + value + j_0, log_decay + gate, beta + gate, UT0 + state, rows, count,
            H, HK, D, DVR, DK, C, TI, TJ, SUMS, STAGES, i_0, j_0,
        )  # fmt: skip
    else:
        tile, past = forward_tile(
            tile, k + key + i_0, k + key + j_0, log_decay + gate, beta + gate, H0 + state, rows, count,
            H, HK, D, D, DK, C, TI, TJ, SUMS, STAGES, i_0, j_0,
        )  # fmt: skip
    if SUMS:
        tl.store(added + ((i_nh * parts + i_part) * 2 + second) * DK * DK + inside, tile)
        if i_tile == 0 and second == 0:
            tl.store(decays + i_nh * parts + i_part, past)
    elif i_part == parts - 1:
        if second == 1:
            tl.store(u_final + at_u, tile, mask=valid)
        else:
            tl.store(h_final + at_h, tile, mask=valid)


@triton.jit
def backward_tile_E(
    tile, k, z, decayed_x, gates, states, E, carried, rows, chunks,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    TI: tl.constexpr, TJ: tl.constexpr, SHARES: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr, i_0, j_0,
):  # fmt: skip
    """(E, log-decay) before `chunks` chunks, the last one first."""
    dtype: tl.constexpr = k.dtype.element_ty
    log_decay, beta, ridge_t, from_start = gates
    inside = tl.arange(0, TI)[:, None] * DK + tl.arange(0, TJ)[None, :]
    past = tl.full([], 0.0, tl.float32)
    for _ in tl.range(chunks, num_stages=STAGES):  # given here, it also prefetches what no product reads
        b_state = tl.load(states + inside).to(tl.float32)
        g = load_gate(log_decay, rows, H, C)
        b = load_gate(beta, rows, H, C)
        b_ridge = load_gate(ridge_t, rows, H, C)
        key_weight = load_gate(from_start, rows, H, C) * b * b
        zeta = tl.exp(tl.cumsum(g, 0))
        total = tl.sum(g, 0)
        decay = tl.exp(total)
        if not SUMS:
            tl.store(E + inside, tile.to(dtype))
            tl.store(carried, -0.5 * decay * tl.sum(tl.sum(tile * b_state, 1), 0))
        b_zi = load_rows(z + i_0, rows, H * D, D - i_0, C, TI)
        b_zj = load_rows(z + j_0, rows, H * D, D - j_0, C, TJ)
        b_xi = load_rows(decayed_x + i_0, rows, H * D, D - i_0, C, TI)
        b_xj = load_rows(decayed_x + j_0, rows, H * D, D - j_0, C, TJ)
        b_ki = load_rows(k + i_0, rows, HK * D, D - i_0, C, TI)
        b_kj = load_rows(k + j_0, rows, HK * D, D - j_0, C, TJ).to(tl.float32) * key_weight[:, None]
        tile = decay * tile + tl.sum(zeta * zeta * b_ridge, 0) * b_state
        tile += dot(tl.trans(b_zi), b_xj)
        tile += dot(tl.trans(b_xi), b_zj)
        tile += dot(tl.trans(b_ki), b_kj.to(dtype))
        past += total
        rows = tl.full([], C, tl.int32)  # only the last chunk may be short
        k -= C * HK * D
        z -= C * H * D
        decayed_x -= C * H * D
        log_decay -= C * H
        beta -= C * H
        ridge_t -= C * H
        from_start -= C * H
        states -= H * DK * DK
        E -= H * DK * DK
        carried -= H * SHARES
    return tile, past


@triton.jit
def backward_tile_R(
    tile, q, decayed_x, do, log_decay, alpha, states, carried, rows, chunks, scale,
    H: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    TI: tl.constexpr, TJ: tl.constexpr, SHARES: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr, i_0, j_0,
):  # fmt: skip
    """(R^T, log-decay) before `chunks` chunks, the last one first. R^T takes the place of U^T in `states`.

    R^T adds scale m do^T, with m = alpha x + (1 - alpha) q, as two products: both E and R^T then contain x as it was
    rounded for them once, and where R v and E k cancel, the rounding cancels too.
    """
    dtype: tl.constexpr = do.dtype.element_ty
    inside = tl.arange(0, TI)[:, None] * DK + tl.arange(0, TJ)[None, :]
    past = tl.full([], 0.0, tl.float32)
    for _ in tl.range(chunks, num_stages=STAGES):  # given here, it also prefetches what no product reads
        g = load_gate(log_decay, rows, H, C)
        mix = load_gate(alpha, rows, H, C)
        by_x, by_q = scale * mix, scale * (1.0 - mix) * tl.exp(tl.cumsum(g, 0))
        total = tl.sum(g, 0)
        decay = tl.exp(total)
        if not SUMS:
            b_state = tl.load(states + inside).to(tl.float32)
            tl.store(carried, decay * tl.sum(tl.sum(tile * b_state, 1), 0))
            tl.store(states + inside, tile.to(states.dtype.element_ty))
        b_x = load_rows(decayed_x, rows, H * D, D - i_0, C, TI)
        b_q = load_rows(q, rows, H * D, D - i_0, C, TI)
        b_do = load_rows(do, rows, H * DVR, DVR - j_0, C, TJ).to(tl.float32)
        tile = decay * tile + dot(tl.trans(b_x), (b_do * by_x[:, None]).to(dtype))
        tile += dot(tl.trans(b_q), (b_do * by_q[:, None]).to(dtype))
        past += total
        rows = tl.full([], C, tl.int32)
        q -= C * H * D
        decayed_x -= C * H * D
        do -= C * H * DVR
        log_decay -= C * H
        alpha -= C * H
        states -= H * DK * DK
        carried -= H * SHARES
    return tile, past


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "parts"])
def gka_bwd_kernel_scan(
    inputs, states, terms, upstream, sums, grads, partial, layout, length, per_sequence, parts, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    TI: tl.constexpr, TJ: tl.constexpr, SUMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """E and R^T at every chunk's end, and the gradients of the initial states.

    R^T at a chunk's end takes the place of U^T before this chunk. `carried` gets the shares of each tile of E and of
    R^T in e^(G_C) (<R_C, U_0> - <E_C, H_0> / 2). `partial` is as in the forward pass, with the parts in reverse order.
    """
    q, k, log_decay, alpha, beta = inputs
    H0, UT0 = states
    z, decayed_x, do, ridge_t, from_start = terms
    dh_final, du_final = upstream
    E, carried = sums
    dh0, du0 = grads
    added, decays = partial
    shares: tl.constexpr = 2 * (DK // TI) * (DK // TJ)
    i_nh, i_part, second, i_tile, i_0, j_0 = locate_tile(parts, H, DK, TI, TJ)
    if SUMS and i_part == 0:
        return  # no part is before it
    i_n, i_h = i_nh // H, i_nh % H
    token, rows, chunk, chunks = locate_sequence(i_n, layout, length, per_sequence)
    start, count = locate_part(chunks, i_part, parts)
    last = start + tl.maximum(count, 1) - 1
    token += last * C
    rows -= last * C
    chunk += last
    i, j = i_0 + tl.arange(0, TI), j_0 + tl.arange(0, TJ)
    inside = i[:, None] * DK + j[None, :]
    width = tl.where(second == 1, DVR, D)
    valid = (i < D)[:, None] & (j < width)[None, :]
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    chunk_head = chunk * H + i_h
    state = chunk_head * DK * DK + i_0 * DK + j_0
    carried += chunk_head * shares + (shares // 2) * second + i_tile
    at_h, at_hT = i_nh * D * D + i[:, None] * D + j[None, :], i_nh * D * D + j[None, :] * D + i[:, None]
    at_u = i_nh * D * DVR + j[None, :] * D + i[:, None]
    if SUMS:
        tile = tl.zeros([TI, TJ], tl.float32)
    elif second == 1:
        tile = tl.load(du_final + at_u, mask=valid, other=0.0)
    else:
        tile = -tl.load(dh_final + at_h, mask=valid, other=0.0) - tl.load(dh_final + at_hT, mask=valid, other=0.0)
    if not SUMS and added is not None:
        for p in range(parts - 1 - i_part):
            later = i_nh * parts + parts - 1 - p
            after = added + (later * 2 + second) * DK * DK
            tile = tl.exp(tl.load(decays + later)) * tile + tl.load(after + inside)
    if second == 1:
        tile, past = backward_tile_R(
            tile, q + head * D + i_0, decayed_x + head * D + i_0, do + head * DVR + j_0, log_decay + head,
            alpha + head, UT0 + state, carried, rows, count, scale, H, D, DVR, DK, C, TI, TJ, shares, SUMS, STAGES,
            i_0, j_0,
        )  # fmt: skip
    else:
        gates = log_decay + head, beta + head, ridge_t + head, from_start + head
        tile, past = backward_tile_E(
            tile, k + kv_head * D, z + head * D, decayed_x + head * D, gates, H0 + state, E + state, carried, rows,
            count, H, HK, D, DK, C, TI, TJ, shares, SUMS, STAGES, i_0, j_0,
        )  # fmt: skip
    if SUMS:
        tl.store(added + ((i_nh * parts + i_part) * 2 + second) * DK * DK + inside, tile)
        if i_tile == 0 and second == 0:
            tl.store(decays + i_nh * parts + i_part, past)
    elif i_part == 0:
        if second == 1:
            tl.store(du0 + at_u, tile, mask=valid)
        else:
            tl.store(dh0 + at_h, -0.5 * tile, mask=valid)
