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
def state_norm(k, H0, G, weight, C: tl.constexpr):
    """|H_t|_F for the chunk's tokens [C], by expansion of the square."""
    zeta, DW = tl.exp(G), decay_from(G, C) * weight[None, :]
    key_energy = tl.sum(dot(k, H0) * k.to(tl.float32), 1)  # k_j^T H_0 k_j
    gram = dot(k, tl.trans(k))
    start_state = H0.to(tl.float32)
    start = zeta * zeta * tl.sum(tl.sum(start_state * start_state, 1), 0)
    cross = 2.0 * zeta * tl.sum(DW * key_energy[None, :], 1)
    own = tl.sum(gate_dot(DW, gram * gram, k) * DW, 1)
    return tl.sqrt(tl.maximum(start + cross + own, 0.0))


@triton.jit
def load_rhs(high, low, rows, stride, width, C: tl.constexpr, COLS: tl.constexpr):
    """A right side in float32, held by one tensor or as the sum of two."""
    value = load_rows(high, rows, stride, width, C, COLS).to(tl.float32)
    if low is not None:
        value += load_rows(low, rows, stride, width, C, COLS).to(tl.float32)
    return value


@triton.jit
def row_weights(gates, inverse, rows, H: tl.constexpr, C: tl.constexpr):
    """Weights of the state e^(G_t) / |H_t| [C, 1] and of the keys D[t, j] w_j / |H_t| [C, C] in H_t / |H_t|."""
    log_decay, beta = gates
    G = tl.cumsum(load_gate(log_decay, rows, H, C), 0)
    weight = load_gate(beta, rows, H, C)
    return (tl.exp(G) * inverse)[:, None], decay_from(G, C) * (weight * weight)[None, :] * inverse[:, None]


@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_kernel_solve(
    rhs, matrix, outputs, layout, N, length, per_sequence, table, ridge,
    PHASES: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x [total, H, D] and |H_t| (`norms` [total, H]) of one chunk and head, from rhs = factor * (high + low).

    `low` and `factor` may be None. `x` may be the memory of `low`: it is written after the last read. `parked` [total,
    H, D] float32 holds the solution of the earlier phases, and may be the memory of `x`. `table` holds the iteration
    count of every phase, then all steps.

    The system is solved in units of |H_t|: with A = H_t / |H_t| + ridge I, each phase adds the solution of A y = r to
    y, and x = y / |H_t| at the end. The loop has to do without memory: registers hold r, its image and, of a phase
    that a later one corrects, the solution in 16 bits.
    """
    high, low, factor = rhs
    k, log_decay, beta, H0 = matrix
    x, parked, norms = outputs
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    dtype: tl.constexpr = k.dtype.element_ty
    # with one phase nothing would correct the rounding of a solution in 16 bits
    packed: tl.constexpr = PHASES > 1 and dtype != tl.float32
    held: tl.constexpr = tl.float16 if packed else tl.float32
    shrink: tl.constexpr = 1.0 / 16.0 if packed else 1.0  # a solution is up to 51 times its right side
    head = token * H + i_h
    gates = (log_decay + head, beta + head)
    high += head * D
    parked += head * D
    x += head * D
    if low is not None:
        low += head * D
    b_k = load_rows(k + (token * HK + i_h // (H // HK)) * D, rows, HK * D, D, C, DK)
    b_H0 = load_state(H0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DK, DK)
    kT = tl.trans(b_k)

    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    weight = load_gate(beta + head, rows, H, C)
    norm = state_norm(b_k, b_H0, G, weight * weight, C)
    store_gate(norms + head, norm, rows, H, C)
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    tl.debug_barrier()
    by_state, by_key = row_weights(gates, inverse, rows, H, C)
    low_weights = by_key.to(dtype)
    step = table + PHASES
    for phase in tl.static_range(PHASES):
        r = load_rhs(high, low, rows, H * D, D, C, DK)
        if factor is not None:
            r *= load_gate(factor + head, rows, H, C)[:, None]
        if phase > 0:
            # the exact residual, from y in two parts; it contains what the low precision of the iterations lost
            y = load_rows(parked, rows, H * D, D, C, DK)
            _, by_key = row_weights(gates, inverse, rows, H, C)
            r -= ridge * y + split_dot(y, b_H0) * by_state + split_dot(split_dot(y, kT) * by_key, b_k)
        # the solution may have 16 bits because its right side is measured in units of its largest number
        unit = tl.max(tl.abs(r), 1)
        unit = tl.where(unit > 0, unit, 1.0)
        r *= (1.0 / unit)[:, None]
        y = tl.zeros([C, DK], held)
        count = tl.load(table + phase).to(tl.int32)
        for _ in range(count):
            tau = tl.load(step)
            y += ((tau * shrink) * r).to(held)
            rounded = r.to(dtype)
            scores = dot(rounded, kT).to(dtype) * low_weights
            image = dot(rounded, b_H0) * by_state
            image += dot(scores, b_k)
            r = (1.0 - tau * ridge) * r - tau * image
            step += 1
        y += ((tl.load(step) * shrink) * r).to(held)
        step += 1
        tl.debug_barrier()
        solution = y.to(tl.float32) * (unit * (1.0 / shrink))[:, None]
        if phase > 0:
            solution += load_rows(parked, rows, H * D, D, C, DK)
            tl.debug_barrier()
        if phase + 1 < PHASES:
            store_rows(parked, solution, rows, H * D, D, C, DK)
        else:
            store_rows(x, solution * inverse[:, None], rows, H * D, D, C, DK)
        tl.debug_barrier()
