"""Parallel kernels of Lattice's backward for "dec": the coefficients of all tokens, and the gradients that read
states.

Given h and p, which forward keeps, the states of a window are linear in the state before it, as in the dual form of
"enc" and "sim": s_t = A_t s_0 + sum_{j <= t} (A_t / A_j) b_j h_j, A_t = a_t ... a_1. See dual/windows.py.
"""

import triton
import triton.language as tl

from ...._recorder import launched
from ..dual.tiles import join, load_column, load_rows, pairs
from ..dual.windows import decays, load_raw, multiply, parts, token_order, transposed
from .tiles import rescale


@triton.jit
def window_of(i_c, layout, CHECKPOINT: tl.constexpr):
    """First token, length and checkpoint of window i_c; windows beyond the last are empty."""
    cu_seqlens, first, sequence_of, T, N = layout
    if cu_seqlens is None:
        windows = tl.cdiv(T, CHECKPOINT)
        begin = i_c % windows * CHECKPOINT
        return (i_c // windows).to(tl.int64) * T + begin, tl.minimum(T - begin, CHECKPOINT), i_c.to(tl.int64)
    else:
        i_n = tl.load(sequence_of + i_c)
        last = tl.minimum(i_n, N - 1)
        start = tl.load(cu_seqlens + last).to(tl.int64)
        window = tl.where(i_n < N, i_c - tl.load(first + last), 0).to(tl.int64)
        left = (tl.load(cu_seqlens + last + 1) - start - window * CHECKPOINT).to(tl.int32)
        tokens = tl.where(i_n < N, tl.minimum(left, CHECKPOINT), 0)
        return start + window * CHECKPOINT, tokens, start // CHECKPOINT + last + window


@launched
@triton.jit
def lattice_rule_kernel(
    k, gamma, h, p, hh, a, b, rows,
    M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """|h|^2 of every token and head, and a and b of s' = a s + b h of every slot."""
    o_r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    o_d, o_m, m_r = tl.arange(0, BD), tl.arange(0, BM), o_r < rows
    b_h = tl.load(h + o_r[:, None] * D + o_d[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0)
    b_hh = tl.sum(b_h * b_h, 1)
    tl.store(hh + o_r, b_hh, mask=m_r)
    o_k, m_k = o_r[:, None] * M + o_m[None, :], m_r[:, None] & (o_m < M)[None, :]
    b_gamma = tl.load(gamma + o_r, mask=m_r, other=0).to(b_hh.dtype)
    alpha = -b_gamma[:, None] * tl.load(k + o_k, mask=m_k, other=0).to(b_hh.dtype)
    b_p = tl.load(p + o_k, mask=m_k, other=0)
    beta = rescale(alpha, b_p, b_hh[:, None])
    tl.store(a + o_k, beta * (1 - alpha * b_p), mask=m_k)
    tl.store(b + o_k, beta * alpha, mask=m_k)


@launched
@triton.jit
def lattice_slots_kernel(
    x, moves, kept, dalpha, grads, refused, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, MB: tl.constexpr,
    WIDE: tl.constexpr, CHECKPOINT: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x = do: dq = S'^T x of one window of one head. x = dz, where there is dalpha: dk, dv and dgamma.

    `refused` is set where a product of decays is too small or too large to divide by; the results are then invalid.
    """
    k, gamma, h, a, b = moves
    dx, dv, dgamma = grads
    C: tl.constexpr = CHECKPOINT
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, tokens, row = window_of(i_c, layout, C)
    at, o_t, o_d = begin * H + i_h, token_order(C), tl.arange(0, WIDE)
    kept += (row * H + i_h) * (BM * BD)
    raw_x = load_raw(x + at * D, o_t, o_d, D, H * D, tokens)
    b_x = parts(raw_x, PRECISION, ACC)
    b_h = parts(load_raw(h + at * D, o_t, o_d, D, H * D, tokens), PRECISION, ACC)
    score = multiply(b_x, transposed(b_h), tl.zeros([C, C], ACC), PRECISION)
    if dalpha is None:
        score = tl.where(o_t[:, None] >= o_t[None, :], score, 0)
    else:
        score = tl.where(o_t[:, None] > o_t[None, :], score, 0)
    score = parts(score, PRECISION, ACC)
    b_dgamma, fits = tl.zeros([C], ACC), 1
    for i_m in tl.static_range(0, BM, MB):
        o_m = i_m + tl.arange(0, MB)
        o_k = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        m_k = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_a, b_b = tl.load(a + o_k, mask=m_k, other=1), tl.load(b + o_k, mask=m_k, other=0)
        A, inverse, _, small = decays(b_a)
        fits &= small.to(tl.int32)
        m_s = (o_m < BM)[:, None] & (o_d < BD)[None, :]
        S = parts(tl.load(kept + o_m[:, None] * BD + o_d[None, :], mask=m_s, other=0), PRECISION, ACC)
        found = multiply(b_x, transposed(S), tl.zeros([C, MB], ACC), PRECISION)
        found = multiply(score, parts(b_b * inverse, PRECISION, ACC), found, PRECISION)
        if dalpha is None:
            found *= A
        else:
            b_dalpha = tl.load(dalpha + o_k, mask=m_k, other=0)
            found = found * (A / b_a) - load_column(gamma + at, o_t, H, tokens, ACC) * b_dalpha
            b_dgamma -= tl.sum(tl.load(k + o_k, mask=m_k, other=0).to(ACC) * b_dalpha, 1)
        tl.store(dx + o_k, found.to(dx.dtype.element_ty), mask=m_k)
    if dalpha is not None:
        tl.store(dgamma + at + o_t * H, b_dgamma.to(dgamma.dtype.element_ty), mask=o_t < tokens)
        o_v = at * D + o_t[:, None] * (H * D) + o_d[None, :]
        tl.store(dv + o_v, (-raw_x).to(dv.dtype.element_ty), mask=(o_t < tokens)[:, None] & (o_d < D)[None, :])
    tl.store(refused + tl.program_id(0), 1 - fits)


@launched
@triton.jit
def lattice_slots_levels_kernel(
    x, moves, kept, dalpha, grads, refused, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, MB: tl.constexpr,
    WIDE: tl.constexpr, CHECKPOINT: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`lattice_slots_kernel` of the windows that it flags as `refused`, by levels: dual/windows_by_levels.py."""
    if tl.load(refused + tl.program_id(0)) == 0:
        return
    k, gamma, h, a, b = moves
    dx, dv, dgamma = grads
    C: tl.constexpr = CHECKPOINT
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    begin, tokens, row = window_of(i_c, layout, C)
    at, o_t, o_d = begin * H + i_h, tl.arange(0, C), tl.arange(0, WIDE)
    kept += (row * H + i_h) * (BM * BD)
    b_gamma = load_column(gamma + at, o_t, H, tokens, ACC)
    b_h = load_rows(h + at * D, o_t, o_d, D, H * D, tokens, ACC)
    b_x = load_rows(x + at * D, o_t, o_d, D, H * D, tokens, ACC)
    score = tl.dot(b_x, tl.trans(b_h), input_precision=PRECISION, out_dtype=ACC)
    own, b_dgamma = tl.sum(b_x * b_h, 1)[:, None], tl.zeros([C], ACC)
    for i_m in tl.range(0, BM, MB, num_stages=1):
        o_m = i_m + tl.arange(0, MB)
        o_k = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        m_k = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_a, b_b = tl.load(a + o_k, mask=m_k, other=1), tl.load(b + o_k, mask=m_k, other=0)
        prefix, suffix, product = tl.full([C, MB], 1, ACC), tl.full([C, MB], 1, ACC), b_a
        found = tl.zeros([C, MB], ACC)
        for level in tl.static_range(LEVELS):
            second, mask, _ = pairs(o_t, 1 << level)
            found += prefix * tl.dot(tl.where(mask, score, 0), b_b * suffix, input_precision=PRECISION, out_dtype=ACC)
            prefix, suffix, product = join(prefix, suffix, product, second, 1 << level)
        m_s = (o_d < BD)[:, None] & (o_m < BM)[None, :]
        S = tl.load(kept + o_m[None, :] * BD + o_d[:, None], mask=m_s, other=0)
        found += prefix * tl.dot(b_x, S, input_precision=PRECISION, out_dtype=ACC)
        if dalpha is None:
            found = b_a * found + b_b * own
        else:
            b_dalpha = tl.load(dalpha + o_k, mask=m_k, other=0)
            found -= b_gamma * b_dalpha
            b_dgamma -= tl.sum(tl.load(k + o_k, mask=m_k, other=0).to(ACC) * b_dalpha, 1)
        tl.store(dx + o_k, found.to(dx.dtype.element_ty), mask=m_k)
    if dalpha is not None:
        tl.store(dgamma + at + o_t * H, b_dgamma.to(dgamma.dtype.element_ty), mask=o_t < tokens)
        o_v = at * D + o_t[:, None] * (H * D) + o_d[None, :]
        tl.store(dv + o_v, (-b_x).to(dv.dtype.element_ty), mask=(o_t < tokens)[:, None] & (o_d < D)[None, :])
