"""Triton device functions that GKA's forward and backward kernels share: a chunk's tiles, |H_t|, and the solver."""

import triton
import triton.language as tl


@triton.jit
def load_rows(base, tokens, end, stride, col0, width, COLS: tl.constexpr):
    """Rows `tokens` < end of a [total, stride] matrix, columns col0 .. col0 + COLS, zero beyond `width`."""
    cols = col0 + tl.arange(0, COLS)
    mask = (tokens < end)[:, None] & (cols < width)[None, :]
    return tl.load(base + tokens[:, None].to(tl.int64) * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, value, tokens, end, stride, width, COLS: tl.constexpr):
    """The inverse of `load_rows` at column 0, in the destination's dtype."""
    cols = tl.arange(0, COLS)
    mask = (tokens < end)[:, None] & (cols < width)[None, :]
    pointers = base + tokens[:, None].to(tl.int64) * stride + cols[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_gate(base, tokens, end, H: tl.constexpr):
    """A [total, H] float32 gate of one head (already in `base`), zero beyond the sequence."""
    return tl.load(base + tokens.to(tl.int64) * H, mask=tokens < end, other=0.0)


@triton.jit
def chunk_tokens(i_chunk, sequence, first, cu, C: tl.constexpr):
    """(sequence, token indices [C], end of the sequence) of a global chunk."""
    i_n = tl.load(sequence + i_chunk)
    start = tl.load(cu + i_n)
    tokens = start + (i_chunk - tl.load(first + i_n)) * C + tl.arange(0, C)
    return i_n, tokens, tl.load(cu + i_n + 1)


@triton.jit
def load_state(base, i_chunk, i_h, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A chunk's scratch state [ROWS, COLS]."""
    base += (i_chunk.to(tl.int64) * H + i_h) * ROWS * COLS
    return tl.load(base + tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :])


@triton.jit
def load_state_transposed(base, i_chunk, i_h, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A chunk's scratch state [ROWS, COLS], as [COLS, ROWS]."""
    base += (i_chunk.to(tl.int64) * H + i_h) * ROWS * COLS
    return tl.load(base + tl.arange(0, ROWS)[None, :] * COLS + tl.arange(0, COLS)[:, None])


@triton.jit
def dot(a, b):
    """a @ b with float32 accumulation; float32 operands keep their precision (three tf32 products)."""
    return tl.dot(a, b, input_precision="tf32x3")


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
    steps = tl.arange(0, C)
    return tl.exp(tl.where(steps[:, None] >= steps[None, :], G[:, None] - G[None, :], float("-inf")))


@triton.jit
def decay_until(G, C: tl.constexpr):
    """The transpose of `decay_from`, made in place of transposing it."""
    steps = tl.arange(0, C)
    return tl.exp(tl.where(steps[None, :] >= steps[:, None], G[None, :] - G[:, None], float("-inf")))


@triton.jit
def state_norm(k, H0, G, b, C: tl.constexpr):
    """|H_t|_F for the chunk's tokens [C]."""
    zeta, DW = tl.exp(G), decay_from(G, C) * (b * b)[None, :]
    key_energy = tl.sum(dot(k, H0) * k.to(tl.float32), 1)  # k_j^T H_0 k_j
    gram = dot(k, tl.trans(k))
    H0_full = H0.to(tl.float32)
    start = zeta * zeta * tl.sum(tl.sum(H0_full * H0_full, 1), 0)
    cross = 2.0 * zeta * tl.sum(DW * key_energy[None, :], 1)
    own = tl.sum(tl.dot(DW, gram * gram, input_precision="tf32") * DW, 1)
    return tl.sqrt(tl.maximum(start + cross + own, 0.0))


@triton.jit
def load_split(high, low, tokens, end, stride, width, COLS: tl.constexpr, SPLIT: tl.constexpr):
    """Rows as float32, from one tensor or, with SPLIT, from the sum of two."""
    value = load_rows(high, tokens, end, stride, 0, width, COLS).to(tl.float32)
    if SPLIT:
        value += load_rows(low, tokens, end, stride, 0, width, COLS).to(tl.float32)
    return value


@triton.jit
def solve(
    high, low, factor, tokens, end, stride, width, k, H0, G, b, norm, steps, counts, ridge,
    C: tl.constexpr, DK: tl.constexpr, PHASES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """x_t = CH(H_t + ridge |H_t| I, factor_t rhs_t) [C, DK], in Richardson steps of Chebyshev roots; 0 where H_t = 0.

    The right side stays in memory (`load_split`) and is read again by each phase: the loop's registers are full.
    """
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    start_weight = (tl.exp(G) * inverse)[:, None]
    weights = decay_from(G, C) * (b * b)[None, :] * inverse[:, None]
    kT = tl.trans(k)
    x = tl.zeros([C, DK], tl.float32)
    for phase in tl.static_range(PHASES):
        r = load_split(high, low, tokens, end, stride, width, DK, SPLIT) * (factor * inverse)[:, None]
        if phase > 0:
            # the true residual, x in two parts: what the iterations' low precision lost comes back here
            r -= ridge * x + split_dot(x, H0) * start_weight + split_dot(split_dot(x, kT) * weights, k)
        count = tl.load(counts + phase)
        for i in range(count):
            tau = tl.load(steps + i)
            x += tau * r
            rounded = r.to(k.dtype)
            image = dot(rounded, H0) * start_weight
            scores = dot(rounded, kT) * weights
            image += dot(scores.to(k.dtype), k)
            r = (1.0 - tau * ridge) * r - tau * image
        x += tl.load(steps + count) * r
        steps += count + 1
        tl.debug_barrier()  # keeps the next phase's loads from being merged with this one's and held in registers
    return x
