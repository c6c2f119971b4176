"""The walk back of "enc" and "sim" token by token, for heads in which an a is near zero and for very short sequences.

walk_back.py computes x = s_{t-1} . dS_t as (z - b u) / a. In tokens where |1 - alpha p| < 1/4, this kernel computes x
from the state instead, which it replays from the start of the window. This is exact, and slow in such tokens only.
"""

import triton
import triton.language as tl

from ...._recorder import launched
from .tiles import goes_by_token, kept_slots, span, write_rule


@triton.jit
def inner(S, h):
    """s_i . h for slots in parts, a tuple of [M, D2], and a vector in parts, a tuple of [D2]: [M]."""
    x = S[0] * h[0][None, :]
    for j in tl.static_range(1, len(S)):
        x += S[j] * h[j][None, :]
    return tl.sum(x, 1)


@triton.jit
def combine(a, S, b, h):
    """a_i s_i + b_i h, in parts."""
    parts = ()
    for j in tl.static_range(len(S)):
        parts = parts + (a[:, None] * S[j] + b[:, None] * h[j][None, :],)
    return parts


@triton.jit
def cast(x, ACC: tl.constexpr):
    parts = ()
    for j in tl.static_range(len(x)):
        parts = parts + (x[j].to(ACC),)
    return parts


