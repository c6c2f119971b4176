"""The solver as one kernel, used by the forward pass (x from q) and the backward pass (z from the gradient of x).

    x_t = CH(H_t + ridge |H_t| I, factor_t rhs_t),  0 where H_t = 0

It runs Richardson steps over Chebyshev roots, with iterative refinement between phases: README.md, "Product form".
"""

import triton
import triton.language as tl

from .tiles import (
    decay_from,
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


@triton.jit
def gka_kernel_steps(table, VALUES: tl.constexpr):
    """Write constants to the device without a copy from the host, which a CUDA graph could not capture."""
    for i in tl.static_range(len(VALUES)):
        tl.store(table + i, VALUES[i])


@triton.jit
def state_norm(k, H0, zeta, DW):
    """|H_t|_F for the chunk's tokens [C], by expansion of the square of zeta_t H_0 + sum_j DW[t, j] k_j k_j^T."""
    key_energy = tl.sum(dot(k, H0) * k.to(tl.float32), 1)  # k_j^T H_0 k_j
    gram = dot(k, tl.trans(k))
    start_state = H0.to(tl.float32)
    start = zeta * zeta * tl.sum(tl.sum(start_state * start_state, 1), 0)
    cross = 2.0 * zeta * tl.sum(DW * key_energy[None, :], 1)
    own = tl.sum(gate_dot(DW, gram * gram, k) * DW, 1)
    return tl.sqrt(tl.maximum(start + cross + own, 0.0))


@triton.jit
def load_rhs(high, low, rows, stride, width, C: tl.constexpr, COLS: tl.constexpr, first):
    """A right side in float32, held by one tensor or as the sum of two."""
    value = load_rows(high, rows, stride, width, C, COLS, first).to(tl.float32)
    if low is not None:
        value += load_rows(low, rows, stride, width, C, COLS, first).to(tl.float32)
    return value


@triton.jit
def hidden_zero(table):
    """0, from a load: offsets that contain it are computed where they are used. Otherwise the compiler computes the
    addresses of all phases once, and keeps them in memory because they take a hundred registers.
    """
    return tl.minimum(tl.load(table).to(tl.int32), 0)


@triton.jit
def inverse_or(value, otherwise):
    """1 / value, or `otherwise` where value is 0; for values that are not negative."""
    return tl.where(value > 0, 1.0 / tl.where(value > 0, value, 1.0), otherwise)


@triton.jit
def key_weights(log_decay, beta, key_sizes, rows, H: tl.constexpr, C: tl.constexpr):
    """(cumulative decay e^(G_t) [C], weights D[t, j] w_j of the scaled keys [C, C])."""
    G = tl.cumsum(load_gate(log_decay, rows, H, C), 0)
    weight = load_gate(beta, rows, H, C) * key_sizes
    return tl.exp(G), decay_from(G, C) * (weight * weight)[None, :]


@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_kernel_solve(
    rhs, matrix, outputs, layout, N, length, per_sequence, table, ridge,
    PHASES: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x [total, H, D] and |H_t| (`norms` [total, H]) of one chunk and head, from rhs = factor * (high + low).

    `low` and `factor` may be None. `x` may be the memory of `low`: it is written after the last read. `parked` [total,
    H, D] float32 holds the solution of the earlier phases, and may be the memory of `x`. `table` holds the iteration
    count of every phase, then all steps.

    For inputs in 16 bits the iterations run in float16, which rounds 8 times less than bfloat16. The system is scaled
    so that all its numbers fit: with A = H_t / |H_t| + ridge I, y = |H_t| x is solved in units of the largest number
    of each right side, and keys and state are divided by their largest numbers. The loop has to do without memory:
    registers hold r, its image and, for a phase that a later one corrects, the solution in float16.
    """
    high, low, factor = rhs
    k, log_decay, beta, H0 = matrix
    x, parked, norms = outputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    single: tl.constexpr = k.dtype.element_ty == tl.float32
    low_type: tl.constexpr = tl.float32 if single else tl.float16
    # beside wide rows the registers hold the solution of one phase in float16, if a later one corrects its rounding
    park: tl.constexpr = DK > 128 and PHASES > 1 and not single
    held: tl.constexpr = tl.float16 if park else tl.float32
    shrink: tl.constexpr = 1.0 / 16.0 if park else 1.0  # a solution is up to 51 times its right side
    head = token * H + i_h
    log_decay += head
    beta += head
    high += head * D
    parked += head * D
    x += head * D
    if low is not None:
        low += head * D
    b_k = load_rows(k + (token * HK + i_h // (H // HK)) * D, rows, HK * D, D, C, DK)
    b_H0 = load_state(H0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DK, DK)
    key_sizes = tl.full([C], 1.0, tl.float32)
    state_size = tl.full([], 1.0, tl.float32)
    if not single:
        key_sizes = tl.max(tl.abs(b_k.to(tl.float32)), 1)
        b_k = (b_k.to(tl.float32) * inverse_or(key_sizes, 0.0)[:, None]).to(low_type)
        state_size = tl.max(tl.max(tl.abs(b_H0.to(tl.float32)), 1), 0)
        b_H0 = (b_H0.to(tl.float32) * inverse_or(state_size, 0.0)).to(low_type)
    kT = tl.trans(b_k)

    zeta, weights = key_weights(log_decay, beta, key_sizes, rows, H, C)
    norm = state_norm(b_k, b_H0, zeta * state_size, weights)
    store_gate(norms + head, norm, rows, H, C)
    inverse = inverse_or(norm, 0.0)
    by_state = (zeta * state_size * inverse)[:, None]
    by_key = (weights * inverse[:, None]).to(low_type)
    r = load_rhs(high, low, rows, H * D, D, C, DK, hidden_zero(table))
    if factor is not None:
        r *= load_gate(factor + head, rows, H, C)[:, None]
    largest = tl.max(tl.abs(r), 1)
    r *= inverse_or(largest, 0.0)[:, None]
    y = tl.zeros([C, DK], held)
    step = table + PHASES
    for phase in tl.static_range(PHASES):
        if phase > 0:
            # the exact residual, from y in two parts; it contains what the low precision of the iterations lost
            unit = inverse_or(largest, 0.0)
            if factor is not None:
                unit *= load_gate(factor + head, rows, H, C)
            zero = hidden_zero(table)
            if park:
                y = load_rows(parked, rows, H * D, D, C, DK, zero)
            _, weights = key_weights(log_decay, beta, key_sizes, rows, H, C)
            image = split_dot(y, b_H0) * by_state
            image += split_dot(split_dot(y, kT) * (weights * inverse[:, None]), b_k)
            r = load_rhs(high, low, rows, H * D, D, C, DK, zero) * unit[:, None] - (ridge * y + image)
        if park:
            y = tl.zeros([C, DK], held)
        count = tl.load(table + phase).to(tl.int32)
        for _ in range(count):
            tau = tl.load(step)
            y += ((tau * shrink) * r).to(held)
            rounded = r.to(low_type)
            scores = dot(rounded, kT).to(low_type) * by_key
            image = dot(rounded, b_H0) * by_state
            image += dot(scores, b_k)
            r = (1.0 - tau * ridge) * r - tau * image
            step += 1
        y += ((tl.load(step) * shrink) * r).to(held)
        step += 1
        tl.debug_barrier()  # without it the compiler keeps values of later phases in registers
        zero = hidden_zero(table)
        solution = y.to(tl.float32) * (1.0 / shrink)
        if park and phase > 0:
            solution += load_rows(parked, rows, H * D, D, C, DK, zero)
            tl.debug_barrier()
        if park and phase + 1 < PHASES:
            store_rows(parked, solution, rows, H * D, D, C, DK, zero)
        elif phase + 1 == PHASES:
            store_rows(x, solution * (largest * inverse)[:, None], rows, H * D, D, C, DK, zero)
        tl.debug_barrier()
