"""SKA's backward kernels: gradients of operators and statistics, their sums from the end, those of keys and values.

With D = C^T dW, E = P D, dN = s sum_i (N^T)^i E (N^T)^(K-1-i), dP = s D (N^T)^K + M^T dN:

    dC = dW Q^T,  dM = dN P,  dG = -P dP P,  dnu = 2 eps nu tr dG            (README.md, "Backward")
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import (
    SMALLEST,
    bounds,
    dot,
    estimate,
    left_dot,
    load_columns,
    load_rows,
    load_tile,
    load_transposed,
    locate_sequence,
    right_dot,
    sequence_of,
    store_tile,
    store_transposed,
)


@launched
@triton.jit(do_not_specialize=["T", "per_sequence", "N"])
def ska_bwd_kernel_operator(
    inputs, states, dW_final, grads, layout, T, per_sequence, N, eps, sigma_floor,
    H: tl.constexpr, HK: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    POWER: tl.constexpr, SPECTRAL: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dq, the gain's gradient and those of the statistics before one chunk, for one key head.

    In chunk 0, which reads the carried operator, Q = I and C = W.
    """
    q, do, gain = inputs
    S, nu, W0 = states
    dq, dgain, dS, dnu, dW0 = grads
    position, cu, lengths, first, sequence = layout
    i_h, i_chunk = tl.program_id(0) % HK, tl.program_id(0) // HK
    i_n = sequence_of(i_chunk, sequence, per_sequence, N)
    token, length, offset, chunk, last = locate_sequence(
        i_n, i_h, position, cu, lengths, first, T, per_sequence, HK, C
    )
    s = (i_chunk - chunk).to(tl.int32)
    if s > last:
        return
    WIDTH: tl.constexpr = 2 * R + V
    GROUPS: tl.constexpr = H // HK
    start, rows = bounds(s, offset, length, C)
    o_t, o_r, o_v = tl.arange(0, BC), tl.arange(0, BR), tl.arange(0, BV)
    state = i_chunk.to(tl.int64) * HK + i_h
    at_w = (i_n.to(tl.int64) * HK + i_h) * R * V
    p_S, p_dS = S + state * R * WIDTH, dS + state * R * WIDTH
    b_nu = tl.load(nu + state)
    if s > 0:
        b_P, b_NT, scale, b_QT = estimate(p_S, b_nu, eps, sigma_floor, o_r, R, V, BR, POWER, SPECTRAL)
        p_C, p_dC, stride = p_S + 2 * R, p_dS + 2 * R, WIDTH
    else:
        b_QT = tl.where(o_r[:, None] == o_r[None, :], 1.0, 0.0)
        b_P, b_NT, scale = b_QT, b_QT, 1.0
        p_C, p_dC, stride = W0 + at_w, dW0 + at_w, V

    b_D = tl.zeros([BR, BR], tl.float32)
    if s == last:
        for j in range(0, V, BV):
            b_C = load_tile(p_C + j, o_r, R, stride, o_v, V - j)
            b_D += dot(b_C, load_transposed(dW_final + at_w + j, o_v, V - j, V, o_r, R))
    row = (token + start) * H + i_h * GROUPS
    for g in range(GROUPS):
        b_gain = tl.load(gain + i_h * GROUPS + g)
        total = 0.0
        for i in range(0, C, BC):
            m_t = i + o_t < rows
            b_XT = tl.zeros([BR, BC], tl.float32)
            for j in range(0, V, BV):
                b_C = load_tile(p_C + j, o_r, R, stride, o_v, V - j)
                b_doT = load_columns(do + (row + g) * V + j, i + o_t, m_t, H * V, o_v, V - j)
                b_XT += left_dot(b_C, b_doT)
            p_q = q + (row + g) * R
            b_D += b_gain * left_dot(b_XT, load_rows(p_q, i + o_t, m_t, H * R, o_r, R))
            b_dqT = dot(b_QT, b_XT)
            total += tl.sum(tl.sum(b_dqT * load_columns(p_q, i + o_t, m_t, H * R, o_r, R).to(tl.float32), 0), 0)
            p_dq = dq + (row + g) * R + o_r[:, None] + (i + o_t)[None, :] * H * R
            tl.store(p_dq, (b_gain * b_dqT).to(dq.dtype.element_ty), mask=(o_r < R)[:, None] & m_t[None, :])
        tl.store(dgain + i_chunk.to(tl.int64) * H + i_h * GROUPS + g, total)

    for j in range(0, V, BV):
        b_dC = tl.zeros([BV, BR], tl.float32)
        if s == last:
            b_dC += dot(load_transposed(dW_final + at_w + j, o_v, V - j, V, o_r, R), b_QT)
        for g in range(GROUPS):
            b_gain = tl.load(gain + i_h * GROUPS + g)
            for i in range(0, C, BC):
                m_t = i + o_t < rows
                b_x = right_dot(load_rows(q + (row + g) * R, i + o_t, m_t, H * R, o_r, R), b_QT)
                b_doT = load_columns(do + (row + g) * V + j, i + o_t, m_t, H * V, o_v, V - j)
                b_dC += b_gain * right_dot(b_doT, b_x)
        store_transposed(p_dC + j, b_dC, o_v, V - j, stride, o_r, R)

    if s > 0:
        b_dP = scale * b_D
        b_dN = tl.zeros([BR, BR], tl.float32)
        if POWER > 0:
            b_E = dot(b_P, b_D)
            for i in tl.static_range(POWER):
                b_dP = dot(b_dP, b_NT)
                if i == 0:
                    b_dN = b_E
                else:
                    b_E = dot(b_E, b_NT)
                    b_dN = dot(b_NT, b_dN) + b_E
            b_dN *= scale
            b_dP += dot(load_tile(p_S + R, o_r, R, WIDTH, o_r, R), b_dN)
            b_dN = dot(b_dN, b_P)
        store_transposed(p_dS + R, b_dN, o_r, R, WIDTH, o_r, R)
        b_dG = dot(dot(b_P, b_dP), b_P)
        b_dG = -0.5 * (b_dG + tl.trans(b_dG))
        store_tile(p_dS, b_dG, o_r, R, WIDTH, o_r, R)
        trace = tl.sum(tl.sum(tl.where((o_r[:, None] == o_r[None, :]) & (o_r < R)[None, :], b_dG, 0.0), 0), 0)
        tl.store(dnu + state, tl.where(b_nu > SMALLEST, 2 * eps * b_nu * trace, 0.0))


