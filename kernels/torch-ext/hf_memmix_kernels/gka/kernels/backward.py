"""GKA's backward kernels except the solver and the scan: read-out and ridge, then dv, dk and the gates.

    E_i = sum_{t >= i} decay(i -> t) (z_t x_t^T + x_t z_t^T + ridge_t H_t)        minus twice the gradient of H_i
    R_i = sum_{t >= i} decay(i -> t) s do_t m_t^T         the gradient of U_i, with m = q + alpha (x - q), s the scale

No kernel uses the transpose of a dot's accumulator as an operand of another dot: Triton 3.4 to 3.7.0 miscompiles that
on Hopper.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import (
    add_product,
    decay_from,
    decay_until,
    dot,
    gate_dot,
    load_gate,
    load_rows,
    load_state,
    locate_chunk,
    split_dot,
    store_gate,
    store_rows,
)


@launched
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
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    b_k = load_rows(k + kv_head * D, rows, HK * D, D, C, DK)
    b_v = load_rows(v + kv_head * DVR, rows, HK * DVR, DVR, C, DK)
    b_do = load_rows(do + head * DVR, rows, H * DVR, DVR, C, DK)
    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    b = load_gate(beta + head, rows, H, C)
    scores = dot(b_do, tl.trans(b_v)) * decay_from(G, C) * (b * b)[None, :]
    b_UT0 = load_state(UT0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DK, DK)
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


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_bwd_kernel_ridge(
    inputs, solved, outputs, layout, N, length, per_sequence, ridge,
    H: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, DS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dq; ridge_t = 2 a (x . z) / |H| and its decayed sum `from_start`; `local` less e^G z . H_0 x and the part of the
    ridge; x decayed since the chunk's start.
    """
    log_decay, alpha = inputs
    H0, x, z, d_mixed, norms = solved
    dq, decayed_x, ridge_t, from_start, local = outputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head = token * H + i_h
    mix = load_gate(alpha + head, rows, H, C)
    norm = load_gate(norms + head, rows, H, C)
    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    zeta = tl.exp(G)
    b_x = load_rows(x + head * D, rows, H * D, D, C, DS)
    b_z = load_rows(z + head * D, rows, H * D, D, C, DS)

    # x in two parts: what token t's output gives to dg is a difference of products with x and with z
    b_H0 = load_state(H0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DS, DK)
    image = zeta * tl.sum(split_dot(b_x, b_H0) * b_z.to(tl.float32), 1)
    along = ridge * tl.sum(b_x * b_z.to(tl.float32), 1)
    store_gate(local + head, load_gate(local + head, rows, H, C) - image - norm * along, rows, H, C)
    b_ridge = tl.where(norm > 0, 2.0 * along / tl.where(norm > 0, norm, 1.0), 0.0)
    store_gate(ridge_t + head, b_ridge, rows, H, C)
    store_gate(from_start + head, tl.sum(decay_until(G, C) * (zeta * b_ridge)[None, :], 1), rows, H, C)

    store_rows(decayed_x + head * D, zeta[:, None] * b_x, rows, H * D, D, C, DS)
    b_dm = load_rows(d_mixed + head * D, rows, H * D, D, C, DS).to(tl.float32)
    tl.debug_barrier()  # dq may share the memory of d_mixed, so all threads read it before any thread overwrites it
    store_rows(dq + head * D, (1.0 - mix)[:, None] * b_dm + b_z.to(tl.float32), rows, H * D, D, C, DS)


