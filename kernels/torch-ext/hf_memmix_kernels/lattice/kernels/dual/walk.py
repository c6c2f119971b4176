"""The walk forward of "enc" and "sim". Here h does not depend on the state; only p_i = s_i . h is sequential.

`lattice_walk_kernel` computes p in chunks of P tokens. One warp holds some slots of a head, and the columns of the
state are independent. Tensor cores multiply the slots once per chunk to read, U = S_0 H^T. Within the chunk a lane
needs the numbers of its slot only: with the products of its tokens, u_j <- a_t u_j + b_t h_t . h_j for j > t. Then
tensor cores multiply once to write, S <- A S + W H.

Given p, the recurrence s_t = a_t s_{t-1} + b_t h_t is linear, and windows.py reads all windows in parallel.

Tiles of v and of slots lie in registers in the order that the tensor cores need: column n of such a tile is entry
n % 8 * (BD / 8) + n // 8. A lane then loads its 16 bytes at once, and the result of one product is an operand of the
next one without an exchange between lanes.

p is stored as [windows, H, C, slots], padded to whole windows and programs, so that no load or store of it needs a
mask. The walk back stores its numbers in the same way.
"""

import triton
import triton.language as tl

from ...._recorder import launched
from ..sequential.tiles import rsqrt
from .tiles import load_rows, locate, span