@triton.jit
def load_slots(p, o_m, M: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Slots `o_m` of a state [M, D] in parts, zeros around."""
    parts = ()
    for j in tl.static_range(D1):
        o_d = j * D2 + tl.arange(0, D2)
        mask = (o_m < M)[:, None] & (o_d < D)[None, :]
        parts = parts + (tl.load(p + o_m[:, None] * D + o_d[None, :], mask=mask, other=0),)
    return parts


@triton.jit
def store_slots(p, S, o_m, M: tl.constexpr, D: tl.constexpr, D2: tl.constexpr):
    for j in tl.static_range(len(S)):
        o_d = j * D2 + tl.arange(0, D2)
        tl.store(p + o_m[:, None] * D + o_d[None, :], S[j], mask=(o_m < M)[:, None] & (o_d < D)[None, :])


@triton.jit
def load_parts(p, mask, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """A vector [D] in parts.

    A load has fewer than 32 numbers: Triton then loads it in the layout of its use, without shared memory.
    """
    parts = ()
    for j in tl.static_range(D1):
        o_d = j * D2 + tl.arange(0, D2)
        parts = parts + (tl.load(p + o_d, mask=(o_d < D) & mask, other=0),)
    return parts


@triton.jit
def kept_at(t, o_m, H: tl.constexpr, M: tl.constexpr, C: tl.constexpr):
    """Offset at which the walks store a number of token t, from the sequence's first window and this head on."""
    return (t // C * (H * C) + t % C) * kept_slots(M) + o_m


@triton.jit
def replay(
    S, k, v, hh, gamma, p, o_m, steps, H: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, VARIANT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The slots after `steps` more tokens, whose p is known."""
    for t in range(0, steps):
        b_p = tl.load(p + t * kept_slots(M) + o_m, mask=o_m < M, other=0)
        b_k = tl.load(k + t * (H * M) + o_m, mask=o_m < M, other=0).to(ACC)
        b_v = cast(load_parts(v + t * (H * D), True, D, D1, D2), ACC)
        b_gamma, b_hh = tl.load(gamma + t * H).to(ACC), tl.load(hh + t * H)
        _, _, _, _, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        S = combine(a, S, b if VARIANT == "enc" else -b, b_v)
    return S


@triton.jit
def tangent(E, S):
    """E_i minus its part along the unit slot s_i, in parts."""
    along = inner_slots(S, E)
    parts = ()
    for j in tl.static_range(len(S)):
        parts = parts + (E[j] - along[:, None] * S[j],)
    return parts


@triton.jit
def inner_slots(S, E):
    """s_i . e_i, in parts."""
    x = S[0] * E[0]
    for j in tl.static_range(1, len(S)):
        x += S[j] * E[j]
    return tl.sum(x, 1)


@triton.jit
def add(E, q, y):
    """e_i + q_i y, in parts."""
    parts = ()
    for j in tl.static_range(len(E)):
        parts = parts + (E[j] + q[:, None] * y[j][None, :],)
    return parts


@triton.jit
def load_tokens(
    q, k, p, reads, v, do, hh, gamma, t, o_m,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """q, k, p, reads, v, do, hh and gamma of token t; zeros if t < 0."""
    o_k, o_g, m_k = t * (H * M) + o_m, t * H, (o_m < M) & (t >= 0)
    o_p = kept_at(t, o_m, H, M, C)
    b_q, b_k = tl.load(q + o_k, mask=m_k, other=0), tl.load(k + o_k, mask=m_k, other=0)
    b_p, b_r = tl.load(p + o_p, mask=m_k, other=0), tl.load(reads + o_p, mask=m_k, other=0)
    b_v, b_do = load_parts(v + t * (H * D), t >= 0, D, D1, D2), load_parts(do + t * (H * D), t >= 0, D, D1, D2)
    b_hh, b_gamma = tl.load(hh + o_g, mask=t >= 0, other=0), tl.load(gamma + o_g, mask=t >= 0, other=0)
    return b_q, b_k, b_p, b_r, b_v, b_do, b_hh, b_gamma


@launched
@triton.jit
def lattice_careful_adjoint_kernel(
    upstream, inputs, walked, grads, layout,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MB: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, VARIANT: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dalpha and z of all tokens and the gradients of the states after every window, for MB slots of one head."""
    do, dfinal = upstream
    q, k, v, hh, gamma = inputs
    states, final, p, reads, flags = walked
    dalpha, z, ends, dstart = grads
    SIGN: tl.constexpr = 1 if VARIANT == "enc" else -1
    i_s = (tl.program_id(0) // tl.cdiv(M, MB)).to(tl.int64)
    i_n, i_h = i_s // H, i_s % H
    start, length, window = span(i_n, layout, C)
    if not goes_by_token(flags + window * H + i_h, length, H, C, CHUNK):
        return
    o_m = tl.program_id(0) % tl.cdiv(M, MB) * MB + tl.arange(0, MB)
    m_m = o_m < M
    at = start * H + i_h
    q, k, do, v, hh, gamma = q + at * M, k + at * M, do + at * D, v + at * D, hh + at, gamma + at
    at = window * H + i_h
    states, ends, at = states + at * (M * D), ends + at * (M * D), at * (C * kept_slots(M))
    p, reads, dalpha, z = p + at, reads + at, dalpha + at, z + at
    E = load_slots(dfinal + i_s * (M * D), o_m, M, D, D1, D2)
    E = tangent(E, load_slots(final + i_s * (M * D), o_m, M, D, D1, D2))
    if length > 0:
        store_slots(ends + (length - 1) // C * (H * M * D), E, o_m, M, D, D2)
    along = tl.zeros([MB], ACC)  # s_t . E_t

    now = load_tokens(q, k, p, reads, v, do, hh, gamma, length - 1, o_m, H, M, D, D1, D2, C)
    for i in range(0, length):
        t = length - 1 - i
        before = load_tokens(q, k, p, reads, v, do, hh, gamma, t - 1, o_m, H, M, D, D1, D2, C)
        b_q, b_k, b_p, b_r, b_v, b_do, b_hh, b_gamma = now
        b_q, b_k, b_gamma, b_v, b_do = b_q.to(ACC), b_k.to(ACC), b_gamma.to(ACC), cast(b_v, ACC), cast(b_do, ACC)
        _, alpha, beta, n, a, b = write_rule(b_p, b_k, b_gamma, b_hh, VARIANT)
        dS = add(E, b_q, b_do)
        u = inner(dS, b_v) * SIGN
        b_z = along + b_q * b_r
        here = tl.abs(1 - alpha * b_p) < 0.25
        if tl.max(here.to(tl.int32), 0) > 0:
            first_t = t // C * C
            S = load_slots(states + first_t // C * (H * M * D), o_m, M, D, D1, D2)
            o_k, o_v, o_g = first_t * (H * M), first_t * (H * D), first_t * H
            S = replay(
                S, k + o_k, v + o_v, hh + o_g, gamma + o_g, p + kept_at(first_t, 0, H, M, C), o_m, t - first_t,
                H, M, D, D1, D2, VARIANT, ACC,
            )  # fmt: skip
            x = tl.where(here, inner_slots(S, dS), (b_z - b * u) / tl.where(here, 1, a))
        else:
            x = (b_z - b * u) / a
        b_dalpha = beta * (u - b_p * x - beta * alpha * n * b_z)
        g = alpha * alpha * b_dalpha - a * b * b_z
        if VARIANT == "enc":
            g -= b_gamma * b_dalpha
        E = combine(a, dS, g * SIGN, b_v)
        along = b_z - b * u + g * b_p
        o_p = kept_at(t, o_m, H, M, C)
        tl.store(dalpha + o_p, b_dalpha, mask=m_m)
        tl.store(z + o_p, b_z, mask=m_m)
        if t % C == 0:
            E = tangent(E, load_slots(states + t // C * (H * M * D), o_m, M, D, D1, D2))
            along = tl.zeros([MB], ACC)
            if t > 0:
                store_slots(ends + (t // C - 1) * (H * M * D), E, o_m, M, D, D2)
        now = before
    store_slots(dstart + i_s * (M * D), E, o_m, M, D, D2)