@triton.jit
def scores_of(
    a, a_stride, b, b_stride, width, rows,
    C: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a b^T [C, C] for rows of two tensors, read block by block; a float32 `b` is kept to about 16 bits."""
    scores = tl.zeros([C, C], tl.float32)
    for i in tl.range(0, DK, BLOCK, num_stages=1):
        b_a = load_rows(a + i, rows, a_stride, width - i, C, BLOCK)
        b_b = load_rows(b + i, rows, b_stride, width - i, C, BLOCK)
        high = b_b.to(b_a.dtype)
        scores += dot(b_a, tl.trans(high))
        if b_b.dtype != b_a.dtype:
            scores += dot(b_a, tl.trans((b_b - high.to(tl.float32)).to(b_a.dtype)))
    return scores


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_bwd_kernel_dv(
    inputs, terms, RT, outputs, layout, N, length, per_sequence, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dv of one chunk and query head, and `later` = v . R k of the tokens after the chunk."""
    q, k, v, log_decay, alpha, beta = inputs
    x, do = terms
    dv, later = outputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    k += kv_head * D
    g = load_gate(log_decay + head, rows, H, C)
    G = tl.cumsum(g, 0)
    to_end = tl.exp(tl.sum(g, 0) - G)
    b = load_gate(beta + head, rows, H, C)
    mix = load_gate(alpha + head, rows, H, C)[None, :]

    RT += (i_chunk.to(tl.int64) * H + i_h) * DK * DK
    R_k = add_product(tl.zeros([C, DK], tl.float32), k, rows, HK * D, D, to_end, RT, C, DK, BLOCK, False)
    b_v = load_rows(v + kv_head * DVR, rows, HK * DVR, DVR, C, DK)
    store_gate(later + head, tl.sum(b_v.to(tl.float32) * R_k, 1), rows, H, C)
    k_x = scores_of(k, HK * D, x + head * D, H * D, D, rows, C, DK, BLOCK)
    k_q = scores_of(k, HK * D, q + head * D, H * D, D, rows, C, DK, BLOCK)
    k_m = decay_until(G, C) * (mix * k_x + (1.0 - mix) * k_q)
    b_do = load_rows(do + head * DVR, rows, H * DVR, DVR, C, DK)
    R_k += dot((scale * k_m).to(b_do.dtype), b_do)
    store_rows(dv + head * DVR, (b * b)[:, None] * R_k, rows, H * DVR, DVR, C, DK)


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_bwd_kernel_dk(
    inputs, terms, states, sums, grads, layout, N, length, per_sequence, scale,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DVR: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
    SHARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dk (per query head), dlog_decay and dbeta of one chunk and head."""
    q, k, v, log_decay, alpha, beta = inputs
    x, do, z, ridge_t, from_start = terms
    H0, E, RT = states
    local, later, carried = sums
    dk, dg, dbeta = grads
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head, kv_head = token * H + i_h, token * HK + i_h // (H // HK)
    state = i_chunk.to(tl.int64) * H + i_h
    dtype: tl.constexpr = k.dtype.element_ty
    k += kv_head * D
    v += kv_head * DVR
    q += head * D
    x += head * D
    z += head * D
    do += head * DVR
    g = load_gate(log_decay + head, rows, H, C)
    G = tl.cumsum(g, 0)
    b = load_gate(beta + head, rows, H, C)
    write = b * b
    mix = load_gate(alpha + head, rows, H, C)[None, :]

    # scores [key, token] of the pairs within the chunk. R v and E k cancel, by a factor of 15 where few keys fill the
    # state, so that their scores are added before they are rounded
    DT = decay_until(G, C)
    v_do = DT * (scale * scores_of(v, HK * DVR, do, H * DVR, DVR, rows, C, DK, BLOCK))
    by_q = ((mix - 1.0) * v_do).to(dtype)
    dw = tl.sum((1.0 - mix) * v_do * scores_of(k, HK * D, q, H * D, D, rows, C, DK, BLOCK), 1)
    v_do *= mix
    k_x = scores_of(k, HK * D, x, H * D, D, rows, C, DK, BLOCK)
    dw += tl.sum(v_do * k_x, 1)
    k_x *= DT
    by_z = k_x.to(dtype)
    k_z = scores_of(k, HK * D, z, H * D, D, rows, C, DK, BLOCK)
    by_x = (DT * k_z - v_do).to(dtype)
    k_z *= k_x
    dw -= tl.sum(k_z, 1)
    # what the pairs of query t give to its `local`
    between = -tl.sum(k_z * write[:, None], 0) - write * dw
    b_k = load_rows(k, rows, HK * D, D, C, DK)
    gram = dot(b_k, tl.trans(b_k))
    shared = gate_dot(decay_until(G, C) * load_gate(ridge_t + head, rows, H, C)[None, :], decay_from(G, C), b_k)
    shared *= gram * write[None, :]
    from_ridge = tl.sum(shared * gram, 1)
    tl.debug_barrier()

    # E k, then E k - R v: first the tokens after the chunk
    to_end = tl.exp(tl.sum(g, 0) - G)
    E_k = add_product(
        tl.zeros([C, DK], tl.float32), k, rows, HK * D, D, to_end, E + state * DK * DK, C, DK, BLOCK, False
    )
    b_k = load_rows(k, rows, HK * D, D, C, DK)
    E_after = tl.sum(b_k.to(tl.float32) * E_k, 1)
    start = load_gate(from_start + head, rows, H, C)
    E_k = add_product(E_k, k, rows, HK * D, D, start, H0 + state * DK * DK, C, DK, BLOCK, False)
    E_all = tl.sum(b_k.to(tl.float32) * E_k, 1)
    E_k = add_product(E_k, v, rows, HK * DVR, DVR, -to_end, RT + state * DK * DK, C, DK, BLOCK, True)
    E_k += dot(shared.to(dtype), b_k)
    E_k += dot(by_z, load_rows(z, rows, H * D, D, C, DK))
    E_k += dot(by_x, load_rows(x, rows, H * D, D, C, DK).to(dtype))
    E_k += dot(by_q, load_rows(q, rows, H * D, D, C, DK))
    store_rows(dk + head * D, -write[:, None] * E_k, rows, H * D, D, C, DK)

    R_after = load_gate(later + head, rows, H, C)
    store_gate(dbeta + head, 2.0 * b * (dw + R_after - 0.5 * (E_all + from_ridge)), rows, H, C)
    # dg_i: what tokens from i on take from states and keys before i (README.md). It adds pairs, and does not subtract
    # sums over all pairs, since of their rounding errors nothing would cancel
    between += load_gate(local + head, rows, H, C) + 0.5 * write * (E_all - E_after + from_ridge)
    suffix = tl.sum(between, 0) - tl.cumsum(between, 0) + between
    after = write * (R_after - 0.5 * E_after)
    end = tl.sum(tl.load(carried + state * SHARES + tl.arange(0, SHARES)), 0)
    store_gate(dg + head, end + tl.cumsum(after, 0) - after + suffix, rows, H, C)
