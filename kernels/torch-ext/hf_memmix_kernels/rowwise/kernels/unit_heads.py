"""Rotary embedding, alone or before a unit norm per head. A program holds R rows of D channels; a row is one head of
one token.

A row is held in three tiles: the first and the second channels of the pairs, [R, BH] each, and the channels that are
not rotated, [R, BR].
"""

import triton
import triton.language as tl

from ..._recorder import launched


@triton.jit
def _load_rows(
    p, i_r, m_r, D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, ACC: tl.constexpr
):
    """The three tiles of R rows."""
    o_h, o_s = tl.arange(0, BH), 2 * HALF + tl.arange(0, BR)
    p_r = p + i_r[:, None] * D
    b_rest = tl.load(p_r + o_s[None, :], mask=m_r[:, None] & (o_s < D)[None, :], other=0).to(ACC)
    b_first, b_second = b_rest, b_rest
    if HALF > 0:
        m_h = m_r[:, None] & (o_h < HALF)[None, :]
        b_first = tl.load(p_r + o_h[None, :], mask=m_h, other=0).to(ACC)
        b_second = tl.load(p_r + HALF + o_h[None, :], mask=m_h, other=0).to(ACC)
    return b_first, b_second, b_rest


@triton.jit
def _store_rows(
    p, b_first, b_second, b_rest, i_r, m_r, D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr
):
    o_h, o_s = tl.arange(0, BH), 2 * HALF + tl.arange(0, BR)
    p_r = p + i_r[:, None] * D
    tl.store(p_r + o_s[None, :], b_rest.to(p.dtype.element_ty), mask=m_r[:, None] & (o_s < D)[None, :])
    if HALF > 0:
        m_h = m_r[:, None] & (o_h < HALF)[None, :]
        tl.store(p_r + o_h[None, :], b_first.to(p.dtype.element_ty), mask=m_h)
        tl.store(p_r + HALF + o_h[None, :], b_second.to(p.dtype.element_ty), mask=m_h)


@triton.jit
def _angles(cos, sin, i_r, m_r, heads, length, s_b, s_t, s_r, HALF: tl.constexpr, BH: tl.constexpr, ACC: tl.constexpr):
    """cos and sin of the rows' tokens [R, BH]."""
    o_h = tl.arange(0, BH)
    i_token = i_r // heads
    o = (i_token // length * s_b + i_token % length * s_t)[:, None] + o_h[None, :] * s_r
    m = m_r[:, None] & (o_h < HALF)[None, :]
    return tl.load(cos + o, mask=m, other=0).to(ACC), tl.load(sin + o, mask=m, other=0).to(ACC)


@triton.jit
def rotate(b_first, b_second, b_cos, b_sin):
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@launched
@triton.jit(do_not_specialize=["rows", "length", "s_b"])
def rotate_kernel(
    x, y, cos, sin, rows, heads, length, s_b, s_t, s_r,
    BACK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, R: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """y = R x, or R^T x: the gradient."""
    i_r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_r = i_r < rows
    b_first, b_second, b_rest = _load_rows(x, i_r, m_r, D, HALF, BH, BR, ACC)
    b_cos, b_sin = _angles(cos, sin, i_r, m_r, heads, length, s_b, s_t, s_r, HALF, BH, ACC)
    b_first, b_second = rotate(b_first, b_second, b_cos, -b_sin if BACK else b_sin)
    _store_rows(y, b_first, b_second, b_rest, i_r, m_r, D, HALF, BH, BR)


# the number of tokens changes from batch to batch of a server: it must not compile another kernel
@launched
@triton.jit(do_not_specialize=["rows", "length", "s_b"])
def unit_heads_fwd_kernel(
    x, y, cos, sin, rows, heads, length, s_b, s_t, s_r, eps,
    D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y = R x / (|R x| + eps)."""
    i_r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_r = i_r < rows
    b_first, b_second, b_rest = _load_rows(x, i_r, m_r, D, HALF, BH, BR, ACC)
    b_square = tl.sum(b_rest * b_rest, 1)
    if HALF > 0:
        b_cos, b_sin = _angles(cos, sin, i_r, m_r, heads, length, s_b, s_t, s_r, HALF, BH, ACC)
        b_first, b_second = rotate(b_first, b_second, b_cos, b_sin)
        b_square += tl.sum(b_first * b_first + b_second * b_second, 1)
    b_scale = (1 / (tl.sqrt(b_square) + eps))[:, None]
    _store_rows(y, b_first * b_scale, b_second * b_scale, b_rest * b_scale, i_r, m_r, D, HALF, BH, BR)


@launched
@triton.jit
def unit_heads_bwd_kernel(
    x, dy, dx, cos, sin, rows, heads, length, s_b, s_t, s_r, eps,
    D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """With r = R x, n = |r| and s = n + eps: dr = dy / s - r (r . dy) / (n s^2), and dx = R^T dr."""
    i_r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_r = i_r < rows
    b_first, b_second, b_rest = _load_rows(x, i_r, m_r, D, HALF, BH, BR, ACC)
    g_first, g_second, g_rest = _load_rows(dy, i_r, m_r, D, HALF, BH, BR, ACC)
    b_square, b_dot = tl.sum(b_rest * b_rest, 1), tl.sum(b_rest * g_rest, 1)
    b_cos, b_sin = b_first, b_first
    if HALF > 0:
        b_cos, b_sin = _angles(cos, sin, i_r, m_r, heads, length, s_b, s_t, s_r, HALF, BH, ACC)
        b_first, b_second = rotate(b_first, b_second, b_cos, b_sin)
        b_square += tl.sum(b_first * b_first + b_second * b_second, 1)
        b_dot += tl.sum(b_first * g_first + b_second * g_second, 1)
    b_norm = tl.sqrt(b_square)
    b_scale = 1 / (b_norm + eps)
    # for a row of zeros n = 0 and y = x / eps, so the second term is left out
    b_along = tl.where(b_norm > 0, b_dot * b_scale * b_scale / tl.where(b_norm > 0, b_norm, 1), 0)[:, None]
    b_scale = b_scale[:, None]
    g_first = g_first * b_scale - b_first * b_along
    g_second = g_second * b_scale - b_second * b_along
    g_rest = g_rest * b_scale - b_rest * b_along
    if HALF > 0:
        g_first, g_second = g_first * b_cos + g_second * b_sin, g_second * b_cos - g_first * b_sin
    _store_rows(dx, g_first, g_second, g_rest, i_r, m_r, D, HALF, BH, BR)
