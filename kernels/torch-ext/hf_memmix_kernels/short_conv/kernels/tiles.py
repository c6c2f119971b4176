"""Device functions that the kernels of short_conv share: where a tile lies, and its weights and first inputs.

A tile never crosses the boundary of a sequence.
"""

import triton
import triton.language as tl

# rows loaded ahead of use: enough loads in flight to cover the memory latency
PREFETCH = tl.constexpr(4)


@triton.jit
def locate_tile(
    i_t, cu_seqlens, first, sequence, lengths, T, NT, BT: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr
):
    """The tile's sequence, that sequence's first row and length, and the tile's first position in it."""
    if PACKED:  # noqa: SIM102
        i_n = tl.load(sequence + i_t)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        start = (i_t - tl.load(first + i_n)) * BT
    else:
        i_n = i_t // NT
        bos = i_n.to(tl.int64) * T
        length = T
        if RAGGED:
            length = tl.load(lengths + i_n).to(tl.int32)
        start = (i_t % NT) * BT
    return i_n, bos, length, start


@triton.jit
def cut(b_x, LIMIT: tl.constexpr):
    """b_x clamped to [-LIMIT, LIMIT]; NaN stays NaN. None means no limit."""
    if LIMIT is None:
        return b_x
    else:
        return tl.where(b_x > LIMIT, LIMIT, tl.where(b_x < -LIMIT, -LIMIT, b_x))


@triton.jit
def load_window(
    x, stride, weight, state, o_c, m_c, o_n, bos, start, length, C,
    K: tl.constexpr, ACC: tl.constexpr, HAS_STATE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The taps, and the last K inputs before the tile, oldest first; the loop replaces the oldest at its
    first token.
    """
    w, xs = (), ()
    for j in tl.static_range(K):
        w = w + (tl.load(weight + o_c * K + j, mask=m_c, other=0).to(ACC),)
        o_s = start - K + j
        b_x = tl.load(x + (bos + o_s) * stride + o_c, mask=m_c & (o_s >= 0) & (o_s < length), other=0).to(ACC)
        b_x = cut(b_x, LIMIT)
        if HAS_STATE:
            b_x += tl.load(state + o_n + (o_s + K - 1), mask=m_c & (o_s < 0) & (o_s + K > 0), other=0).to(ACC)
        xs = xs + (b_x,)
    return w, xs
