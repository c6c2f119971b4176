"""Device functions that GKA's kernels share: where a chunk lies, its tiles, and products.

A kernel receives pointers to whole tensors and moves them once, in int64, to the first token of its chunk. Within a
chunk all offsets are int32. Rows beyond the end of a sequence read as zero and are never written.
"""

import triton
import triton.language as tl

from ..._device import dot_precision

EXACT: tl.constexpr = tl.constexpr(dot_precision("tf32x3"))
FAST: tl.constexpr = tl.constexpr(dot_precision("tf32"))


@triton.jit
def locate_chunk(i_chunk, layout, N, length, per_sequence, C: tl.constexpr):
    """(sequence, first token, number of tokens) of a global chunk; no token for the unused tail of a packed input.

    Packed: boundaries `cu`, each sequence's `first` chunk and each chunk's `sequence`. Batched: these are None, and
    every sequence has `length` tokens in `per_sequence` chunks.
    """
    cu, first, sequence = layout
    if cu is None:
        i_n = i_chunk // per_sequence
        start = i_n * length + (i_chunk - i_n * per_sequence) * C
        rows = (i_n + 1) * length - start
    else:
        i_n = tl.load(sequence + i_chunk)
        used = i_n < N
        i_n = tl.minimum(i_n, N - 1)
        start = tl.load(cu + i_n) + (i_chunk - tl.load(first + i_n)) * C
        rows = tl.where(used, tl.load(cu + i_n + 1) - start, 0)
    return i_n, start.to(tl.int64), tl.minimum(rows, C)


@triton.jit
def locate_sequence(i_n, layout, length, per_sequence):
    """(first token, number of tokens, first chunk, number of chunks) of a sequence."""
    cu, first = layout
    if cu is None:
        token, rows = i_n * length, length
        chunk, chunks = i_n * per_sequence, per_sequence
    else:
        token, chunk = tl.load(cu + i_n).to(tl.int64), tl.load(first + i_n).to(tl.int64)
        rows = (tl.load(cu + i_n + 1) - token).to(tl.int32)
        chunks = (tl.load(first + i_n + 1) - chunk).to(tl.int32)
    return token, rows, chunk, chunks


@triton.jit
def load_rows(base, rows, stride, width, C: tl.constexpr, COLS: tl.constexpr):
    """[C, COLS] from `base`, zero beyond `rows` and `width`."""
    i, j = tl.arange(0, C), tl.arange(0, COLS)
    return tl.load(base + i[:, None] * stride + j[None, :], mask=(i < rows)[:, None] & (j < width)[None, :], other=0.0)


@triton.jit
def store_rows(base, value, rows, stride, width, C: tl.constexpr, COLS: tl.constexpr):
    """The inverse of `load_rows`, in the destination's dtype."""
    i, j = tl.arange(0, C), tl.arange(0, COLS)
    mask = (i < rows)[:, None] & (j < width)[None, :]
    tl.store(base + i[:, None] * stride + j[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(base, rows, H: tl.constexpr, C: tl.constexpr):
    """A head's gate of the chunk's tokens [C], zero beyond `rows`."""
    i = tl.arange(0, C)
    return tl.load(base + i * H, mask=i < rows, other=0.0)


@triton.jit
def store_gate(base, value, rows, H: tl.constexpr, C: tl.constexpr):
    """The inverse of `load_gate`."""
    i = tl.arange(0, C)
    tl.store(base + i * H, value, mask=i < rows)


@triton.jit
def load_state(base, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """The first SIZE rows and columns of a chunk's scratch state [STRIDE, STRIDE]."""
    return tl.load(base + tl.arange(0, SIZE)[:, None] * STRIDE + tl.arange(0, SIZE)[None, :])


@triton.jit
def dot(a, b):
    """a @ b with float32 accumulation; float32 operands keep their precision (three tf32 products)."""
    return tl.dot(a, b, input_precision=EXACT)


@triton.jit
def gate_dot(a, b, like):
    """a @ b of float32 matrices made of decays: at full precision only beside float32 data."""
    if like.dtype == tl.float32:
        return dot(a, b)
    return tl.dot(a, b, input_precision=FAST)


@triton.jit
def split_dot(a, b):
    """a @ b for a float32 `a` kept to about 16 bits beside a low-precision `b`: high and low part of a."""
    high = a.to(b.dtype)
    if b.dtype == tl.float32:
        return dot(high, b)
    return dot(high, b) + dot((a - high.to(tl.float32)).to(b.dtype), b)


@triton.jit
def decay_from(G, C: tl.constexpr):
    """D[t, j] = e^(G_t - G_j) for j <= t, else 0."""
    i = tl.arange(0, C)
    return tl.exp(tl.where(i[:, None] >= i[None, :], G[:, None] - G[None, :], float("-inf")))


@triton.jit
def decay_until(G, C: tl.constexpr):
    """The transpose of `decay_from`, made instead of transposed."""
    i = tl.arange(0, C)
    return tl.exp(tl.where(i[None, :] >= i[:, None], G[None, :] - G[:, None], float("-inf")))


@triton.jit
def add_product(
    acc, base, rows, stride, width, factor, state,
    C: tl.constexpr, DK: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """acc + (factor * rows) @ state, for rows [C, DK] of a tensor and a chunk's state [DK, DK] or its transpose.

    Both are read block by block, so that neither has to fit into registers, and the next block is on its way while the
    last one is multiplied.
    """
    wide, block = tl.arange(0, DK), tl.arange(0, BLOCK)
    for i in range(0, DK, BLOCK):
        a = load_rows(base + i, rows, stride, width - i, C, BLOCK)
        a = (a.to(tl.float32) * factor[:, None]).to(state.dtype.element_ty)
        if TRANSPOSED:
            s = tl.trans(tl.load(state + wide[:, None] * DK + (i + block)[None, :]))
        else:
            s = tl.load(state + (i + block)[:, None] * DK + wide[None, :])
        acc += dot(a, s)
    return acc