@launched
@triton.jit(do_not_specialize=["T", "per_sequence"])
def ska_bwd_kernel_scan(
    statistics, final, grads, layout, T, per_sequence,
    HK: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place of a chunk's dS the sum over all later chunks, and of its dnu what its keys receive from nu."""
    dS, nu, dnu = statistics
    dS_final, nu_final, dnu_final = final
    dS0, dnu0 = grads
    position, cu, lengths, first = layout
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i_block, i_nh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_n, i_h = i_nh // HK, i_nh % HK
    _, _, _, chunk, last = locate_sequence(i_n, i_h, position, cu, lengths, first, T, per_sequence, HK, C)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    inside = o < SIZE
    at = i_nh.to(tl.int64) * SIZE + o
    b_sum = tl.load(dS_final + at, mask=inside, other=0.0)
    for i in range(last + 1):
        s = last - i
        p_dS = dS + ((chunk + s) * HK + i_h) * SIZE + o
        b_dS = tl.load(p_dS, mask=inside & (s > 0), other=0.0)
        tl.store(p_dS, b_sum, mask=inside)
        b_sum = tl.where(s > 0, b_sum + b_dS, b_sum)
    tl.store(dS0 + at, b_sum, mask=inside)
    if i_block == 0:
        after, carried = tl.load(nu_final + i_nh), tl.load(dnu_final + i_nh)
        for i in range(last + 1):
            s = last - i
            p_nu = (chunk + s) * HK + i_h
            before = tl.load(nu + p_nu)
            own = tl.load(dnu + p_nu, mask=s > 0, other=0.0)
            grows = after > before
            tl.store(dnu + p_nu, tl.where(grows, carried, 0.0))
            carried = tl.where(grows, 0.0, carried) + own
            after = before
        tl.store(dnu0 + i_nh, carried)


@launched
@triton.jit(do_not_specialize=["T", "per_sequence", "N"])
def ska_bwd_kernel_dkv(
    inputs, statistics, previous, dprevious_final, grads, layout, T, per_sequence, N,
    HK: tl.constexpr, R: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dk and dv of one chunk and key head from the gradients of all later statistics."""
    k, v = inputs
    dS, dnu = statistics
    dk, dv, dprevious = grads
    position, cu, lengths, first, sequence = layout
    i_h, i_chunk = tl.program_id(0) % HK, tl.program_id(0) // HK
    i_n = sequence_of(i_chunk, sequence, per_sequence, N)
    token, length, offset, chunk, last = locate_sequence(
        i_n, i_h, position, cu, lengths, first, T, per_sequence, HK, C
    )
    s = (i_chunk - chunk).to(tl.int32)
    if s > last:
        return
    WIDTH: tl.constexpr = 2 * R + V
    start, rows = bounds(s, offset, length, C)
    o_t, o_r, o_v = tl.arange(0, BC), tl.arange(0, BR), tl.arange(0, BV)
    state = i_chunk.to(tl.int64) * HK + i_h
    p_dS = dS + state * R * WIDTH
    at = (i_n.to(tl.int64) * HK + i_h) * R
    p_k = k + ((token + start) * HK + i_h) * R
    p_v = v + ((token + start) * HK + i_h) * V
    p_dk = dk + ((token + start) * HK + i_h) * R
    p_dv = dv + ((token + start) * HK + i_h) * V

    b_end = tl.load(dprevious_final + at + o_r, mask=o_r < R, other=0.0)
    if s == 0:
        # the first token's pair with the carried key
        b_M = load_transposed(p_dS + R, o_r, R, WIDTH, o_r, R)
        b_k = tl.load(p_k + o_r, mask=(o_r < R) & (length > 0), other=0.0).to(tl.float32)
        b_dprevious = tl.sum(b_M * b_k[:, None], 0)
        tl.store(dprevious + at + o_r, tl.where(length > 0, b_dprevious, b_end), mask=o_r < R)
    if rows <= 0:
        return
    # the last token's pair with the next chunk's first one, or what the final state's key hands back
    ends = start + rows >= length
    if not ends:
        b_M = load_transposed(p_dS + HK * R * WIDTH + R, o_r, R, WIDTH, o_r, R)
        b_next = tl.load(p_k + rows * HK * R + o_r, mask=o_r < R, other=0.0).to(tl.float32)
        b_end = tl.sum(b_M * b_next[:, None], 0)

    largest = 0.0
    count = 0.0
    received = tl.load(dnu + state)
    if received != 0:
        for i in range(0, C, BC):
            b_k = load_rows(p_k, i + o_t, i + o_t < rows, HK * R, o_r, R).to(tl.float32)
            norms = tl.sum(b_k * b_k, 1)
            peak = tl.max(norms, 0)
            ties = tl.sum(tl.where(norms == peak, 1.0, 0.0), 0)
            count = tl.where(peak > largest, ties, tl.where(peak == largest, count + ties, count))
            largest = tl.maximum(largest, peak)
        received = received / (count * tl.sqrt(largest))

    b_G = load_tile(p_dS, o_r, R, WIDTH, o_r, R) + load_transposed(p_dS, o_r, R, WIDTH, o_r, R)
    for i in range(0, C, BC):
        o_c = i + o_t
        m_t = o_c < rows
        b_k = load_rows(p_k, o_c, m_t, HK * R, o_r, R)
        b_dk = right_dot(b_k, b_G)
        # the key before: that of the chunk before for the first token, the carried one for the sequence's first
        b_before = load_rows(p_k - HK * R, o_c, m_t & (start + o_c > 0), HK * R, o_r, R)
        b_MT = load_tile(p_dS + R, o_r, R, WIDTH, o_r, R)
        b_dk += right_dot(b_before, b_MT)
        if start + i == 0:
            b_previous = tl.load(previous + at + o_r, mask=o_r < R, other=0.0)
            b_pair = tl.sum(b_MT * b_previous[:, None], 0)
            b_dk += tl.where((o_c == 0)[:, None], b_pair[None, :], 0.0)
        b_after = load_rows(p_k + HK * R, o_c, o_c + 1 < rows, HK * R, o_r, R)
        b_dk += right_dot(b_after, load_transposed(p_dS + R, o_r, R, WIDTH, o_r, R))
        b_dk += tl.where((o_c == rows - 1)[:, None], b_end[None, :], 0.0)
        for j in range(0, V, BV):
            b_v = load_rows(p_v + j, o_c, m_t, HK * V, o_v, V - j)
            b_dk += right_dot(b_v, load_transposed(p_dS + 2 * R + j, o_v, V - j, WIDTH, o_r, R))
            b_dv = right_dot(b_k, load_tile(p_dS + 2 * R + j, o_r, R, WIDTH, o_v, V - j))
            p = p_dv + j + o_c[:, None] * HK * V + o_v[None, :]
            tl.store(p, b_dv.to(dv.dtype.element_ty), mask=m_t[:, None] & (o_v < V - j)[None, :])
        if received != 0:
            values = b_k.to(tl.float32)
            chosen = tl.sum(values * values, 1) == largest
            b_dk += tl.where(chosen[:, None], received * values, 0.0)
        p = p_dk + o_c[:, None] * HK * R + o_r[None, :]
        tl.store(p, b_dk.to(dk.dtype.element_ty), mask=m_t[:, None] & (o_r < R)[None, :])
