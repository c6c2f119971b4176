"""SKA's decode step in one launch: read-out, statistics updated in place, a new operator every chunk_size tokens.

One program owns one (sequence, key head). It reads `position` on the device to decide whether its chunk is full. The
rows of a batch may therefore have different positions, and a CUDA graph holds both cases.
"""

import triton
import triton.language as tl

from ..._page_offset import same_for_all, state_offset
from ..._recorder import launched
from .tiles import (
    SMALLEST,
    STEPS,
    dot,
    estimate,
    load_gram,
    load_tile,
    spd_inverse,
    store_tile,
)


@triton.jit
def _add(S, p_S, left, right, o_i, rows, o_j, columns, WIDTH: tl.constexpr):
    """S + left right^T, stored."""
    b_S = load_tile(p_S, o_i, rows, WIDTH, o_j, columns) + left[:, None] * right[None, :]
    store_tile(p_S, b_S, o_i, rows, WIDTH, o_j, columns)
    return b_S


@triton.jit
def _times(A, x):
    """A x [BR] for x [BR]."""
    return tl.sum(A * x[None, :], 1)


@triton.jit
def _transposed_times(A, x):
    """A^T x [BR] for x [BR]."""
    return tl.sum(A * x[:, None], 0)


@triton.jit
def _scale_per_token(G, MT, P, ridge, sigma_floor, o_r, R: tl.constexpr, POWER: tl.constexpr):
    """sigma^-K by power iteration with vectors: see `spectral_norm`."""
    steps = (o_r + 1).to(tl.float32) * 0.6180339887498949
    u = tl.where(o_r < R, 0.5 + steps - tl.floor(steps), 0.0)
    for _ in range(STEPS):
        new = _times(P, _transposed_times(MT, _times(P, _times(MT, u))))
        size = tl.max(tl.abs(new), 0)
        u = tl.where(size > 0, new / tl.where(size > 0, size, 1.0), u)
    a = _times(MT, u)
    stretched = tl.sum(a * _times(P, a), 0)
    length = tl.sum(u * (_times(G, u) + ridge * u), 0)
    sigma = tl.maximum(tl.sqrt(tl.maximum(stretched / length, 0.0)), sigma_floor)
    scale = 1.0
    for _ in tl.static_range(POWER):
        scale /= sigma
    return scale


@launched
@triton.jit
def ska_step_kernel(
    q, k, v, gain, S, W, previous, nu, position,
    pages, S_stride, W_stride, previous_stride, nu_stride, position_stride, o, eps, sigma_floor,
    H: tl.constexpr, HK: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PER_TOKEN: tl.constexpr,
    POWER: tl.constexpr, SPECTRAL: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token of one (sequence, key head): all of its state advanced in place, o of its query heads."""
    i_s = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = H // HK
    WIDTH: tl.constexpr = 2 * R + V
    o_r, o_v = tl.arange(0, BR), tl.arange(0, BV)
    m_r = o_r < R
    first_head = i_s % HK * GROUPS
    p_S = S + state_offset(i_s, HK, R * WIDTH, pages, S_stride)
    p_previous = previous + state_offset(i_s, HK, R, pages, previous_stride)
    p_nu = nu + state_offset(i_s, HK, 1, pages, nu_stride)
    p_position = position + state_offset(i_s, HK, 1, pages, position_stride)
    b_k = tl.load(k + i_s * R + o_r, mask=m_r, other=0.0).to(tl.float32)
    b_nu = same_for_all(p_nu, pages)
    b_position = same_for_all(p_position, pages) + 1
    b_previous = tl.load(p_previous + o_r, mask=m_r, other=0.0)

    if PER_TOKEN:
        p_W = W + state_offset(i_s, HK, R * R, pages, W_stride)
        b_P = load_tile(p_W, o_r, R, R, o_r, R)
        b_MT = load_tile(p_S + R, o_r, R, WIDTH, o_r, R)
        scale = 1.0
        if SPECTRAL and POWER > 0:
            b_G = load_tile(p_S, o_r, R, WIDTH, o_r, R)
            ridge = eps * tl.maximum(b_nu, SMALLEST) * tl.maximum(b_nu, SMALLEST)
            scale = _scale_per_token(b_G, b_MT, b_P, ridge, sigma_floor, o_r, R, POWER)
    else:
        p_W = W + state_offset(i_s, HK, R * V, pages, W_stride)
    for g in range(GROUPS):
        i_q = i_s * GROUPS + g
        b_gain = tl.load(gain + first_head + g)
        b_x = tl.load(q + i_q * R + o_r, mask=m_r, other=0.0).to(tl.float32)
        if PER_TOKEN:
            b_gain *= scale
            b_x = _times(b_P, b_x)
            for _ in tl.static_range(POWER):
                b_x = _times(b_P, _transposed_times(b_MT, b_x))
        for j in range(0, V, BV):
            if PER_TOKEN:
                b_W = load_tile(p_S + 2 * R + j, o_r, R, WIDTH, o_v, V - j)
            else:
                b_W = load_tile(p_W + j, o_r, R, V, o_v, V - j)
            b_o = b_gain * _transposed_times(b_W, b_x)
            tl.store(o + i_q * V + j + o_v, b_o.to(o.dtype.element_ty), mask=o_v < V - j)

    # every tile of the statistics is read before it is written, and read again only below the barrier
    tl.debug_barrier()
    _add(S, p_S, b_k, b_k, o_r, R, o_r, R, WIDTH)
    _add(S, p_S + R, b_previous, b_k, o_r, R, o_r, R, WIDTH)
    for j in range(0, V, BV):
        b_v = tl.load(v + i_s * V + j + o_v, mask=o_v < V - j, other=0.0).to(tl.float32)
        _add(S, p_S + 2 * R + j, b_k, b_v, o_r, R, o_v, V - j, WIDTH)
    norm = tl.sqrt(tl.sum(b_k * b_k, 0))
    due = b_position >= C
    if PER_TOKEN:
        due = due | (norm > b_nu)
    b_nu = tl.maximum(b_nu, norm)
    tl.store(p_nu, b_nu)
    tl.store(p_previous + o_r, b_k, mask=m_r)
    tl.debug_barrier()
    tl.store(p_position, tl.where(due, 0.0, b_position))
    if PER_TOKEN:
        if due:
            b_G, ridge = load_gram(p_S, b_nu, eps, o_r, R, WIDTH)
            b_P = spd_inverse(b_G, ridge, R, BR)
        else:
            b_w = _times(b_P, b_k)
            b_P -= b_w[:, None] * (b_w / (1 + tl.sum(b_w * b_k, 0)))[None, :]
        store_tile(p_W, b_P, o_r, R, R, o_r, R)
    elif due:
        _, _, _, b_QT = estimate(p_S, b_nu, eps, sigma_floor, o_r, R, V, BR, POWER, SPECTRAL)
        for j in range(0, V, BV):
            b_W = dot(b_QT, load_tile(p_S + 2 * R + j, o_r, R, WIDTH, o_v, V - j))
            store_tile(p_W + j, b_W, o_r, R, V, o_v, V - j)
