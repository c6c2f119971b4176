"""Where a tile lies, and the scores of a tile of queries and keys: device code of all passes.

The keys of a sequence stand in one row: `past` places of its state, the sinks and then the ring in order, and one
place per token. Query i stands at place past + i. Without states `past` is 0, and the sinks are the first tokens.
"""

import triton
import triton.language as tl

from ...gla.kernels.tiles import locate_sequence

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(i_c, layout, T, N, tiles, PACKED: tl.constexpr):
    """Sequence of tile i_c, number of the tile in it, first query (int64) and number of queries of the sequence, which
    is negative beyond the last tile, and the number of tokens before it. `tiles`: of a row without packing.
    """
    cu_seqlens, first, sequence, seen = layout
    if PACKED:
        # the grid is an upper bound; in programs beyond the last tile `sequence` is N
        i_n = tl.minimum(tl.load(sequence + i_c), N - 1)
        bos, length = locate_sequence(i_n, cu_seqlens, T, PACKED)
        length = tl.where(tl.load(sequence + i_c) < N, length, -1)
        i_t = i_c - tl.load(first + i_n)
    else:
        i_n, i_t = i_c // tiles, i_c % tiles
        bos, length = locate_sequence(i_n, cu_seqlens, T, PACKED)
    before = 0
    if seen is not None:
        before = tl.load(seen + i_n)
    return i_n, i_t, bos, length, before


@triton.jit
def capped(x, softcap):
    """softcap tanh(x / softcap), or x without a cap."""
    if softcap is None:
        return x
    else:
        return softcap * (2 / (1 + tl.exp(-2 * x / softcap)) - 1)


@triton.jit
def reads(o_q, o_k, seen, past, window, SINKS: tl.constexpr):
    """Which places of keys the queries read, without the sinks, which they read elsewhere."""
    place = o_q[:, None] + past
    inside = (o_k[None, :] <= place) & (o_k[None, :] > place - window)
    return inside & (o_k[None, :] >= past - seen + SINKS)


@triton.jit
def load_sink(p_k, p_v, i_s, stride, end, o_d, D: tl.constexpr, ACC: tl.constexpr):
    """Key and value [BD] of a sink, from the first key of its sequence, which has `end` keys."""
    mask = (o_d < D) & (i_s < end)
    b_k = tl.load(p_k + i_s * stride + o_d, mask=mask, other=0).to(ACC)
    return b_k, tl.load(p_v + i_s * stride + o_d, mask=mask, other=0).to(ACC)
