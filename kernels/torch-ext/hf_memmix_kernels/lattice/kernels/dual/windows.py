"""Kernels of Lattice's dual form that handle all windows in parallel: given p, all that they compute is linear.

Every program holds the 64 tokens of one window of one head. The states before the window, and the gradients after it,
were stored by the walks (walk.py, walk_back.py). The product of the decays between two tokens is A_t / A_j with A_t =
a_t ... a_1. Every sum over pairs of tokens is therefore one matrix product of rows scaled by A_t and rows divided by
A_j. Where an A is too small or too large for the division, the kernel refuses the window: it sets the flag `refused`,
its results there have no meaning, and windows_by_levels.py computes them again.

h is v or -v. The sign goes to b and g, which multiply h everywhere, and v is used as it is stored.
"""

import triton
import triton.language as tl

from ...._recorder import launched
from .tiles import kept_slots, load_column, load_rows, locate, write_rule


@triton.jit
def token_order(C: tl.constexpr):
    """The token of every row: as `decays` reads them, four neighbours of a segment lie in one thread."""
    rows = tl.arange(0, C)
    return rows % 16 * (C // 16) + rows // 16


@triton.jit
def decays(a):
    """A and 1 / A of rows in `token_order`, A of the last, and whether all are of a size to multiply and divide by."""
    C: tl.constexpr = a.shape[0]
    M: tl.constexpr = a.shape[1]
    A = tl.cumprod(tl.reshape(a, [C // 16, 16, M]), 0)
    last = tl.arange(0, C // 16)[:, None, None] == C // 16 - 1
    total = tl.sum(tl.where(last, A, 0), 0)
    until = tl.cumprod(total, 0)
    end = tl.sum(tl.where(tl.arange(0, 16)[:, None] == 15, until, 0), 0)
    A = tl.reshape(A * (until / total)[None, :, :], [C, M])
    inverse = 1 / A
    # a sum, because infinity and NaN stay visible in it
    return A, inverse, end, tl.sum(tl.abs(A) + tl.abs(inverse)) < 2.0**40


@triton.jit
def parts(x, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """x as operands of `multiply`: for "pairs" bfloat16 that add up to it, one if it is bfloat16 and else two."""
    if PRECISION != "pairs":
        return (x.to(ACC),)
    elif x.dtype == tl.bfloat16:
        return (x,)
    else:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        low = x - (bits & -65536).to(tl.float32, bitcast=True)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), low.to(tl.bfloat16)


@triton.jit
def transposed(x):
    y = ()
    for i in tl.static_range(len(x)):
        y = y + (tl.trans(x[i]),)
    return y


@triton.jit
def multiply(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y of `parts`, without the product of the two low parts."""
    HOW: tl.constexpr = "ieee" if PRECISION == "pairs" else PRECISION
    for i in tl.static_range(len(x)):
        for j in tl.static_range(len(y)):
            if i + j < 2:
                acc = tl.dot(x[i], y[j], acc, input_precision=HOW, out_dtype=acc.dtype)
    return acc


@triton.jit
def load_raw(p, o_t, o_w, width: tl.constexpr, stride, tokens):
    """`load_rows` as they are stored."""
    mask = (o_t < tokens)[:, None] & (o_w < width)[None, :]
    return tl.load(p + o_t[:, None] * stride + o_w[None, :], mask=mask, other=0)


@launched
@triton.jit
def lattice_read_kernel(
    inputs, walked, o, refused, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """o of one window of one head, from MB slots at a time."""
    q, k, v, hh, gamma = inputs
    states, p = walked
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, token_order(C), tl.arange(0, BD)
    q, k, i_w = q + at * M, k + at * M, i_c.to(tl.int64) * H + i_h
    states, p = states + i_w * (M * D), p + i_w * (C * kept_slots(M))
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_o, score, fits = tl.zeros([C, BD], ACC), tl.zeros([C, C], ACC), 1
    for i_m in tl.static_range(0, M, MB):
        o_m = i_m + tl.arange(0, MB)
        b_p = load_rows(p, o_t, o_m, M, kept_slots(M), tokens, ACC)
        b_k = load_rows(k, o_t, o_m, M, H * M, tokens, ACC)
        b_q = load_rows(q, o_t, o_m, M, H * M, tokens, ACC)
        S = parts(load_rows(states, o_m, o_d, D, D, M, ACC), PRECISION, ACC)
        _, _, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        A, inverse, _, small = decays(a)
        fits &= small.to(tl.int32)
        reads, writes = parts(b_q * A, PRECISION, ACC), parts(SIGN * b * inverse, PRECISION, ACC)
        score = multiply(reads, transposed(writes), score, PRECISION)
        b_o = multiply(reads, S, b_o, PRECISION)
    score = tl.where(o_t[:, None] >= o_t[None, :], score, 0)
    b_v = load_raw(v + at * D, o_t, o_d, D, H * D, tokens)
    b_o = multiply(parts(score, PRECISION, ACC), parts(b_v, PRECISION, ACC), b_o, PRECISION)
    mask = (o_t < tokens)[:, None] & (o_d < D)[None, :]
    tl.store(o + at * D + o_t[:, None] * (H * D) + o_d[None, :], b_o.to(o.dtype.element_ty), mask=mask)
    tl.store(refused + tl.program_id(0), 1 - fits)


@launched
@triton.jit
def lattice_read_adjoint_kernel(
    do, inputs, walked, found, flags, refused, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq of one window of one head, also as `reads`; `flags` is set where a is so small that x loses digits."""
    k, v, hh, gamma = inputs
    states, p = walked
    dq, reads = found
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, token_order(C), tl.arange(0, BD)
    i_w = i_c.to(tl.int64) * H + i_h
    o_p = i_w * (C * kept_slots(M))
    states, p, reads = states + i_w * (M * D), p + o_p, reads + o_p
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_do = parts(load_raw(do + at * D, o_t, o_d, D, H * D, tokens), PRECISION, ACC)
    b_v = parts(load_raw(v + at * D, o_t, o_d, D, H * D, tokens), PRECISION, ACC)
    score = multiply(b_do, transposed(b_v), tl.zeros([C, C], ACC), PRECISION)
    score = parts(tl.where(o_t[:, None] >= o_t[None, :], score, 0), PRECISION, ACC)
    nearest, fits = tl.full([C], 1, ACC), 1
    for i_m in tl.static_range(0, M, MB):
        o_m = i_m + tl.arange(0, MB)
        o_q = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        mask_q = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_p = load_rows(p, o_t, o_m, M, kept_slots(M), tokens, ACC)
        b_k = tl.load(k + o_q, mask=mask_q, other=0).to(ACC)
        S = parts(load_rows(states, o_m, o_d, D, D, M, ACC), PRECISION, ACC)
        _, alpha, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        nearest = tl.minimum(nearest, tl.min(tl.abs(1 - alpha * b_p), 1))
        A, inverse, _, small = decays(a)
        fits &= small.to(tl.int32)
        writes = parts(SIGN * b * inverse, PRECISION, ACC)
        b_dq = multiply(b_do, transposed(S), tl.zeros([C, MB], ACC), PRECISION)
        b_dq = multiply(score, writes, b_dq, PRECISION) * A
        tl.store(dq + o_q, b_dq.to(dq.dtype.element_ty), mask=mask_q)
        # stored for all tokens of the window, because the walk reads whole chunks
        tl.store(reads + o_t[:, None] * kept_slots(M) + o_m[None, :], b_dq, mask=(o_m < M)[None, :])
    tl.store(flags + tl.program_id(0), (tl.min(nearest, 0) < 0.25).to(tl.int32))
    tl.store(refused + tl.program_id(0), 1 - fits)


@launched
@triton.jit
def lattice_write_adjoint_kernel(
    do, inputs, walked, grads, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk, dv and dgamma of one window of one head."""
    q, k, v, hh, gamma = inputs
    states, p, dalpha, z, ends = walked
    dk, dv, dgamma = grads
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, token_order(C), tl.arange(0, BD)
    row, column = o_t[:, None], o_t[None, :]
    i_w = i_c.to(tl.int64) * H + i_h
    o_w, o_p = i_w * (M * D), i_w * (C * kept_slots(M))
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_dgamma, b_dv, none = tl.zeros([C], ACC), tl.zeros([C, BD], ACC), tl.zeros([C, C], ACC)
    for i_m in tl.static_range(0, M, MB):
        o_m = i_m + tl.arange(0, MB)
        o_k = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        mask_k = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_k = tl.load(k + o_k, mask=mask_k, other=0).to(ACC)
        b_p = load_rows(p + o_p, o_t, o_m, M, kept_slots(M), tokens, ACC)
        b_dalpha = load_rows(dalpha + o_p, o_t, o_m, M, kept_slots(M), tokens, ACC)
        b_z = load_rows(z + o_p, o_t, o_m, M, kept_slots(M), tokens, ACC)
        c, alpha, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        dc = -b_gamma * b_dalpha
        tl.store(dk + o_k, (-dc if VARIANT == "enc" else dc).to(dk.dtype.element_ty), mask=mask_k)
        g = alpha * alpha * b_dalpha - a * b * b_z
        if VARIANT == "enc":
            g += dc
        b_dgamma -= tl.sum(c * b_dalpha, 1)
        own = -tl.sum(b * b * b_z, 1)
        A, inverse, end, _ = decays(a)
        # of two tokens, the later one reads what the earlier one writes, and its gradient goes to the earlier one
        write = parts(SIGN * b * inverse, PRECISION, ACC)
        step = parts(SIGN * g * (A / a), PRECISION, ACC)
        read = parts(tl.load(q + o_k, mask=mask_k, other=0).to(ACC) * A, PRECISION, ACC)
        S = load_rows(states + o_w, o_m, o_d, D, D, M, ACC)
        b_dv = multiply(step, parts(S, PRECISION, ACC), b_dv, PRECISION)
        score = tl.where(row > column, multiply(step, transposed(write), none, PRECISION), own[:, None])
        score = tl.where(row < column, multiply(write, transposed(step), none, PRECISION), score)
        b_v = parts(load_raw(v + at * D, o_t, o_d, D, H * D, tokens), PRECISION, ACC)
        b_dv = multiply(parts(score, PRECISION, ACC), b_v, b_dv, PRECISION)
        score = tl.where(row <= column, multiply(write, transposed(read), none, PRECISION), 0)
        b_do = parts(load_raw(do + at * D, o_t, o_d, D, H * D, tokens), PRECISION, ACC)
        b_dv = multiply(parts(score, PRECISION, ACC), b_do, b_dv, PRECISION)
        E = load_rows(ends + o_w, o_m, o_d, D, D, M, ACC) * end[:, None]
        b_dv = multiply(write, parts(E, PRECISION, ACC), b_dv, PRECISION)
    tl.store(dgamma + at + o_t * H, b_dgamma.to(dgamma.dtype.element_ty), mask=o_t < tokens)
    o_v = at * D + o_t[:, None] * (H * D) + o_d[None, :]
    mask_v = (o_t < tokens)[:, None] & (o_d < D)[None, :]
    tl.store(dv + o_v, b_dv.to(dv.dtype.element_ty), mask=mask_v)
