"""GKA's backward kernels except the solver, in the order in which they run.

The order is: through the read-out, through the ridge, the reverse scan over chunks, and dk, dv with the gates.

    E_i = sum_{t >= i} decay(i -> t) (z_t x_t^T + x_t z_t^T + ridge_t H_t)        minus twice the gradient of H_i
    R_i = sum_{t >= i} decay(i -> t) s do_t m_t^T         the gradient of U_i, with m = q + alpha (x - q), s the scale

No kernel uses the transpose of a dot's accumulator as an operand of another dot: Triton 3.4 to 3.7.0 miscompiles that
on Hopper.
"""

import triton
import triton.language as tl

from .tiles import (
    decay_from,
    decay_until,
    dot,
    gate_dot,
    load_gate,
    load_rows,
    load_state,
    locate_chunk,
    locate_sequence,
    split_dot,
    store_gate,
    store_rows,
)


@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_bwd_kernel_read(
    inputs, UT0, x, do, outputs, layout, N, length, per_sequence, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The gradient of m, scale * U_t^T do_t, as high + low, with dalpha and `local` = <m, its gradient>."""
    q, k, v, log_decay, alpha, beta = inputs
    high, low, dalpha, local = outputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    b_k = load_rows(k + kv_head * D, rows, HK * D, D, C, DK)
    b_v = load_rows(v + kv_head * DVR, rows, HK * DVR, DVR, C, DK)
    b_do = load_rows(do + head * DVR, rows, H * DVR, DVR, C, DK)
    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    b = load_gate(beta + head, rows, H, C)
    scores = dot(b_do, tl.trans(b_v)) * decay_from(G, C) * (b * b)[None, :]
    b_UT0 = load_state(UT0 + ((i_chunk + i_n).to(tl.int64) * H + i_h) * DK * DK, DK, DK)
    d_mixed = dot(b_do, tl.trans(b_UT0)) * tl.exp(G)[:, None]
    d_mixed = scale * (d_mixed + split_dot(scores, b_k))

    b_high = d_mixed.to(high.dtype.element_ty)
    store_rows(high + head * D, b_high, rows, H * D, D, C, DK)
    if low is not None:
        store_rows(low + head * D, d_mixed - b_high.to(tl.float32), rows, H * D, D, C, DK)
    b_q = load_rows(q + head * D, rows, H * D, D, C, DK).to(tl.float32)
    difference = load_rows(x + head * D, rows, H * D, D, C, DK) - b_q
    along = tl.sum(difference * d_mixed, 1)
    store_gate(dalpha + head, along, rows, H, C)
    mix = load_gate(alpha + head, rows, H, C)
    store_gate(local + head, tl.sum(b_q * d_mixed, 1) + mix * along, rows, H, C)


@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_bwd_kernel_ridge(
    inputs, solved, outputs, layout, N, length, per_sequence, ridge, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dq; ridge_t = 2 a (x . z) / |H| and its decayed sum `from_start`; the rest of `local`; x and m decayed since the
    chunk's start.
    """
    q, k, log_decay, alpha, beta = inputs
    H0, x, z, d_mixed, norms = solved
    dq, decayed_x, decayed_m, ridge_t, from_start, local = outputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head = token * H + i_h
    mix = load_gate(alpha + head, rows, H, C)
    norm = load_gate(norms + head, rows, H, C)
    weight = load_gate(beta + head, rows, H, C)
    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    zeta = tl.exp(G)
    b_x = load_rows(x + head * D, rows, H * D, D, C, DK)
    b_z = load_rows(z + head * D, rows, H * D, D, C, DK)

    # z . A x = e^G z . H_0 x + sum_i D[t, i] w_i (k_i . x)(k_i . z) + a |H| x . z; not z . q, which drops the residual
    b_k = load_rows(k + (token * HK + i_h // (H // HK)) * D, rows, HK * D, D, C, DK)
    b_H0 = load_state(H0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DK, DK)
    # x in two parts, as in gka_bwd_kernel_dkv: their difference is what counts
    image = zeta * tl.sum(split_dot(b_x, b_H0) * b_z.to(tl.float32), 1)
    scores = split_dot(b_x, tl.trans(b_k)) * dot(b_z, tl.trans(b_k))
    image += tl.sum(scores * decay_from(G, C) * (weight * weight)[None, :], 1)
    along = ridge * tl.sum(b_x * b_z.to(tl.float32), 1)
    store_gate(local + head, load_gate(local + head, rows, H, C) - image - norm * along, rows, H, C)
    b_ridge = tl.where(norm > 0, 2.0 * along / tl.where(norm > 0, norm, 1.0), 0.0)
    store_gate(ridge_t + head, b_ridge, rows, H, C)
    store_gate(from_start + head, tl.sum(decay_until(G, C) * (zeta * b_ridge)[None, :], 1), rows, H, C)

    store_rows(decayed_x + head * D, zeta[:, None] * b_x, rows, H * D, D, C, DK)
    b_q = load_rows(q + head * D, rows, H * D, D, C, DK).to(tl.float32)
    mixed = b_q + mix[:, None] * (b_x - b_q)
    store_rows(decayed_m + head * D, (scale * zeta)[:, None] * mixed, rows, H * D, D, C, DK)
    b_dm = load_rows(d_mixed + head * D, rows, H * D, D, C, DK).to(tl.float32)
    tl.debug_barrier()  # dq may share the memory of d_mixed, so all threads read it before any thread overwrites it
    store_rows(dq + head * D, (1.0 - mix)[:, None] * b_dm + b_z.to(tl.float32), rows, H * D, D, C, DK)


@triton.jit(do_not_specialize=["length", "per_sequence"])
def gka_bwd_kernel_scan(
    inputs, states, terms, upstream, final, sums, grads, layout, length, per_sequence,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """E and R^T at every chunk's end, tile by tile, last chunk first.

    R^T at a chunk's end takes the place of U^T before the next chunk, which the sum `share` has consumed by then.
    `carried` gets each tile's share of <dS, S> at every chunk's end.
    """
    k, log_decay, beta = inputs
    H0, UT0 = states
    z, decayed_x, decayed_m, do, ridge_t, from_start = terms
    dh_final, du_final = upstream
    h_final, u_final = final
    E, carried = sums
    dh0, du0 = grads
    tiles: tl.constexpr = (DK // TILE) * (DK // TILE)
    i_tile, i_nh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    i_0, j_0 = (i_tile // (DK // TILE)) * TILE, (i_tile % (DK // TILE)) * TILE
    i, j = i_0 + tl.arange(0, TILE), j_0 + tl.arange(0, TILE)
    token, rows, chunk, chunks = locate_sequence(i_n, layout, length, per_sequence)

    in_h, in_u = (i < D)[:, None] & (j < D)[None, :], (i < D)[:, None] & (j < DVR)[None, :]
    at_h, at_hT = i_nh * D * D + i[:, None] * D + j[None, :], i_nh * D * D + j[None, :] * D + i[:, None]
    at_u = i_nh * D * DVR + j[None, :] * D + i[:, None]
    b_E = -tl.load(dh_final + at_h, mask=in_h, other=0.0) - tl.load(dh_final + at_hT, mask=in_h, other=0.0)
    b_R = tl.load(du_final + at_u, mask=in_u, other=0.0)
    share = tl.sum(tl.sum(b_R * tl.load(u_final + at_u, mask=in_u, other=0.0), 1), 0)
    share -= 0.5 * tl.sum(tl.sum(b_E * tl.load(h_final + at_h, mask=in_h, other=0.0), 1), 0)

    last = chunks - 1
    rows -= last * C
    token += last * C
    head, state = token * H + i_h, (chunk + last) * H + i_h
    kv_head = token * HK + i_h // (H // HK)
    for _ in range(chunks):
        dtype: tl.constexpr = k.dtype.element_ty
        tl.store(carried + state * tiles + i_tile, share)
        at_E = state * DK * DK + i[:, None] * DK + j[None, :]
        at_R = (state + i_n * H) * DK * DK + i[:, None] * DK + j[None, :]
        tl.store(E + at_E, b_E.to(dtype))
        tl.store(UT0 + at_R + H * DK * DK, b_R.to(dtype))

        g = load_gate(log_decay + head, rows, H, C)
        b = load_gate(beta + head, rows, H, C)
        b_ridge = load_gate(ridge_t + head, rows, H, C)
        key_weight = load_gate(from_start + head, rows, H, C) * b * b
        zeta = tl.exp(tl.cumsum(g, 0))
        b_zi = load_rows(z + head * D + i_0, rows, H * D, D - i_0, C, TILE)
        b_zj = load_rows(z + head * D + j_0, rows, H * D, D - j_0, C, TILE)
        b_xi = load_rows(decayed_x + head * D + i_0, rows, H * D, D - i_0, C, TILE)
        b_xj = load_rows(decayed_x + head * D + j_0, rows, H * D, D - j_0, C, TILE)
        b_ki = load_rows(k + kv_head * D + i_0, rows, HK * D, D - i_0, C, TILE).to(tl.float32) * key_weight[:, None]
        b_kj = load_rows(k + kv_head * D + j_0, rows, HK * D, D - j_0, C, TILE)
        b_mi = load_rows(decayed_m + head * D + i_0, rows, H * D, D - i_0, C, TILE)
        b_do = load_rows(do + head * DVR + j_0, rows, H * DVR, DVR - j_0, C, TILE)
        b_H = tl.load(H0 + at_E).to(tl.float32)
        b_U = tl.load(UT0 + at_R).to(tl.float32)

        decay = tl.exp(tl.sum(g, 0))
        b_E = decay * b_E + tl.sum(zeta * zeta * b_ridge, 0) * b_H
        b_E += dot(tl.trans(b_zi), b_xj)
        b_E += dot(tl.trans(b_xi), b_zj)
        b_E += dot(tl.trans(b_ki.to(dtype)), b_kj)
        b_R = decay * b_R + dot(tl.trans(b_mi), b_do)
        share = tl.sum(tl.sum(b_R * b_U, 1), 0) - 0.5 * tl.sum(tl.sum(b_E * b_H, 1), 0)
        rows = tl.full([], C, tl.int32)  # only the last chunk may be short
        head -= C * H
        kv_head -= C * HK
        state -= H
    tl.store(dh0 + at_h, -0.5 * b_E, mask=in_h)
    tl.store(du0 + at_u, b_R, mask=in_u)


@triton.jit
def key_dot(k, a):
    """k a^T [C, C] for a float32 `a` kept to about 16 bits."""
    high = a.to(k.dtype)
    if k.dtype == tl.float32:
        return dot(k, tl.trans(high))
    return dot(k, tl.trans(high)) + dot(k, tl.trans((a - high.to(tl.float32)).to(k.dtype)))


@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_bwd_kernel_dkv(
    inputs, terms, sums, grads, layout, N, length, per_sequence, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr,
    C: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dk, dv (per query head), dlog_decay and dbeta of one chunk and head."""
    q, k, v, log_decay, alpha, beta = inputs
    H0, x, do, z, ridge_t, from_start, local = terms
    E, RT, carried = sums
    dk, dv, dg, dbeta = grads
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    i_n, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    state = i_chunk.to(tl.int64) * H + i_h
    dtype: tl.constexpr = k.dtype.element_ty

    g = load_gate(log_decay + head, rows, H, C)
    G = tl.cumsum(g, 0)
    b = load_gate(beta + head, rows, H, C)
    write = b * b
    mix = load_gate(alpha + head, rows, H, C)[None, :]
    b_k = load_rows(k + kv_head * D, rows, HK * D, D, C, DK)
    b_v = load_rows(v + kv_head * DVR, rows, HK * DVR, DVR, C, DK)
    to_end = tl.exp(tl.sum(g, 0) - G)[:, None]
    late_keys = (b_k.to(tl.float32) * to_end).to(dtype)

    # contributions to tokens after the chunk, and from tokens before it
    b_RT = load_state(RT + (state + (i_n + 1) * H) * DK * DK, DK, DK)
    R_k = dot(late_keys, b_RT)
    dw = tl.sum(b_v.to(tl.float32) * R_k, 1)
    from_H0 = (b_k.to(tl.float32) * load_gate(from_start + head, rows, H, C)[:, None]).to(dtype)
    E_k = dot(late_keys, load_state(E + state * DK * DK, DK, DK))
    E_k += dot(from_H0, load_state(H0 + state * DK * DK, DK, DK))
    dw -= 0.5 * tl.sum(b_k.to(tl.float32) * E_k, 1)
    b_dk = dot((b_v.to(tl.float32) * to_end).to(dtype), tl.trans(b_RT)) - E_k

    # within the chunk, by scores [key, token]: R v and E k cancel, by a factor of 15 where few keys fill the state, so
    # that the scores of x are added before they are rounded, and dw takes no rounded ones
    DT = decay_until(G, C)
    b_do = load_rows(do + head * DVR, rows, H * DVR, DVR, C, DK)
    b_q = load_rows(q + head * D, rows, H * D, D, C, DK)
    b_x = load_rows(x + head * D, rows, H * D, D, C, DK)
    b_z = load_rows(z + head * D, rows, H * D, D, C, DK)
    k_x = DT * key_dot(b_k, b_x)
    k_m = DT * (1.0 - mix) * dot(b_k, tl.trans(b_q)) + mix * k_x
    R_k += dot((scale * k_m).to(dtype), b_do)
    store_rows(dv + head * DVR, write[:, None] * R_k, rows, H * DVR, DVR, C, DK)
    k_z = dot(b_k, tl.trans(b_z))
    v_do = scale * dot(b_v, tl.trans(b_do))
    dw += tl.sum(k_m * v_do - k_x * k_z, 1)
    b_dk -= dot(k_x.to(dtype), b_z)
    b_dk += dot((DT * (mix * v_do - k_z)).to(dtype), b_x.to(dtype))
    b_dk += dot((DT * (1.0 - mix) * v_do).to(dtype), b_q)
    # sum_t D[t, i] ridge_t D[t, j]: how much of k_j k_j^T token i's sum of ridge_t H_t holds
    shared = gate_dot(DT * load_gate(ridge_t + head, rows, H, C)[None, :], decay_from(G, C), b_k)
    gram = dot(b_k, tl.trans(b_k))
    shared *= gram * write[None, :]
    dw -= 0.5 * tl.sum(shared * gram, 1)
    b_dk -= dot(shared.to(dtype), b_k)
    store_rows(dk + head * D, write[:, None] * b_dk, rows, H * D, D, C, DK)
    store_gate(dbeta + head, 2.0 * b * dw, rows, H, C)

    difference = load_gate(local + head, rows, H, C) - write * dw
    suffix = tl.sum(difference, 0) - tl.cumsum(difference, 0) + difference
    end = tl.sum(tl.load(carried + state * TILES + tl.arange(0, TILES)), 0)
    store_gate(dg + head, suffix + end, rows, H, C)
