"""The solver as one kernel, used by the forward pass (x from q) and the backward pass (z from the gradient of x).

    x_t = CH(H_t + ridge |H_t| I, factor_t rhs_t),  0 where H_t = 0

It runs Richardson steps over Chebyshev roots, with iterative refinement between phases: README.md, "Product form".
"""

import triton
import triton.language as tl

from ..._recorder import launched
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


@launched
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
def load_rhs(high, low, rows, stride, width, C: tl.constexpr, COLS: tl.constexpr):
    """A right side in float32, held by one tensor or as the sum of two."""
    value = load_rows(high, rows, stride, width, C, COLS).to(tl.float32)
    if low is not None:
        value += load_rows(low, rows, stride, width, C, COLS).to(tl.float32)
    return value


@launched
@triton.jit(do_not_specialize=["length", "per_sequence", "N"])
def gka_kernel_solve(
    rhs, matrix, x, norms, layout, N, length, per_sequence, table, ridge,
    PHASES: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DK: tl.constexpr, DS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """x [total, H, D] and |H_t| (`norms` [total, H]) of one chunk and head, from rhs = factor * (high + low).

    `low` and `factor` may be None. `x` may be the memory of `low`: it is written after the last read. `table` holds
    the iteration count of every phase, then all steps. H lies in the first DS rows and columns of H0 [DK, DK].
    """
    high, low, factor = rhs
    k, log_decay, beta, H0 = matrix
    i_h, i_chunk = tl.program_id(0) % H, tl.program_id(0) // H
    _, token, rows = locate_chunk(i_chunk, layout, N, length, per_sequence, C)
    if rows <= 0:
        return
    head = token * H + i_h
    high += head * D
    if low is not None:
        low += head * D
    G = tl.cumsum(load_gate(log_decay + head, rows, H, C), 0)
    weight = load_gate(beta + head, rows, H, C)
    weight *= weight
    b_k = load_rows(k + (token * HK + i_h // (H // HK)) * D, rows, HK * D, D, C, DS)
    b_H0 = load_state(H0 + (i_chunk.to(tl.int64) * H + i_h) * DK * DK, DS, DK)

    norm = state_norm(b_k, b_H0, tl.exp(G), decay_from(G, C) * weight[None, :])
    store_gate(norms + head, norm, rows, H, C)
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    start_weight = (tl.exp(G) * inverse)[:, None]
    weights = decay_from(G, C) * weight[None, :] * inverse[:, None]
    rhs_scale = inverse
    if factor is not None:
        rhs_scale *= load_gate(factor + head, rows, H, C)
    kT = tl.trans(b_k)
    b_x = tl.zeros([C, DS], tl.float32)
    step = table + PHASES
    for phase in tl.static_range(PHASES):
        # each phase reads q again, because the loop below needs all registers
        r = load_rhs(high, low, rows, H * D, D, C, DS) * rhs_scale[:, None]
        if phase > 0:
            # the exact residual, from x in two parts; it contains what the low precision of the iterations lost
            r -= ridge * b_x + split_dot(b_x, b_H0) * start_weight + split_dot(split_dot(b_x, kT) * weights, b_k)
        count = tl.load(table + phase).to(tl.int32)
        for _ in range(count):
            tau = tl.load(step)
            b_x += tau * r
            rounded = r.to(b_k.dtype)
            image = dot(rounded, b_H0) * start_weight
            scores = dot(rounded, kT) * weights
            image += dot(scores.to(b_k.dtype), b_k)
            r = (1.0 - tau * ridge) * r - tau * image
            step += 1
        b_x += tl.load(step) * r
        step += 1
        tl.debug_barrier()  # without it the compiler merges the loads of the phases and keeps the values in registers
    store_rows(x + head * D, b_x, rows, H * D, D, C, DS)
