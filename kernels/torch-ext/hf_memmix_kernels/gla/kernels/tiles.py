"""Device functions that the kernels of gla share: where a sequence and a chunk lie in memory."""

import triton
import triton.language as tl


@triton.jit
def locate_sequence(i_n, cu_seqlens, T, PACKED: tl.constexpr):
    """First row (int64) and length of sequence i_n."""
    if PACKED:  # noqa: SIM102
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        bos = i_n.to(tl.int64) * T
        length = T
    return bos, length


@triton.jit
def locate_chunk(i_c, layout, T, NT, N, BT: tl.constexpr, PACKED: tl.constexpr):
    """First row of chunk i_c and the number of its tokens, 0 or less in a program beyond the last chunk."""
    cu_seqlens, first, sequence = layout
    if PACKED:  # noqa: SIM102
        # the grid is an upper bound; in programs beyond the last chunk `sequence` is N
        i_n = tl.load(sequence + i_c)
        last = tl.minimum(i_n, N - 1)
        bos, length = locate_sequence(last, cu_seqlens, T, PACKED)
        length = tl.where(i_n < N, length, 0)
        start = (i_c - tl.load(first + last)) * BT
    else:
        bos, length = locate_sequence(i_c // NT, cu_seqlens, T, PACKED)
        start = (i_c % NT) * BT
    return bos + start, tl.minimum(length - start, BT)
