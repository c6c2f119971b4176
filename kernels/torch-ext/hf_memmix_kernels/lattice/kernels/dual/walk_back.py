"""The walk back of "enc" and "sim". As in the walk forward, only scalars per slot are computed token by token.

Let dS_t be the gradient of s_t from its reads and all later tokens, u = h . dS_t, z = s_t . dS_t and x = s_{t-1} .
dS_t:

    dalpha = beta (u - p x - beta alpha n z),  g = alpha^2 dalpha - a b z (+ dc for "enc"),  dc = -gamma dalpha
    dS_{t-1} = a dS_t + g h_t + q_{t-1} dy_{t-1},  dh_t = sum_i b dS_t + g s_{t-1} - b^2 z h_t

where x = (z - b u) / a, and s_{t-1} . (a dS_t + g h_t) = a x + g p, so no state is needed. Multiples of s in its own
gradient have no effect and are removed before every window. The reads, and dq_t = S_t^T dy_t too, are linear.

Chunks have P tokens, as in walk.py. With E the gradient after a chunk, tensor cores compute U = E H^T. Then, for every
token t from the last one, whose coefficients are known before, U_j <- a (U_j + q_t dy_t . h_j) + g h_t . h_j for j <
t. At last E <- A E + G H + Q dY. walk_back_by_token.py handles the heads in which an a is near zero.
"""

import triton
import triton.language as tl

from ...._recorder import launched
from ..sequential.tiles import fetch
from .tiles import goes_by_token, load_rows, locate, span, write_rule
from .walk import (
    as_asked,
    as_written,
    ask,
    asked_offsets,
    asking,
    by_columns,
    by_entries,
    load_fours,
    load_tile,
    pick,
    write,
    written_offsets,
)


@launched
@triton.jit
def lattice_gram_adjoint_kernel(
    do, v, gamma, hh, gram, steps, layout,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, P: tl.constexpr, VARIANT: tl.constexpr,
    PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """As forward, with h_t . h_j and dy_t . h_j of all pairs in every chunk [windows, H, C, 2, P].

    h_t . h_j of the first t of a chunk is never read, so |h_j|^2 is stored in its place.
    """
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1
    i_c, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    start, tokens = locate(i_c, layout, C)
    at, o_t, o_d = start * H + i_h, tl.arange(0, C), tl.arange(0, BD)
    b_v = load_rows(v + at * D, o_t, o_d, D, H * D, tokens, ACC)
    b_do = load_rows(do + at * D, o_t, o_d, D, H * D, tokens, ACC)
    row = (i_c.to(tl.int64) * H + i_h) * C + o_t
    tl.store(steps + row, tl.load(gamma + at + o_t * H, mask=o_t < tokens, other=0))
    gram += row[:, None] * (2 * P) + o_t[None, :] % P
    same = o_t[:, None] // P == o_t[None, :] // P
    found = tl.dot(b_v, tl.trans(b_v), input_precision=PRECISION, out_dtype=ACC)
    norm = tl.sum(b_v * b_v, 1)
    tl.store(hh + at + o_t * H, norm, mask=o_t < tokens)
    tl.store(gram, tl.where(o_t[:, None] % P == 0, norm[None, :], found), mask=same)
    found = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION, out_dtype=ACC)
    tl.store(gram + P, SIGN * found, mask=same)


@triton.jit
def decays_before(a):
    """For each row of [lanes, P], the product of all a before each token, and the product of all a."""
    token = tl.arange(0, a.shape[1])[None, :]
    before, A = tl.full(a.shape, 1, a.dtype), pick(a, token, 0)[:, None]
    for i in tl.static_range(1, a.shape[1]):
        before = tl.where(token == i, A, before)
        A *= pick(a, token, i)[:, None]
    return before, A


@triton.jit
def walk_chunk_back(U, along, a, b, p, q, r, from_u, from_z, gram, o_z):
    """u, z and g of a chunk, rows of [lanes, P], and s . E before it, from U = E H^T and `along` = s . E after it.

    r = q_t s_t . dy_t, and g = from_u u + from_z z.
    """
    P: tl.constexpr = U.shape[1]
    token = tl.arange(0, P)[None, :]
    Z, G = tl.zeros_like(U), tl.zeros_like(U)
    for i in tl.static_range(P - 1, -1, -1):
        h, y = load_fours(gram + 2 * i * P, o_z, P), load_fours(gram + (2 * i + 1) * P, o_z, P)
        U = tl.where(token <= i, U + pick(q, token, i)[:, None] * y, U)
        u, z = pick(U, token, i), along + pick(r, token, i)
        g = pick(from_u, token, i) * u + pick(from_z, token, i) * z
        along = z - pick(b, token, i) * u + g * pick(p, token, i)
        U = tl.where(token < i, pick(a, token, i)[:, None] * U + g[:, None] * h, U)
        Z, G = tl.where(token == i, z[:, None], Z), tl.where(token == i, g[:, None], G)
    return U, Z, G, along


