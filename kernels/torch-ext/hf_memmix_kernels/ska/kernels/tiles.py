"""Device functions that SKA's kernels share: where a chunk lies, its tiles, products, and the operator.

A sequence that starts `offset` tokens into a chunk has chunks 0 .. last = (offset + length) // C; the last one may
have no tokens yet. Pointers are moved to the first token of a chunk in int64; within a chunk offsets are int32.
"""

import triton
import triton.language as tl

from ..._device import dot_precision
from ..naive import POWER_ITERATIONS, SMALLEST_NORM

EXACT: tl.constexpr = tl.constexpr(dot_precision("tf32x3"))
STEPS: tl.constexpr = tl.constexpr(POWER_ITERATIONS)
SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_NORM)


@triton.jit
def locate_sequence(i_n, i_h, position, cu, lengths, first, T, per_sequence, HK: tl.constexpr, C: tl.constexpr):
    """(first token, number of tokens, offset in the first chunk, first chunk, last chunk) of a sequence."""
    if cu is None:
        token, chunk = i_n.to(tl.int64) * T, i_n.to(tl.int64) * per_sequence
        length = T if lengths is None else tl.load(lengths + i_n).to(tl.int32)
    else:
        token, chunk = tl.load(cu + i_n).to(tl.int64), tl.load(first + i_n).to(tl.int64)
        length = (tl.load(cu + i_n + 1).to(tl.int64) - token).to(tl.int32)
    offset = tl.load(position + i_n * HK + i_h).to(tl.int32)
    return token, length, offset, chunk, (offset + length) // C


@triton.jit
def sequence_of(i_chunk, sequence, per_sequence, N):
    """The sequence of a global chunk; that of a packed input's unused tail is the last one."""
    return i_chunk // per_sequence if sequence is None else tl.minimum(tl.load(sequence + i_chunk), N - 1)


@triton.jit
def bounds(s, offset, length, C: tl.constexpr):
    """First token of chunk s within its sequence, and the number of its tokens."""
    start = tl.maximum(s * C - offset, 0)
    return start, tl.maximum(tl.minimum((s + 1) * C - offset, length) - start, 0)


@triton.jit
def load_rows(base, o_t, m_t, stride, o_d, width):
    """[tokens, columns] of the rows o_t where m_t, zero elsewhere and beyond `width`."""
    return tl.load(base + o_t[:, None] * stride + o_d[None, :], mask=m_t[:, None] & (o_d < width)[None, :], other=0.0)


@triton.jit
def load_columns(base, o_t, m_t, stride, o_d, width):
    """The transpose of `load_rows`, loaded as such."""
    return tl.load(base + o_d[:, None] + o_t[None, :] * stride, mask=(o_d < width)[:, None] & m_t[None, :], other=0.0)


@triton.jit
def load_tile(base, o_i, rows, stride, o_j, columns):
    """[o_i, o_j] of a matrix with `rows` x `columns` elements, zero beyond."""
    return tl.load(
        base + o_i[:, None] * stride + o_j[None, :], mask=(o_i < rows)[:, None] & (o_j < columns)[None, :], other=0.0
    )


@triton.jit
def load_transposed(base, o_i, rows, stride, o_j, columns):
    """[o_i, o_j] of the transpose of a matrix that is stored with `columns` rows of `stride`."""
    return tl.load(
        base + o_j[None, :] * stride + o_i[:, None], mask=(o_i < rows)[:, None] & (o_j < columns)[None, :], other=0.0
    )


