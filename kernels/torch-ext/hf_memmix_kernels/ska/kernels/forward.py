"""SKA's forward kernels: the scan over the statistics of chunks, then operator and read-out of every chunk."""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import (
    bounds,
    dot,
    estimate,
    load_columns,
    load_rows,
    load_tile,
    locate_sequence,
    right_dot,
    sequence_of,
    store_tile,
)


@triton.jit
def _sum_products(
    left, right, acc, nu, S, nu_out, left_stride, right_stride, left_width, right_width, state_stride, nu_stride,
    offset, length, last,
    SHIFT: tl.constexpr, NORMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """acc += sum of left_{t - SHIFT} right_t^T over tokens, stored to S at every chunk's end; `nu` the largest norm.

    `left` and `right` point to the sequence's first token, `S` and `nu_out` to its first chunk.
    """
    TILES: tl.constexpr = (C + BC - 1) // BC
    o_t, o_r = tl.arange(0, BC), tl.arange(0, BR)
    for i in range((last + 1) * TILES):
        s = i // TILES
        start, rows = bounds(s, offset, length, C)
        o_c = (i % TILES) * BC + o_t
        m_c = o_c < rows
        shifted = left + (start.to(tl.int64) - SHIFT) * left_stride
        b_left = load_columns(shifted, o_c, m_c & (start + o_c >= SHIFT), left_stride, o_r, left_width)
        b_right = load_rows(right + start.to(tl.int64) * right_stride, o_c, m_c, right_stride, o_r, right_width)
        acc += dot(b_left, b_right)
        if NORMS:
            values = b_left.to(tl.float32)
            nu = tl.maximum(nu, tl.sqrt(tl.max(tl.sum(values * values, 0), 0)))
        done = ((i % TILES) == TILES - 1) & (s < last)
        if done:
            store_tile(S + (s + 1).to(tl.int64) * state_stride, acc, o_r, ROWS, WIDTH, o_r, right_width)
            if NORMS:
                tl.store(nu_out + (s + 1) * nu_stride, nu)
    return acc, nu


@launched
@triton.jit(do_not_specialize=["T", "per_sequence"])
def ska_fwd_kernel_scan(
    inputs, initial, statistics, final, layout, T, per_sequence,
    HK: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """[G | M^T | C^T] before every chunk but the first, BR columns per program; the final state, not its operator."""
    k, v = inputs
    S0, previous, nu0, position = initial
    S, nu = statistics
    S_final, previous_final, nu_final, position_final = final
    cu, lengths, first = layout
    tiles: tl.constexpr = 2 + (V + BR - 1) // BR
    i_tile, i_nh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    i_n, i_h = i_nh // HK, i_nh % HK
    token, length, offset, chunk, last = locate_sequence(
        i_n, i_h, position, cu, lengths, first, T, per_sequence, HK, C
    )
    WIDTH: tl.constexpr = 2 * R + V
    o_r = tl.arange(0, BR)
    p_k = k + token * HK * R + i_h * R
    p_v = v + token * HK * V + i_h * V
    p_S = S + (chunk * HK + i_h) * R * WIDTH
    p_nu = nu + chunk * HK + i_h
    at = i_nh.to(tl.int64) * R * WIDTH
    b_nu = tl.load(nu0 + i_nh)
    if i_tile == 0:
        tl.store(p_nu, b_nu)
        acc = load_tile(S0 + at, o_r, R, WIDTH, o_r, R)
        acc, b_nu = _sum_products(
            p_k, p_k, acc, b_nu, p_S, p_nu, HK * R, HK * R, R, R, HK * R * WIDTH, HK, offset, length, last,
            0, True, WIDTH, R, C, BR, BC,
        )  # fmt: skip
        store_tile(S_final + at, acc, o_r, R, WIDTH, o_r, R)
        tl.store(nu_final + i_nh, b_nu)
        tl.store(position_final + i_nh, ((offset + length) % C).to(tl.float32))
    elif i_tile == 1:
        acc = load_tile(S0 + at + R, o_r, R, WIDTH, o_r, R)
        b_previous = tl.load(previous + i_nh * R + o_r, mask=o_r < R, other=0.0)
        # the statistics before chunk 0 are never read, so the first pair may be added before the loop
        b_first = tl.load(p_k + o_r, mask=(o_r < R) & (length > 0), other=0.0).to(tl.float32)
        acc += b_previous[:, None] * b_first[None, :]
        acc, _ = _sum_products(
            p_k, p_k, acc, b_nu, p_S + R, p_nu, HK * R, HK * R, R, R, HK * R * WIDTH, HK, offset, length, last,
            1, False, WIDTH, R, C, BR, BC,
        )  # fmt: skip
        store_tile(S_final + at + R, acc, o_r, R, WIDTH, o_r, R)
        end = tl.maximum(length - 1, 0).to(tl.int64) * HK * R
        b_end = tl.load(p_k + end + o_r, mask=(o_r < R) & (length > 0), other=0.0).to(tl.float32)
        tl.store(previous_final + i_nh * R + o_r, tl.where(length > 0, b_end, b_previous), mask=o_r < R)
    else:
        j = (i_tile - 2) * BR
        acc = load_tile(S0 + at + 2 * R + j, o_r, R, WIDTH, o_r, V - j)
        acc, _ = _sum_products(
            p_k, p_v + j, acc, b_nu, p_S + 2 * R + j, p_nu, HK * R, HK * V, R, V - j, HK * R * WIDTH, HK,
            offset, length, last, 0, False, WIDTH, R, C, BR, BC,
        )  # fmt: skip
        store_tile(S_final + at + 2 * R + j, acc, o_r, R, WIDTH, o_r, V - j)


@launched
@triton.jit(do_not_specialize=["T", "per_sequence", "N"])
def ska_fwd_kernel_read(
    inputs, states, o, W_final, layout, T, per_sequence, N, eps, sigma_floor,
    H: tl.constexpr, HK: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    POWER: tl.constexpr, SPECTRAL: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """W^T = Q^T C^T of one chunk and key head, and o = gain q W^T of its tokens."""
    q, gain = inputs
    S, nu, W0 = states
    position, cu, lengths, first, sequence = layout
    i_h, i_chunk = tl.program_id(0) % HK, tl.program_id(0) // HK
    i_n = sequence_of(i_chunk, sequence, per_sequence, N)
    token, length, offset, chunk, last = locate_sequence(
        i_n, i_h, position, cu, lengths, first, T, per_sequence, HK, C
    )
    s = (i_chunk - chunk).to(tl.int32)
    if s > last:
        return
    WIDTH: tl.constexpr = 2 * R + V
    GROUPS: tl.constexpr = H // HK
    start, rows = bounds(s, offset, length, C)
    o_t, o_r, o_v = tl.arange(0, BC), tl.arange(0, BR), tl.arange(0, BV)
    state = i_chunk.to(tl.int64) * HK + i_h
    at_w = (i_n.to(tl.int64) * HK + i_h) * R * V
    p_S = S + state * R * WIDTH
    b_QT = tl.zeros([BR, BR], tl.float32)
    if s > 0:
        _, _, _, b_QT = estimate(p_S, tl.load(nu + state), eps, sigma_floor, o_r, R, V, BR, POWER, SPECTRAL)
    row = (token + start) * H + i_h * GROUPS
    for j in range(0, V, BV):
        if s > 0:
            b_WT = dot(b_QT, load_tile(p_S + 2 * R + j, o_r, R, WIDTH, o_v, V - j))
        else:
            b_WT = load_tile(W0 + at_w + j, o_r, R, V, o_v, V - j)
        if s == last:
            store_tile(W_final + at_w + j, b_WT, o_r, R, V, o_v, V - j)
        for g in range(GROUPS):
            b_gain = tl.load(gain + i_h * GROUPS + g)
            for i in range(0, C, BC):
                m_t = i + o_t < rows
                b_q = load_rows(q + (row + g) * R, i + o_t, m_t, H * R, o_r, R)
                b_o = b_gain * right_dot(b_q, b_WT)
                p_o = o + (row + g) * V + j + (i + o_t)[:, None] * H * V + o_v[None, :]
                tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_t[:, None] & (o_v < V - j)[None, :])
