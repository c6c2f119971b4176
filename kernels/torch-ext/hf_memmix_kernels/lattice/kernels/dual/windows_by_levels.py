"""Kernels over windows that windows.py refused, because products of decays there are zero, very small or very large.

The results are the same as those of windows.py, and exact for any a. The product between two tokens j < t is split at
the end of the segment that holds j: the suffix of this segment times a prefix of the next one. Segments of 1, 2, 4,
... tokens find every pair j < t once. Each level is one matrix product, and nothing is divided.
"""

import triton
import triton.language as tl

from ...._recorder import launched
from ..sequential.tiles import known
from .tiles import join, kept_slots, load_column, load_rows, locate, pairs, write_rule


@triton.jit
def any_refused(refused, first, windows, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr):
    """Whether any of the program's next AHEAD windows, which are PROGRAMS apart, is flagged."""
    i_w = first + PROGRAMS * tl.arange(0, AHEAD)
    return tl.max(tl.load(refused + i_w, mask=i_w < windows, other=0), 0) != 0


@triton.jit
def read_window(
    i_w, inputs, walked, o, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """o of one window of one head, from MB slots at a time."""
    q, k, v, hh, gamma = inputs
    states, p = walked
    i_c, i_h = i_w // H, i_w % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, tl.arange(0, C), tl.arange(0, BD)
    q, k, i_s = q + at * M, k + at * M, i_c.to(tl.int64) * H + i_h
    states, p = states + i_s * (M * D), p + i_s * (C * kept_slots(M))
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_o, score, own = tl.zeros([C, BD], ACC), tl.zeros([C, C], ACC), tl.zeros([C], ACC)
    for i_m in tl.range(0, M, MB, num_stages=1):
        o_m = i_m + tl.arange(0, MB)
        b_p = load_rows(p, o_t, o_m, M, kept_slots(M), tokens, ACC)
        b_k = load_rows(k, o_t, o_m, M, H * M, tokens, ACC)
        b_q = load_rows(q, o_t, o_m, M, H * M, tokens, ACC)
        _, _, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        own += tl.sum(b_q * b, 1)
        read = b_q * a
        prefix, suffix, product = tl.full([C, MB], 1, ACC), tl.full([C, MB], 1, ACC), a
        for level in tl.static_range(LEVELS):
            second, mask, _ = pairs(o_t, 1 << level)
            both = tl.where(second, read, b) * tl.where(second, prefix, suffix)
            found = tl.dot(both, tl.trans(both), input_precision=PRECISION, out_dtype=ACC)
            score += tl.where(mask, found, 0)
            prefix, suffix, product = join(prefix, suffix, product, second, 1 << level)
        S = load_rows(states, o_m, o_d, D, D, M, ACC)
        b_o = tl.dot(read * prefix, S, b_o, input_precision=PRECISION, out_dtype=ACC)
    b_h = known(load_rows(v + at * D, o_t, o_d, D, H * D, tokens, ACC), VARIANT)
    b_o = tl.dot(score, b_h, b_o, input_precision=PRECISION, out_dtype=ACC) + own[:, None] * b_h
    mask = (o_t < tokens)[:, None] & (o_d < D)[None, :]
    tl.store(o + at * D + o_t[:, None] * (H * D) + o_d[None, :], b_o.to(o.dtype.element_ty), mask=mask)


@launched
@triton.jit
def lattice_read_levels_kernel(
    refused, windows, inputs, walked, o, layout,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`read_window` of the windows that `refused` flags."""
    for i in range(0, tl.cdiv(windows, PROGRAMS * AHEAD)):
        first_w = tl.program_id(0) + i * (PROGRAMS * AHEAD)
        if any_refused(refused, first_w, windows, PROGRAMS, AHEAD):
            for j in range(0, AHEAD):
                i_w = first_w + j * PROGRAMS
                if tl.load(refused + i_w, mask=i_w < windows, other=0) != 0:
                    read_window(i_w, inputs, walked, o, layout, H, M, D, MB, BD, VARIANT, C, LEVELS, PRECISION, ACC)


@triton.jit
def read_adjoint_window(
    i_w, do, inputs, walked, found, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq of one window of one head, also as `reads`."""
    k, v, hh, gamma = inputs
    states, p = walked
    dq, reads = found
    i_c, i_h = i_w // H, i_w % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, tl.arange(0, C), tl.arange(0, BD)
    states += (i_c.to(tl.int64) * H + i_h) * (M * D)
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_h = known(load_rows(v + at * D, o_t, o_d, D, H * D, tokens, ACC), VARIANT)
    b_do = load_rows(do + at * D, o_t, o_d, D, H * D, tokens, ACC)
    own = tl.sum(b_do * b_h, 1)[:, None]
    score = tl.dot(b_do, tl.trans(b_h), input_precision=PRECISION, out_dtype=ACC)
    for i_m in tl.range(0, M, MB, num_stages=1):
        o_m = i_m + tl.arange(0, MB)
        o_q = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        o_p = ((i_c.to(tl.int64) * H + i_h) * C + o_t[:, None]) * kept_slots(M) + o_m[None, :]
        mask_q = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        b_p = tl.load(p + o_p, mask=mask_q, other=0)
        b_k = tl.load(k + o_q, mask=mask_q, other=0).to(ACC)
        _, _, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        prefix, suffix, product = tl.full([C, MB], 1, ACC), tl.full([C, MB], 1, ACC), a
        b_dq = tl.zeros([C, MB], ACC)
        for level in tl.static_range(LEVELS):
            second, mask, _ = pairs(o_t, 1 << level)
            b_dq += prefix * tl.dot(tl.where(mask, score, 0), b * suffix, input_precision=PRECISION, out_dtype=ACC)
            prefix, suffix, product = join(prefix, suffix, product, second, 1 << level)
        S = load_rows(states, o_m, o_d, D, D, M, ACC)
        b_dq += prefix * tl.dot(b_do, tl.trans(S), input_precision=PRECISION, out_dtype=ACC)
        b_dq = a * b_dq + b * own
        tl.store(dq + o_q, b_dq.to(dq.dtype.element_ty), mask=mask_q)
        tl.store(reads + o_p, b_dq, mask=(o_m < M)[None, :])


@launched
@triton.jit
def lattice_read_adjoint_levels_kernel(
    refused, windows, do, inputs, walked, found, layout,
    PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`read_adjoint_window` of the windows that `refused` flags."""
    for i in range(0, tl.cdiv(windows, PROGRAMS * AHEAD)):
        first_w = tl.program_id(0) + i * (PROGRAMS * AHEAD)
        if any_refused(refused, first_w, windows, PROGRAMS, AHEAD):
            for j in range(0, AHEAD):
                i_w = first_w + j * PROGRAMS
                if tl.load(refused + i_w, mask=i_w < windows, other=0) != 0:
                    read_adjoint_window(
                        i_w, do, inputs, walked, found, layout, H, M, D, MB, BD, VARIANT, C, LEVELS, PRECISION, ACC
                    )


@triton.jit
def write_adjoint_window(
    i_w, do, inputs, walked, grads, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk, dv and dgamma of one window of one head."""
    q, k, v, hh, gamma = inputs
    states, p, dalpha, z, ends = walked
    dk, dv, dgamma = grads
    i_c, i_h = i_w // H, i_w % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, tl.arange(0, C), tl.arange(0, BD)
    o_w = (i_c.to(tl.int64) * H + i_h) * (M * D)
    b_hh, b_gamma = load_column(hh + at, o_t, H, tokens, ACC), load_column(gamma + at, o_t, H, tokens, ACC)
    b_dgamma, own_h, own_do = tl.zeros([C], ACC), tl.zeros([C], ACC), tl.zeros([C], ACC)
    b_dh, score_h, score_do = tl.zeros([C, BD], ACC), tl.zeros([C, C], ACC), tl.zeros([C, C], ACC)
    for i_m in tl.range(0, M, MB, num_stages=1):
        o_m = i_m + tl.arange(0, MB)
        o_k = at * M + o_t[:, None] * (H * M) + o_m[None, :]
        mask_k = (o_t < tokens)[:, None] & (o_m < M)[None, :]
        o_p = ((i_c.to(tl.int64) * H + i_h) * C + o_t[:, None]) * kept_slots(M) + o_m[None, :]
        b_q, b_k = tl.load(q + o_k, mask=mask_k, other=0).to(ACC), tl.load(k + o_k, mask=mask_k, other=0).to(ACC)
        b_dalpha, b_z = tl.load(dalpha + o_p, mask=mask_k, other=0), tl.load(z + o_p, mask=mask_k, other=0)
        b_p = tl.load(p + o_p, mask=mask_k, other=0)
        c, alpha, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        dc = -b_gamma * b_dalpha
        tl.store(dk + o_k, (-dc if VARIANT == "enc" else dc).to(dk.dtype.element_ty), mask=mask_k)
        g = alpha * alpha * b_dalpha - a * b * b_z
        if VARIANT == "enc":
            g += dc
        b_dgamma -= tl.sum(c * b_dalpha, 1)
        own_h -= tl.sum(b * b * b_z, 1)
        own_do += tl.sum(b_q * b, 1)
        read = b_q * a
        prefix, suffix, product = tl.full([C, MB], 1, ACC), tl.full([C, MB], 1, ACC), a
        for level in tl.static_range(LEVELS):
            second, mask, transposed = pairs(o_t, 1 << level)
            scale = tl.where(second, prefix, suffix)
            # in each pair one row writes (b) and one row reads (g or read); at one level a row does only one of both
            both = tl.where(second, g, b) * scale
            found = tl.dot(both, tl.trans(both), input_precision=PRECISION, out_dtype=ACC)
            score_h += tl.where(mask | transposed, found, 0)
            both = tl.where(second, read, b) * scale
            found = tl.dot(both, tl.trans(both), input_precision=PRECISION, out_dtype=ACC)
            score_do += tl.where(transposed, found, 0)
            prefix, suffix, product = join(prefix, suffix, product, second, 1 << level)
        S, E = load_rows(states + o_w, o_m, o_d, D, D, M, ACC), load_rows(ends + o_w, o_m, o_d, D, D, M, ACC)
        b_dh = tl.dot(g * prefix, S, b_dh, input_precision=PRECISION, out_dtype=ACC)
        b_dh = tl.dot(b * suffix, E, b_dh, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dgamma + at + o_t * H, b_dgamma.to(dgamma.dtype.element_ty), mask=o_t < tokens)
    b_h = known(load_rows(v + at * D, o_t, o_d, D, H * D, tokens, ACC), VARIANT)
    b_dh = tl.dot(score_h, b_h, b_dh, input_precision=PRECISION, out_dtype=ACC) + own_h[:, None] * b_h
    b_do = load_rows(do + at * D, o_t, o_d, D, H * D, tokens, ACC)
    b_dh = tl.dot(score_do, b_do, b_dh, input_precision=PRECISION, out_dtype=ACC) + own_do[:, None] * b_do
    o_v = at * D + o_t[:, None] * (H * D) + o_d[None, :]
    mask_v = (o_t < tokens)[:, None] & (o_d < D)[None, :]
    tl.store(dv + o_v, known(b_dh, VARIANT).to(dv.dtype.element_ty), mask=mask_v)


@launched
@triton.jit
def lattice_write_adjoint_levels_kernel(
    refused, windows, do, inputs, walked, grads, layout, PROGRAMS: tl.constexpr, AHEAD: tl.constexpr,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr,
    VARIANT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`write_adjoint_window` of the windows that `refused` flags."""
    for i in range(0, tl.cdiv(windows, PROGRAMS * AHEAD)):
        first_w = tl.program_id(0) + i * (PROGRAMS * AHEAD)
        if any_refused(refused, first_w, windows, PROGRAMS, AHEAD):
            for j in range(0, AHEAD):
                i_w = first_w + j * PROGRAMS
                if tl.load(refused + i_w, mask=i_w < windows, other=0) != 0:
                    write_adjoint_window(
                        i_w, do, inputs, walked, grads, layout, H, M, D, MB, BD, VARIANT, C, LEVELS, PRECISION, ACC
                    )