@triton.jit
def store_tile(base, value, o_i, rows, stride, o_j, columns):
    """The inverse of `load_tile`."""
    mask = (o_i < rows)[:, None] & (o_j < columns)[None, :]
    tl.store(base + o_i[:, None] * stride + o_j[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_transposed(base, value, o_i, rows, stride, o_j, columns):
    """The inverse of `load_transposed`."""
    mask = (o_i < rows)[:, None] & (o_j < columns)[None, :]
    tl.store(base + o_j[None, :] * stride + o_i[:, None], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b):
    """a @ b with float32 accumulation; float32 operands keep their precision (three tf32 products)."""
    return tl.dot(a, b, input_precision=EXACT)


@triton.jit
def left_dot(a, b):
    """a @ b for a float32 `a` kept to about 16 bits beside bfloat16 data: high and low part of a."""
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        return dot(high, b) + dot((a - high.to(tl.float32)).to(tl.bfloat16), b)
    else:
        return dot(a, b.to(tl.float32))


@triton.jit
def right_dot(a, b):
    """a @ b for a float32 `b`: see `left_dot`."""
    if a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        return dot(a, high) + dot(a, (b - high.to(tl.float32)).to(tl.bfloat16))
    else:
        return dot(a.to(tl.float32), b)


@triton.jit
def spd_inverse(A, smallest, R: tl.constexpr, BR: tl.constexpr):
    """A^-1 by Gauss-Jordan sweeps of the R leading rows, in place of A's registers.

    The pivots are those of Cholesky's factorisation; in exact arithmetic none is below the ridge, `smallest`, so that
    clamping repairs what rounding did and changes nothing else.
    """
    o = tl.arange(0, BR)
    for j in range(R):
        here = o == j
        column = tl.sum(tl.where(here[None, :], A, 0.0), 1)
        row = tl.sum(tl.where(here[:, None], A, 0.0), 0)
        pivot = tl.maximum(tl.sum(tl.where(here, row, 0.0), 0), smallest)
        column = tl.where(here, -1.0, column) / pivot
        row = tl.where(here, -1.0, row)
        A = tl.where(here[:, None] | here[None, :], 0.0, A) - column[:, None] * row[None, :]
    return -A


@triton.jit
def load_gram(S, nu, eps, o_r, R: tl.constexpr, WIDTH: tl.constexpr):
    """(G + lambda I, lambda) with lambda = eps nu^2, nu at least 1e-6."""
    b_nu = tl.maximum(nu, SMALLEST)
    ridge = eps * b_nu * b_nu
    return load_tile(S, o_r, R, WIDTH, o_r, R) + tl.where(o_r[:, None] == o_r[None, :], ridge, 0.0), ridge


@triton.jit
def spectral_norm(P, NT, MT, S, nu, eps, o_r, R: tl.constexpr, BR: tl.constexpr, WIDTH: tl.constexpr):
    """|A_w|_2 by power iteration on A_w A_w^T in the coordinates u of x = L^T u: u <- P M (P M^T u)."""
    PMT = dot(MT, P)
    steps = (o_r + 1).to(tl.float32) * 0.6180339887498949
    u = tl.where(o_r < R, 0.5 + steps - tl.floor(steps), 0.0)
    for _ in range(STEPS):
        a = tl.sum(NT * u[None, :], 1)
        new = tl.sum(PMT * a[:, None], 0)
        size = tl.max(tl.abs(new), 0)
        u = tl.where(size > 0, new / tl.where(size > 0, size, 1.0), u)
    a = tl.sum(NT * u[None, :], 1)
    stretched = tl.sum(a * tl.sum(MT * u[None, :], 1), 0)
    Gt, _ = load_gram(S, nu, eps, o_r, R, WIDTH)
    length = tl.sum(tl.sum(Gt * u[None, :], 1) * u, 0)
    return tl.sqrt(tl.maximum(stretched, 0.0) / length)


@triton.jit
def estimate(
    S, nu, eps, sigma_floor, o_r,
    R: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, POWER: tl.constexpr, SPECTRAL: tl.constexpr,
):  # fmt: skip
    """P = (G + lambda I)^-1, N^T = P M^T, s = max(sigma, floor)^-K and Q^T = s (N^T)^K P, all [BR, BR]."""
    WIDTH: tl.constexpr = 2 * R + V
    Gt, ridge = load_gram(S, nu, eps, o_r, R, WIDTH)
    P = spd_inverse(Gt, ridge, R, BR)
    QT, NT, scale = P, P, 1.0
    if POWER > 0:
        MT = load_tile(S + R, o_r, R, WIDTH, o_r, R)
        NT = dot(P, MT)
        if SPECTRAL:
            sigma = tl.maximum(spectral_norm(P, NT, MT, S, nu, eps, o_r, R, BR, WIDTH), sigma_floor)
            for _ in tl.static_range(POWER):
                scale /= sigma
        for _ in tl.static_range(POWER):
            QT = dot(NT, QT)
        QT *= scale
    return P, NT, scale, QT
