"""GKA's backward kernels: the solve for z = A^-1 dx, the reverse scan over chunks, and dk, dv with the gates.

    E_i = sum_{t >= i} decay(i -> t) (z_t x_t^T + x_t z_t^T + ridge_t H_t)        minus twice the gradient of H_i
    R_i = sum_{t >= i} decay(i -> t) dy_t m_t^T         the gradient of U_i, with m = q + alpha (x - q)

No accumulator of a dot is transposed as an operand of another: Triton 3.4 to 3.7.0 miscompiles that on Hopper.
"""

import triton
import triton.language as tl

from .tiles import (
    chunk_tokens,
    decay_from,
    decay_until,
    dot,
    load_gate,
    load_rows,
    load_split,
    load_state,
    load_state_transposed,
    solve,
    state_norm,
    store_rows,
)


@triton.jit
def gka_bwd_kernel_solve(
    q, k, v, log_decay, alpha, beta, H0, UT0, x, do, z, dq, dalpha, ridge_t, from_start, local,
    cu, first, sequence, N, scale, steps, counts, ridge, PHASES: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """dq, dalpha and what the scan needs: z, ridge_t = 2 a (x . z) / |H|, and its decayed sum over the chunk."""
    i_h, i_chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(sequence + i_chunk) >= N:
        return
    _, tokens, end = chunk_tokens(i_chunk, sequence, first, cu, C)
    i_hk = i_h // (H // HK)
    gate = i_h + tokens.to(tl.int64) * H
    valid = tokens < end

    G = tl.cumsum(load_gate(log_decay + i_h, tokens, end, H), 0)
    b = load_gate(beta + i_h, tokens, end, H)
    b_k = load_rows(k + i_hk * D, tokens, end, HK * D, 0, D, DK)
    b_v = load_rows(v + i_hk * DVR, tokens, end, HK * DVR, 0, DVR, DV)
    b_do = load_rows(do + i_h * DVR, tokens, end, H * DVR, 0, DVR, DV)

    # d_mixed = scale * U_t^T do_t
    scores = dot(b_do, tl.trans(b_v)) * decay_from(G, C) * (b * b)[None, :]
    d_mixed = dot(b_do, load_state_transposed(UT0, i_chunk, i_h, H, DK, DV)) * tl.exp(G)[:, None]
    d_mixed = scale * (d_mixed + dot(scores.to(b_k.dtype), b_k))

    q += i_h * D
    x += i_h * D
    z += i_h * D
    dq += i_h * D
    mix = load_gate(alpha + i_h, tokens, end, H)
    b_q = load_rows(q, tokens, end, H * D, 0, D, DK).to(tl.float32)
    b_x = load_rows(x, tokens, end, H * D, 0, D, DK)
    tl.store(dalpha + gate, tl.sum((b_x - b_q) * d_mixed, 1), mask=valid)
    b_local = tl.sum((b_q + mix[:, None] * (b_x - b_q)) * d_mixed, 1)

    # the results' own memory keeps d_mixed, in two parts, while the solver has the registers
    SPLIT: tl.constexpr = k.dtype.element_ty != tl.float32
    store_rows(dq, d_mixed, tokens, end, H * D, D, DK)
    if SPLIT:
        high = d_mixed.to(k.dtype.element_ty).to(tl.float32)
        store_rows(z, d_mixed - high, tokens, end, H * D, D, DK)
    tl.debug_barrier()
    b_H0 = load_state(H0, i_chunk, i_h, H, DK, DK)
    norm = state_norm(b_k, b_H0, G, b, C)
    b_z = solve(dq, z, mix, tokens, end, H * D, D, b_k, b_H0, G, b, norm, steps, counts, ridge, C, DK, PHASES, SPLIT)
    d_mixed = load_split(dq, z, tokens, end, H * D, D, DK, SPLIT)
    tl.debug_barrier()  # all have read before any overwrites
    store_rows(z, b_z, tokens, end, H * D, D, DK)
    store_rows(dq, (1.0 - mix)[:, None] * d_mixed + b_z, tokens, end, H * D, D, DK)

    b_x = load_rows(x, tokens, end, H * D, 0, D, DK)
    b_ridge = tl.where(norm > 0, 2.0 * ridge * tl.sum(b_x * b_z, 1) / tl.where(norm > 0, norm, 1.0), 0.0)
    tl.store(ridge_t + gate, b_ridge, mask=valid)
    tl.store(from_start + gate, tl.sum(decay_until(G, C) * (tl.exp(G) * b_ridge)[None, :], 1), mask=valid)
    # A x = q at the solution, so <gradient of H_t from its own output, H_t> = -z . q
    b_q = load_rows(q, tokens, end, H * D, 0, D, DK).to(tl.float32)
    tl.store(local + gate, b_local - tl.sum(b_z * b_q, 1), mask=valid)


@triton.jit
def gka_bwd_kernel_scan(
    q, k, log_decay, alpha, beta, H0, UT0, x, do, z, ridge_t, from_start, dh_final, du_final, h_final, u_final,
    E, RT, carried, dh0, du0, cu, first, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, TILES_J: tl.constexpr,
):  # fmt: skip
    """E and R^T at every chunk's end, tile by tile, last chunk first; `carried` gets each tile's share of <dS, S>."""
    i_tile, i_nh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_n, i_h = i_nh // H, i_nh % H
    i_0, j_0 = (i_tile // TILES_J) * BI, (i_tile % TILES_J) * BJ
    rows, cols = i_0 + tl.arange(0, BI), j_0 + tl.arange(0, BJ)
    start, end = tl.load(cu + i_n), tl.load(cu + i_n + 1)
    tiles = tl.num_programs(0)

    in_h = (rows < D)[:, None] & (cols < D)[None, :]
    in_u = (rows < D)[:, None] & (cols < DVR)[None, :]
    at_h = i_nh * D * D + rows[:, None] * D + cols[None, :]
    at_hT = i_nh * D * D + cols[None, :] * D + rows[:, None]
    at_u = i_nh * D * DVR + cols[None, :] * D + rows[:, None]
    b_E = -tl.load(dh_final + at_h, mask=in_h, other=0.0) - tl.load(dh_final + at_hT, mask=in_h, other=0.0)
    b_R = tl.load(du_final + at_u, mask=in_u, other=0.0)

    q += i_h * D
    z += i_h * D
    x += i_h * D
    do += i_h * DVR
    k += (i_h // (H // HK)) * D
    low, high = tl.load(first + i_n), tl.load(first + i_n + 1)
    if high > low:
        share = tl.sum(tl.sum(b_R * tl.load(u_final + at_u, mask=in_u, other=0.0), 1), 0)
        share -= 0.5 * tl.sum(tl.sum(b_E * tl.load(h_final + at_h, mask=in_h, other=0.0), 1), 0)
        tl.store(carried + ((high - 1) * H + i_h) * tiles + i_tile, share)
    for back in range(0, high - low):
        i_chunk = high - 1 - back
        at = (i_chunk * H + i_h) * DK  # int64, as i_h is
        at_E, in_E = at * DK + rows[:, None] * DK + cols[None, :], cols[None, :] < DK
        at_R, in_R = at * DV + rows[:, None] * DV + cols[None, :], cols[None, :] < DV
        dtype: tl.constexpr = k.dtype.element_ty
        tl.store(E + at_E, b_E.to(dtype), mask=in_E)
        tl.store(RT + at_R, b_R.to(dtype), mask=in_R)

        tokens = start + (i_chunk - low) * C + tl.arange(0, C)
        g = load_gate(log_decay + i_h, tokens, end, H)
        zeta = tl.exp(tl.cumsum(g, 0))
        b = load_gate(beta + i_h, tokens, end, H)
        b_ridge = load_gate(ridge_t + i_h, tokens, end, H)
        key_weight = load_gate(from_start + i_h, tokens, end, H) * b * b
        at_T = tokens[None, :].to(tl.int64)
        in_T = (tokens < end)[None, :] & (rows < D)[:, None]
        zT = tl.load(z + at_T * (H * D) + rows[:, None], mask=in_T, other=0.0)
        xT = tl.load(x + at_T * (H * D) + rows[:, None], mask=in_T, other=0.0)
        qT = tl.load(q + at_T * (H * D) + rows[:, None], mask=in_T, other=0.0).to(tl.float32)
        kT = tl.load(k + at_T * (HK * D) + rows[:, None], mask=in_T, other=0.0)
        b_z = load_rows(z, tokens, end, H * D, j_0, D, BJ).to(tl.float32) * zeta[:, None]
        b_x = load_rows(x, tokens, end, H * D, j_0, D, BJ) * zeta[:, None]
        b_k = load_rows(k, tokens, end, HK * D, j_0, D, BJ).to(tl.float32) * key_weight[:, None]
        b_do = load_rows(do, tokens, end, H * DVR, j_0, DVR, BJ).to(tl.float32) * (scale * zeta)[:, None]
        mixT = load_gate(alpha + i_h, tokens, end, H)[None, :]

        b_H = tl.load(H0 + at_E, mask=in_E, other=0.0).to(tl.float32)
        b_U = tl.load(UT0 + at_R, mask=in_R, other=0.0).to(tl.float32)
        decay = tl.exp(tl.sum(g, 0))
        b_E = decay * b_E + tl.sum(zeta * zeta * b_ridge, 0) * b_H
        b_E += dot(zT, b_x.to(dtype)) + dot(xT.to(dtype), b_z.to(dtype)) + dot(kT, b_k.to(dtype))
        b_R = decay * b_R + dot((qT + mixT * (xT - qT)).to(dtype), b_do.to(dtype))
        if i_chunk > low:
            share = tl.sum(tl.sum(b_R * b_U, 1), 0) - 0.5 * tl.sum(tl.sum(b_E * b_H, 1), 0)
            tl.store(carried + ((i_chunk - 1) * H + i_h) * tiles + i_tile, share)
    tl.store(dh0 + at_h, -0.5 * b_E, mask=in_h)
    tl.store(du0 + at_u, b_R, mask=in_u)


@triton.jit
def gka_bwd_kernel_dkv(
    q, k, v, log_decay, alpha, beta, H0, x, do, z, ridge_t, from_start, local, E, RT, carried,
    dk, dv, dg, dbeta, cu, first, sequence, N, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """dk, dv (per query head), dlog_decay and dbeta of one chunk and head."""
    i_h, i_chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(sequence + i_chunk) >= N:
        return
    _, tokens, end = chunk_tokens(i_chunk, sequence, first, cu, C)
    i_hk = i_h // (H // HK)
    gate = i_h + tokens.to(tl.int64) * H
    valid = tokens < end

    g = load_gate(log_decay + i_h, tokens, end, H)
    G = tl.cumsum(g, 0)
    b = load_gate(beta + i_h, tokens, end, H)
    to_end = tl.exp(tl.sum(g, 0) - G)[:, None]
    DT = decay_until(G, C)
    write = b * b
    dtype: tl.constexpr = k.dtype.element_ty
    b_k = load_rows(k + i_hk * D, tokens, end, HK * D, 0, D, DK)
    keys = b_k.to(tl.float32)
    b_x = load_rows(x + i_h * D, tokens, end, H * D, 0, D, DK)

    # E_i k_i, all products in one accumulator
    b_z = load_rows(z + i_h * D, tokens, end, H * D, 0, D, DK)
    b_ridge = load_gate(ridge_t + i_h, tokens, end, H)
    b_start = load_gate(from_start + i_h, tokens, end, H)[:, None]
    E_k = dot((keys * to_end).to(dtype), load_state(E, i_chunk, i_h, H, DK, DK))
    E_k += dot((keys * b_start).to(dtype), load_state(H0, i_chunk, i_h, H, DK, DK))
    E_k += dot((DT * key_dot(b_k, b_x)).to(dtype), b_z)
    E_k += dot((DT * dot(b_k, tl.trans(b_z))).to(dtype), b_x.to(dtype))
    # sum_t D[t, i] ridge_t D[t, j]: how much of k_j k_j^T token i's sum of ridge_t H_t holds
    shared = tl.dot(DT * b_ridge[None, :], decay_from(G, C), input_precision="tf32")
    E_k += dot((shared * dot(b_k, tl.trans(b_k)) * write[None, :]).to(dtype), b_k)
    dw = -0.5 * tl.sum(keys * E_k, 1)

    # R_i^T v_i, on top of it
    b_q = load_rows(q + i_h * D, tokens, end, H * D, 0, D, DK).to(tl.float32)
    mixed = b_q + load_gate(alpha + i_h, tokens, end, H)[:, None] * (b_x - b_q)
    b_v = load_rows(v + i_hk * DVR, tokens, end, HK * DVR, 0, DVR, DV)
    b_do = load_rows(do + i_h * DVR, tokens, end, H * DVR, 0, DVR, DV)
    b_dk = -E_k
    b_dk += dot((b_v.to(tl.float32) * to_end).to(dtype), load_state_transposed(RT, i_chunk, i_h, H, DK, DV))
    b_dk += dot((scale * DT * dot(b_v, tl.trans(b_do))).to(dtype), mixed.to(dtype))
    store_rows(dk + i_h * D, write[:, None] * b_dk, tokens, end, H * D, D, DK)

    # R_i k_i
    R_k = dot((keys * to_end).to(dtype), load_state(RT, i_chunk, i_h, H, DK, DV))
    R_k += dot((scale * DT * key_dot(b_k, mixed)).to(dtype), b_do)
    store_rows(dv + i_h * DVR, write[:, None] * R_k, tokens, end, H * DVR, DVR, DV)
    dw += tl.sum(b_v.to(tl.float32) * R_k, 1)
    tl.store(dbeta + gate, 2.0 * b * dw, mask=valid)

    difference = load_gate(local + i_h, tokens, end, H) - write * dw
    suffix = tl.sum(difference, 0) - tl.cumsum(difference, 0) + difference
    tl.store(dg + gate, suffix + tl.load(carried + i_chunk.to(tl.int64) * H + i_h), mask=valid)


@triton.jit
def key_dot(k, a):
    """k a^T [C, C] for a float32 `a` kept to about 16 bits."""
    high = a.to(k.dtype)
    if k.dtype == tl.float32:
        return dot(k, tl.trans(high))
    return dot(k, tl.trans(high)) + dot(k, tl.trans((a - high.to(tl.float32)).to(k.dtype)))
