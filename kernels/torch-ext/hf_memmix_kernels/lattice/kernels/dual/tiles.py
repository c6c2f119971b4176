"""Device functions of the dual form's kernels: coefficients of the updates, windows, products of decays by levels.

Within a window of 64 tokens s_t = (a_t ... a_1) s_0 + sum_j (a_t ... a_{j+1}) b_j h_j. The product between two tokens
j < t is split at the end of the segment that holds j: the suffix of this segment times a prefix of the next one.
Segments of 1, 2, 4, ... tokens find every pair once, and nothing is divided by an a, which may be zero.
"""

import triton
import triton.language as tl

from ...sizes import WALKED as _WALKED
from ..sequential.tiles import rsqrt

WALKED = tl.constexpr(_WALKED)


@triton.jit
def write_rule(p, k, gamma, hh, VARIANT: tl.constexpr):
    """c, alpha, beta, n, a and b of s' = a s + b h, s a unit slot: alpha the step, beta = 1 / |s + alpha P(s) h|."""
    c = p - k if VARIANT == "enc" else k
    alpha = -gamma * c
    n = tl.maximum(hh - p * p, 0)
    beta = rsqrt(1 + alpha * alpha * n)
    return c, alpha, beta, n, beta * (1 - alpha * p), beta * alpha


@triton.jit
def span(i_n, layout, C: tl.constexpr):
    """First token, length and first window of a sequence."""
    cu_seqlens, first, T = layout
    if cu_seqlens is None:
        return i_n * T, T, i_n * tl.cdiv(T, C)
    else:
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        return start, (tl.load(cu_seqlens + i_n + 1) - start).to(tl.int32), tl.load(first + i_n).to(tl.int64)


@triton.jit
def goes_by_token(flags, length, H: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr):
    """Whether the walk back of a (sequence, head) goes token by token: a window is flagged, or every chunk
    is partial.
    """
    found, windows, o_w = tl.zeros([32], tl.int32), tl.cdiv(length, C), tl.arange(0, 32)
    for i_w in range(0, windows, 32):
        found |= tl.load(flags + (i_w + o_w) * H, mask=i_w + o_w < windows, other=0)
    return (tl.max(found, 0) > 0) | (length < CHUNK)


@triton.jit
def locate(i_c, layout, C: tl.constexpr):
    """First token of window i_c and the number of its tokens, 0 for a window beyond the last."""
    cu_seqlens, first, sequence, T, N = layout
    if cu_seqlens is None:
        windows = tl.cdiv(T, C)
        i_w = i_c % windows
        return (i_c // windows).to(tl.int64) * T + i_w * C, tl.minimum(T - i_w * C, C)
    else:
        i_n = tl.load(sequence + i_c)
        last = tl.minimum(i_n, N - 1)
        begin = tl.load(cu_seqlens + last).to(tl.int64) + (i_c - tl.load(first + last)).to(tl.int64) * C
        left = (tl.load(cu_seqlens + last + 1) - begin).to(tl.int32)
        return begin, tl.where(i_n < N, tl.minimum(left, C), 0)


@triton.jit
def kept_slots(M: tl.constexpr):
    """Slots per token in what the walks store, padded to whole programs: [windows, H, C, slots]."""
    return (M + WALKED - 1) // WALKED * WALKED


@triton.jit
def load_rows(p, o_t, o_w, width: tl.constexpr, stride, tokens, ACC: tl.constexpr):
    """Columns `o_w` of rows `o_t` of [tokens, width], `stride` apart, as [C, columns] with zeros around."""
    mask = (o_t < tokens)[:, None] & (o_w < width)[None, :]
    return tl.load(p + o_t[:, None] * stride + o_w[None, :], mask=mask, other=0).to(ACC)


@triton.jit
def load_column(p, o_t, stride, tokens, ACC: tl.constexpr):
    """One number per row, as [C, 1]."""
    return tl.load(p + o_t * stride, mask=o_t < tokens, other=0).to(ACC)[:, None]


@triton.jit
def swap(x, SIZE: tl.constexpr):
    """Exchange neighbouring segments of SIZE rows of [C, M]."""
    C: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    bits = x.to(tl.int64 if x.dtype == tl.float64 else tl.int32, bitcast=True)
    bits = tl.reshape(bits, [C // (2 * SIZE), 2, SIZE, M])
    bits = bits ^ tl.xor_sum(bits, 1, keep_dims=True)
    return tl.reshape(bits, [C, M]).to(x.dtype, bitcast=True)


@triton.jit
def pairs(o_t, SIZE: tl.constexpr):
    """Whether a row lies in the second of two segments [C, 1], and the pairs (t, j) of a second and its first one."""
    second = (o_t // SIZE) % 2 == 1
    same = (o_t // (2 * SIZE))[:, None] == (o_t // (2 * SIZE))[None, :]
    return second[:, None], same & second[:, None] & ~second[None, :], same & ~second[:, None] & second[None, :]


@triton.jit
def join(prefix, suffix, product, second, SIZE: tl.constexpr):
    """Merge segments of SIZE tokens into twice as long ones: products before and after a token, and of its segment."""
    other = swap(product, SIZE)
    return tl.where(second, prefix * other, prefix), tl.where(second, suffix, suffix * other), product * other