@launched
@triton.jit
def lattice_gram_kernel(
    v, gamma, hh, gram, steps, layout,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """|v_t|^2 of all tokens, v_t . v_j of all pairs in every chunk [windows, H, C, P], gamma as [windows, H, C]."""
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, tl.arange(0, C), tl.arange(0, BD)
    b_v = load_rows(v + at * D, o_t, o_d, D, H * D, tokens, ACC)
    tl.store(hh + at + o_t * H, tl.sum(b_v * b_v, 1), mask=o_t < tokens)
    found = tl.dot(b_v, tl.trans(b_v), input_precision=PRECISION, out_dtype=ACC)
    row = (i_c.to(tl.int64) * H + i_h) * C + o_t
    tl.store(steps + row, tl.load(gamma + at + o_t * H, mask=o_t < tokens, other=0))
    tl.store(gram + row[:, None] * P + o_t[None, :] % P, found, mask=o_t[:, None] // P == o_t[None, :] // P)


@triton.jit
def asked_offsets(P: tl.constexpr, BD: tl.constexpr):
    """Offsets (token and entry) of the elements that a lane loads in a row for `as_asked`; [P / 8, 2, 8, 4,
    BD / 8].
    """
    E: tl.constexpr = BD // 8
    o = tl.arange(0, P * BD)
    return o // (64 * E) * 8 + o // (4 * E) % 8, (o // E % 4 * 2 + o // (32 * E) % 2) * E + o % E


@triton.jit
def as_asked(x, P: tl.constexpr, BD: tl.constexpr):
    """The loaded elements as H^T [BD, P], the right operand of S H^T."""
    return tl.reshape(tl.permute(tl.reshape(x, [P // 8, 2, 8, 4, BD // 8]), 4, 1, 3, 0, 2), [BD, P])


@triton.jit
def asking(S):
    """The slots [M, BD] with their columns in the order of `as_asked`."""
    M: tl.constexpr = S.shape[0]
    BD: tl.constexpr = S.shape[1]
    return tl.reshape(tl.permute(tl.reshape(S, [M, BD // 8, 4, 2]), 0, 1, 3, 2), [M, BD])


@triton.jit
def written_offsets(P: tl.constexpr, BD: tl.constexpr, W: tl.constexpr):
    """As `asked_offsets`, for `as_written`: [P / 4 W, W, 8, 4, BD / 8], W numbers of the inputs in 32 bits."""
    E: tl.constexpr = BD // 8
    o = tl.arange(0, P * BD)
    return o // (32 * E * W) * 4 * W + o // E % 4 * W + o // (32 * E) % W, o // (4 * E) % 8 * E + o % E


@triton.jit
def as_written(x, P: tl.constexpr, BD: tl.constexpr, W: tl.constexpr):
    """The loaded elements as H [P, BD], the right operand of W H."""
    return tl.reshape(tl.permute(tl.reshape(x, [P // (4 * W), W, 8, 4, BD // 8]), 0, 3, 1, 4, 2), [P, BD])


@triton.jit
def load_tile(p, offsets, stride, left, D: tl.constexpr):
    """A chunk of vectors [D], zeros from token `left` on."""
    o_t, o_d = offsets
    return tl.load(p + o_t * stride + o_d, mask=(o_d < D) & (o_t < left), other=0)


@triton.jit
def by_columns(S):
    """Slots [M, BD] from the order of their entries to the order of the columns."""
    M: tl.constexpr = S.shape[0]
    BD: tl.constexpr = S.shape[1]
    return tl.reshape(tl.permute(tl.reshape(S, [M, 8, BD // 8]), 0, 2, 1), [M, BD])


@triton.jit
def by_entries(S):
    """The inverse of `by_columns`: a slot is stored in whole rows."""
    M: tl.constexpr = S.shape[0]
    BD: tl.constexpr = S.shape[1]
    return tl.reshape(tl.permute(tl.reshape(S, [M, BD // 8, 8]), 0, 2, 1), [M, BD])


@triton.jit
def load_fours(p, o_r, P: tl.constexpr):
    """Rows [lanes, P] from `o_r` on, four elements per load."""
    if P == 4:
        return tl.load(p + o_r[:, None] + tl.arange(0, 4)[None, :])
    else:
        half = load_fours(p, o_r, P // 2), load_fours(p + P // 2, o_r, P // 2)
        return tl.reshape(tl.permute(tl.join(half[0], half[1]), 0, 2, 1), [o_r.shape[0], P])


@triton.jit
def pick(x, column, i):
    """Column i of a tile with one row per lane. It costs no instruction: the other columns are added as
    integer zeros.
    """
    bits = x.to(tl.int64 if x.dtype == tl.float64 else tl.int32, bitcast=True)
    return tl.sum(tl.where(column == i, bits, 0), 1).to(x.dtype, bitcast=True)


@triton.jit
def high_part(x):
    """The part of x that TF32 keeps."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def normalise_rows(S):
    """s_i / |s_i| of slots as rows; the empty ones that fill up a tile stay empty."""
    x = tl.sum(S * S, 1)
    return S * tl.where(x > 0, rsqrt(tl.where(x > 0, x, 1)), 0)[:, None]


@triton.jit
def ask(S, h, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """S H^T in float32 precision. With "split", H fits into TF32 and S is split into two parts that do."""
    if PRECISION == "split":
        high = high_part(S)
        rest = tl.dot(high - S, h, input_precision="tf32", out_dtype=ACC)
        return tl.dot(high, h, input_precision="tf32", out_dtype=ACC) - rest
    else:
        return tl.dot(S, h, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def write(weights, h, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """W H [M, BD] for weights [2 M, P], two lanes per slot: the second lane adds what TF32 cuts off."""
    P: tl.constexpr = h.shape[0]
    BD: tl.constexpr = h.shape[1]
    M: tl.constexpr = weights.shape[0] // 2
    FORM: tl.constexpr = "tf32" if PRECISION == "split" else PRECISION
    high = high_part(weights) if PRECISION == "split" else weights
    weights = tl.where(tl.arange(0, 2 * M)[:, None] < M, high, weights - high)
    weights = tl.reshape(tl.permute(tl.reshape(weights, [2, M, P]), 1, 0, 2), [M, 2 * P])
    h = tl.reshape(tl.broadcast_to(h[None, :, :], [2, P, BD]), [2 * P, BD])
    return tl.dot(weights, h, input_precision=FORM, out_dtype=ACC)


@triton.jit
def walk_chunk(U, k, gamma, gram, o_z, VARIANT: tl.constexpr):
    """p, A and W of a chunk, S <- A S + W H, from U = S_0 H^T: independent rows of [lanes, P]."""
    P: tl.constexpr = U.shape[1]
    token = tl.arange(0, P)[None, :]
    step = gamma * k if VARIANT == "enc" else -gamma * k
    scales, writes = (), ()
    for i in tl.static_range(P):
        g = load_fours(gram + i * P, o_z, P)
        b_p, alpha, hh = pick(U, token, i), pick(step, token, i), pick(g, token, i)
        if VARIANT == "enc":
            alpha -= pick(gamma, token, i) * b_p
        beta = rsqrt(1 + alpha * alpha * tl.maximum(hh - b_p * b_p, 0))[:, None]
        keep, alpha = (1 - alpha * b_p)[:, None], alpha[:, None]
        a, b = beta * keep, beta * alpha
        # the next token depends on beta only
        U = tl.where(token > i, tl.where(token == i + 1, beta * (keep * U + alpha * g), a * U + b * g), U)
        scales, writes = scales + (a,), writes + (b,)
    A, W = scales[P - 1], tl.where(token == P - 1, writes[P - 1], 0)
    for i in tl.static_range(P - 2, -1, -1):
        W = tl.where(token == i, writes[i] * A, W)
        A *= scales[i]
    return U, A, W


@launched
@triton.jit
def lattice_walk_kernel(
    inputs, start_state, outputs, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr, VARIANT: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """p of all tokens and the states before every C-th one, for MB slots of one (sequence, head)."""
    k, v, steps, gram = inputs
    final_state, states, p = outputs
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1  # h = v or -v
    LANES: tl.constexpr = 2 * MB  # one warp, two lanes per slot
    MP: tl.constexpr = (M + MB - 1) // MB * MB  # `kept_slots`
    KW: tl.constexpr = 2 if v.dtype.element_ty.primitive_bitwidth == 16 else 1
    i_s = (tl.program_id(0) // tl.cdiv(M, MB)).to(tl.int64)
    i_n, i_h = i_s // H, i_s % H
    start, length, window = span(i_n, layout, C)
    i_m = tl.program_id(0) % tl.cdiv(M, MB) * MB
    o_m, o_d, o_l = i_m + tl.arange(0, MB), tl.arange(0, BD), tl.arange(0, LANES)
    # the "and" hides from Triton that neighbours are adjacent in memory, so that a lane holds all tokens of its slot
    o_t, o_k = (tl.arange(0, P) & (P - 1))[None, :], i_m + (o_l & (MB - 1))
    o_q, m_k, o_s = o_t * (H * M) + o_k[:, None], (o_k < M)[:, None], o_m[:, None] * D + o_d[None, :]
    o_p, o_z, m_s = o_t * MP + o_k[:, None], o_l * 0, (o_m < M)[:, None] & (o_d < D)[None, :]
    o_a, o_w = asked_offsets(P, BD), written_offsets(P, BD, KW)
    at, row = start * H + i_h, (window * H + i_h) * C
    k, v = k + at * M, v + at * D
    states += (window * H + i_h) * (M * D)
    S = by_columns(tl.load(start_state + i_s * (M * D) + o_s, mask=m_s, other=0))
    b_v, b_k = load_tile(v, o_a, H * D, length, D), tl.load(k + o_q, mask=m_k & (o_t < length), other=0)
    b_gamma = load_fours(steps + row, o_z, P)
    for t in tl.range(0, length, P, num_stages=1):
        left = length - t
        written = load_tile(v, o_w, H * D, left, D)
        v, k = v + P * H * D, k + P * H * M
        v_next, k_next = load_tile(v, o_a, H * D, left - P, D), tl.load(k + o_q, mask=m_k & (o_t < left - P), other=0)
        # the last chunk has no next one
        row_next = row + tl.where(left > P, tl.where((t + P) % C == 0, (H - 1) * C + P, P), 0)
        gamma_next = load_fours(steps + row_next, o_z, P)
        ahead = tl.load(gram + row_next * P + o_l * 8 % (P * P))
        if t % C == 0:
            S = normalise_rows(S)
            tl.store(states + o_s, by_entries(S), mask=m_s)
            states += H * (M * D)
        U = ask(asking(S), as_asked(b_v.to(ACC), P, BD), PRECISION, ACC) * SIGN
        U = tl.reshape(tl.broadcast_to(U[None, :, :], [2, MB, P]), [LANES, P])
        U, A, W = walk_chunk(U, b_k.to(ACC), b_gamma, gram + row * P, o_z, VARIANT)
        tl.store(p + row * MP + o_p, U)
        # adds zero: reading one number of every 32 bytes brings the next chunk's products into L1 in time
        A = pick(tl.trans(tl.reshape(A + 0 * ahead[:, None], [2, MB])), tl.arange(0, 2)[None, :], 0)
        S = A[:, None] * S + write(W * SIGN, as_written(written.to(ACC), P, BD, KW), PRECISION, ACC)
        row, b_v, b_k, b_gamma = row_next, v_next, k_next, gamma_next
    tl.store(final_state + i_s * (M * D) + o_s, by_entries(normalise_rows(S)), mask=m_s)
