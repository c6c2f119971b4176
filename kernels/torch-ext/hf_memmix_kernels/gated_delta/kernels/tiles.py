"""Device functions that the kernels of the gated delta rule share: decays of a chunk, and blocks of it.

G = cumsum(g) within a chunk is [rows, H], or [rows, H, K] if CHANNELS. Tiles of it are [BT, 1] or [BT, BK], such that
both multiply a tile of keys in the same way.
"""

import triton
import triton.language as tl


@triton.jit
def load_decays(G, o_row, i_h, H, K, o_k, mask, CHANNELS: tl.constexpr):
    """G of tokens and, if CHANNELS, channels; `mask` [BT, BK]."""
    if CHANNELS:  # noqa: SIM108
        b_G = tl.load(G + (o_row * H + i_h)[:, None] * K + o_k[None, :], mask=mask, other=0)
    else:
        b_G = tl.load(G + (o_row * H + i_h)[:, None], mask=tl.max(mask.to(tl.int32), 1)[:, None] > 0, other=0)
    return b_G


@triton.jit
def load_end(G, row, i_h, H, K, o_k, CHANNELS: tl.constexpr):
    """G [1, BK] or [1, 1] of one token."""
    if CHANNELS:  # noqa: SIM108
        b_end = tl.load(G + (row * H + i_h) * K + o_k[None, :], mask=(o_k < K)[None, :], other=0)
    else:
        b_end = tl.load(G + (row * H + i_h) + tl.zeros([1, 1], tl.int64))
    return b_end