@triton.jit
def inverse(x):
    """1 / x for an x of moderate size; a division takes six more instructions."""
    r = tl.rsqrt(x * x)
    return x * r * r


@triton.jit
def load_tokens(q, k, p, reads, steps, o_q, m_q, o_p, o_z, row, MP: tl.constexpr, P: tl.constexpr):
    b_q, b_k = tl.load(q + o_q, mask=m_q, other=0), tl.load(k + o_q, mask=m_q, other=0)
    b_p, b_r = tl.load(p + row * MP + o_p), tl.load(reads + row * MP + o_p)
    return b_q, b_k, b_p, b_r, load_fours(steps + row, o_z, P)


@triton.jit
def fetch_both(one, o_one, other, o_other):
    """`fetch` for two tensors; half of the lanes fetch each of them."""
    one, other = (one + o_one).to(tl.int64, bitcast=True), (other + o_other).to(tl.int64, bitcast=True)
    fetch(tl.where(tl.arange(0, 32) < 16, one, other))


@triton.jit
def fetch_chunk(
    q, k, v, do, p, reads, steps, gram, after, part, row, stride, i_m,
    M: tl.constexpr, MP: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """`fetch` of all that a chunk reads of 16 slots from `i_m` on, with two lanes for each of its tokens.

    `row` is where it starts in what is kept by windows, `part` its share of the slots `after` its window. All loads
    share six scoreboards, so a wait for a near load also waits for a far one on the same scoreboard. After this fetch
    no load has to go to HBM.
    """
    tl.static_assert(P == 8)
    o_h = tl.arange(0, 32) % 16
    token, second = o_h // 2, o_h % 2
    for i in tl.static_range(0, D, D // 2):
        o_v = token * (stride * D) + second * (D // 4) + i
        fetch_both(v, o_v, do, o_v)
    o_q, o_p = token * (stride * M) + i_m, (row + token) * MP + i_m + second * 8
    fetch_both(q, o_q, k, o_q)
    fetch_both(p, o_p, reads, o_p)
    fetch_both(gram, row * (2 * P) + o_h * 8, steps, row + 0 * o_h)
    fetch_both(after, part + o_h * 8, after, part + o_h * 8 + D // 128 * 128)


@triton.jit
def row_before(row, t, BACK: tl.constexpr, H: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """The row, in the tensors stored by windows, at which the chunk before that of token t - BACK starts; `row` if the
    chunk of token t - BACK is the first.
    """
    return row - tl.where(t > BACK, tl.where((t - BACK) % C == 0, (H - 1) * C + P, P), 0)


@triton.jit
def tangent(E, S):
    """E_i minus its part along the unit slot s_i."""
    return E - tl.sum(S * E, 1)[:, None] * S


@launched
@triton.jit
def lattice_walk_adjoint_kernel(
    upstream, inputs, walked, grads, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr, BD: tl.constexpr, VARIANT: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """dalpha and z of all tokens and the gradients of the states after every window, for MB slots of one head."""
    do, dfinal = upstream
    q, k, v, steps, gram = inputs
    states, final, p, reads, flags = walked
    dalpha, z, ends, dstart = grads
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1  # h = v or -v
    LANES: tl.constexpr = 2 * MB  # one warp, two lanes per slot
    MP: tl.constexpr = (M + MB - 1) // MB * MB  # `kept_slots`
    KW: tl.constexpr = 2 if v.dtype.element_ty.primitive_bitwidth == 16 else 1
    i_s = (tl.program_id(0) // tl.cdiv(M, MB)).to(tl.int64)
    i_n, i_h = i_s // H, i_s % H
    start, length, window = span(i_n, layout, C)
    if goes_by_token(flags + window * H + i_h, length, H, C, P):
        return
    i_m = tl.program_id(0) % tl.cdiv(M, MB) * MB
    o_m, o_d, o_l = i_m + tl.arange(0, MB), tl.arange(0, BD), tl.arange(0, LANES)
    # the "and" hides from Triton that neighbours are adjacent in memory, so that a lane holds all tokens of its slot
    o_t, o_k = (tl.arange(0, P) & (P - 1))[None, :], i_m + (o_l & (MB - 1))
    o_q, m_k, o_s = o_t * (H * M) + o_k[:, None], (o_k < M)[:, None], o_m[:, None] * D + o_d[None, :]
    o_p, o_z, m_s = o_t * MP + o_k[:, None], o_l * 0, (o_m < M)[:, None] & (o_d < D)[None, :]
    o_a, o_w, o_near = asked_offsets(P, BD), written_offsets(P, BD, KW), o_l * 8  # numbers of 32 bytes each
    t = (tl.cdiv(length, P) - 1) * P
    at, row = (start + t) * H + i_h, ((window + t // C) * H + i_h) * C + t % C
    q, k, v, do = q + at * M, k + at * M, v + at * D, do + at * D
    states += (window * H + i_h) * (M * D)
    ends += (window * H + i_h) * (M * D)
    E = by_columns(tl.load(dfinal + i_s * (M * D) + o_s, mask=m_s, other=0))
    after, along, last, left = final + i_s * (M * D), tl.zeros([LANES], ACC), t, length - t
    b_v = load_tile(v, o_a, H * D, left, D)
    b_q, b_k, b_p, b_r, b_gamma = load_tokens(q, k, p, reads, steps, o_q, m_k & (o_t < left), o_p, o_z, row, MP, P)
    for _ in tl.range(0, length, P, num_stages=1):
        if (t == last) | (t % C == C - P):
            E = tangent(E, by_columns(tl.load(after + o_s, mask=m_s, other=0)))
            along = tl.zeros([LANES], ACC)  # s_t . E_t
            after = states + t // C * (H * M * D)
            tl.store(ends + t // C * (H * M * D) + o_s, by_entries(E), mask=m_s)
        written, read = load_tile(v, o_w, H * D, left, D), load_tile(do, o_w, H * D, left, D)
        # all chunks but the last are whole, and there is none before the first
        back, here = tl.where(t > 0, P * H, 0), gram + row * (2 * P)
        q, k, v, do = q - back * M, k - back * M, v - back * D, do - back * D
        row_next = row_before(row, t, 0, H, C, P)
        v_next = load_tile(v, o_a, H * D, P, D)
        q_next, k_next, p_next, r_next, gamma_next = load_tokens(
            q, k, p, reads, steps, o_q, m_k, o_p, o_z, row_next, MP, P
        )
        if FETCH:
            more, opens = tl.where(t > P, P, 0), (t % C == 0) & (t > 0)
            fetch_chunk(
                q - more * (H * M), k - more * (H * M), v - more * (H * D), do - more * (H * D), p, reads, steps, gram,
                after - tl.where(opens, H * M * D, 0), i_m * D + (t + C - P) % C * (MB * D // C),
                row_before(row_next, t, P, H, C, P), H, i_m, M, MP, D, P,
            )  # fmt: skip
        ahead = tl.load(gram + row_next * (2 * P) + o_near % (2 * P * P))
        o_after = i_m * D + t % C * (MB * D // C) + o_near % (P * MB * D // C)
        ahead += tl.load(after + o_after, mask=o_after < M * D, other=0)

        b_q, b_k = b_q.to(ACC), b_k.to(ACC)
        _, alpha, beta, n, a, b = write_rule(b_p, b_k, b_gamma, load_fours(here, o_z, P), VARIANT)
        # coefficients of dalpha and g by u and z, x substituted
        keep = inverse(1 - alpha * b_p)
        alpha_u, alpha_z = beta * keep, -(b_p * keep + beta * beta * alpha * n)
        square = alpha * alpha - b_gamma if VARIANT == "enc" else alpha * alpha
        before, A = decays_before(a)
        U = ask(asking(E), as_asked(b_v.to(ACC), P, BD), PRECISION, ACC) * SIGN
        U = tl.reshape(tl.broadcast_to(U[None, :, :], [2, MB, P]), [LANES, P])
        A = pick(tl.trans(tl.reshape(A, [2, MB])), tl.arange(0, 2)[None, :], 0)
        E = A[:, None] * E + write(b_q * a * before, as_written(read.to(ACC), P, BD, KW), PRECISION, ACC)
        u, b_z, g, along = walk_chunk_back(
            U, along, a, b, b_p, b_q, b_q * b_r, square * alpha_u, square * alpha_z - a * b, here, o_z
        )
        tl.store(dalpha + row * MP + o_p, alpha_u * u + alpha_z * b_z)
        tl.store(z + row * MP + o_p, b_z)
        E += write(g * before * SIGN, as_written(written.to(ACC), P, BD, KW), PRECISION, ACC)
        # the added value is zero; its loads bring the next products and slots into L1
        t, left, row, along = t - P, P, row_next, along + 0 * ahead
        b_v, b_q, b_k, b_p, b_r, b_gamma = v_next, q_next, k_next, p_next, r_next, gamma_next
    E = tangent(E, by_columns(tl.load(states + o_s, mask=m_s, other=0)))
    tl.store(dstart + i_s * (M * D) + o_s, by_entries(E), mask=m_s)
