"""The solver of wide states, keys of more than 128 numbers in 16 bits: solve.py says what it computes.

The iterations run in float16, and what the registers cannot hold beside r and its image is in memory between phases.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .solve import load_rhs, state_norm
from .tiles import decay_from, dot, load_gate, load_rows, load_state, locate_chunk, split_dot, store_gate, store_rows


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


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_kernel_solve_wide(
    rhs, matrix, outputs, layout, N, length, per_sequence, table, ridge,
    PHASES: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, DS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """x [total, H, D] and |H_t| (`norms` [total, H]) of one chunk and head, from rhs = factor * (high + low).

    `low` and `factor` may be None. `x` may be the memory of `low`: it is written after the last read. `parked` [total,
    H, D] float32 holds the solution of the earlier phases, and may be the memory of `x`. `table` holds the iteration
    count of every phase, then all steps.

    The iterations run in float16, which rounds 8 times less than bfloat16. The system is scaled
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
    low_type: tl.constexpr = tl.float16
    # with one phase nothing would correct the rounding of a solution in float16
    held: tl.constexpr = tl.float16 if PHASES > 1 else tl.float32
    shrink: tl.constexpr = 1.0 / 16.0  # a solution is up to 51 times its right side
    head = token * H + i_h
    log_decay += head
    beta += head
    high += head * D
    parked += head * D
    x += head * D
    if low is not None:
        low += head * D
    b_k = load_rows(k + (token * HK + i_h // (H // HK)) * D, rows, HK * D, D, C, DS)
    b_H0 = load_state(H0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DS, DK)
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
    r = load_rhs(high, low, rows, H * D, D, C, DS)
    if factor is not None:
        r *= load_gate(factor + head, rows, H, C)[:, None]
    largest = tl.max(tl.abs(r), 1)
    r *= inverse_or(largest, 0.0)[:, None]
    step = table + PHASES
    for phase in tl.static_range(PHASES):
        if phase > 0:
            # the exact residual, from y in two parts; it contains what the low precision of the iterations lost
            unit = inverse_or(largest, 0.0)
            if factor is not None:
                unit *= load_gate(factor + head, rows, H, C)
            y = load_rows(parked, rows, H * D, D, C, DS)
            _, weights = key_weights(log_decay, beta, key_sizes, rows, H, C)
            image = split_dot(y, b_H0) * by_state
            image += split_dot(split_dot(y, kT) * (weights * inverse[:, None]), b_k)
            r = load_rhs(high, low, rows, H * D, D, C, DS) * unit[:, None] - (ridge * y + image)
        y = tl.zeros([C, DS], held)
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
        solution = y.to(tl.float32) * (1.0 / shrink)
        if phase > 0:
            solution += load_rows(parked, rows, H * D, D, C, DS)
            tl.debug_barrier()
        if phase + 1 < PHASES:
            store_rows(parked, solution, rows, H * D, D, C, DS)
        else:
            store_rows(x, solution * (largest * inverse)[:, None], rows, H * D, D, C, DS)
        tl.debug_barrier()
