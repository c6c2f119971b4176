"""COFFEE backward: recomputes the states from the checkpoints in groups of P tokens, and goes through them in reverse.

`carry` is dL/dx as a token passes it to the token before: g = C dy + carry, carry' = J g. A program handles one
segment of a sequence. With SUMMARY it computes only the segment's map carry' = A carry + b, so that segments can run
in parallel: first all maps, then `affine_scan_kernel` over the segments, then this kernel again from the right
carries.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import (
    INPUT,
    advance,
    argument,
    dot,
    load_gates,
    load_rows,
    load_states,
    over_states,
    scaled,
    sigmoid,
    store_states,
)


@triton.jit
def _reverse_group(
    x, carry, prod, grads, rows, weights, p_du, p_dg, D, m_y,
    P: tl.constexpr, NS: tl.constexpr, L: tl.constexpr, S: tl.constexpr, FORM: tl.constexpr, FILTER: tl.constexpr,
    GATE: tl.constexpr, DGATE: tl.constexpr, SUMMARY: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """P tokens from the states x before them; grads holds dlam, dw, dC and dw_filter, NS of each, in one tuple."""
    us, dys, factors = rows
    lam, w, w2, C, F = weights
    # forward: the states and gates of the group, flat [P * NS]
    xs, phis, dvalue, dfilter = x, (), (), ()
    for k in tl.static_range(P):
        x, phi = advance(x, us[k], factors[k], lam, w2, NS, FORM, GATE, MATH)
        xs = xs + x
        phis = phis + phi
        if FILTER:
            gain = sigmoid(argument(dot(x, F, NS, L, S), MATH), MATH)
            dvalue = dvalue + (dys[k] * gain,)
            dfilter = dfilter + (dys[k] * dot(x, C, NS, L, S) * gain * (1 - gain),)
        else:
            dvalue = dvalue + (dys[k],)
    for k in tl.static_range(P - 1, -1, -1):
        u = us[k]
        du = u * 0
        dg = du
        after_carry, after_prod = (), ()
        dlams, dws, dCs, dFs = (), (), (), ()
        for i in tl.static_range(NS):
            x_i = xs[k * NS + i]
            x_after = xs[(k + 1) * NS + i]
            phi = phis[k * NS + i]
            g = C[i] * dvalue[k] + carry[i]
            if FILTER:
                g += F[i] * dfilter[k]
            v = lam[i] * x_i + u
            if DGATE and not SUMMARY:
                dg += g * phi * v
            # the gate's derivative by its argument, times its factor
            slope = v
            if FORM <= INPUT:
                slope = (phi - phi * phi) * v
            s = phi
            if GATE:
                s = phi * factors[k]
                slope = slope * factors[k]
            if SUMMARY:
                J = 1 + lam[i] * s
                if FORM % 2 == 0:
                    J += w[i] * slope
                after_carry = after_carry + (J * g,)
                after_prod = after_prod + (J * prod[i],)
            else:
                gs = g * s
                du += gs
                below = g + lam[i] * gs
                dlams = dlams + (grads[i] + gs * x_i,)
                inner = g * slope
                if FORM % 2 == 0:
                    below += w[i] * inner
                    dws = dws + (grads[NS + i] + inner * x_i,)
                elif FORM == INPUT:
                    du += w[i] * inner
                    dws = dws + (grads[NS + i] + inner * u,)
                else:
                    dws = dws + (grads[NS + i],)
                dCs = dCs + (grads[2 * NS + i] + dvalue[k] * x_after,)
                if FILTER:
                    dFs = dFs + (grads[3 * NS + i] + dfilter[k] * x_after,)
                after_carry = after_carry + (below,)
        carry = after_carry
        if SUMMARY:
            prod = after_prod
        else:
            grads = dlams + dws + dCs + dFs
            du = over_states(du, L, S).to(p_du.dtype.element_ty)
            tl.store(p_du + k * D, du, mask=m_y)
            if DGATE:
                dg = over_states(dg, L, S).to(p_dg.dtype.element_ty)
                tl.store(p_dg + k * D, dg, mask=m_y)
    return carry, prod, grads


@triton.jit
def _walk(
    x, p_u, p_g, t, tokens, gate_t, m_f, lam, w2, D, NS: tl.constexpr, FORM: tl.constexpr, GATE: tl.constexpr,
    MATH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The states `tokens` tokens after x, which is the one before token t."""
    for k in range(tokens):
        us = load_rows(p_u, (t + k) * D, D, m_f, 1, 1, ACC, False)
        factors = load_gates(p_g, (t + k) * gate_t, gate_t, m_f, 1, 1, ACC, GATE)
        x, phi = advance(x, us[0], factors[0], lam, w2, NS, FORM, GATE, MATH)
    return x


@triton.jit
def _before_group(
    p_k, p_u, p_g, g, gate_t, m_f, lam, w2, D, P: tl.constexpr, R: tl.constexpr, NP: tl.constexpr, S: tl.constexpr,
    NS: tl.constexpr, FORM: tl.constexpr, GATE: tl.constexpr, MATH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The states before group g, from the last checkpoint at or before it."""
    x = load_states(p_k, (g // R).to(tl.int64) * D * NP, m_f, S, NS, ACC, NP)
    if R > 1:
        for r in range(g % R):
            t = (g // R * R + r).to(tl.int64) * P
            us = load_rows(p_u, t * D, D, m_f, P, P, ACC, False)
            factors = load_gates(p_g, t * gate_t, gate_t, m_f, P, P, ACC, GATE)
            for k in tl.static_range(P):
                x, phi = advance(x, us[k], factors[k], lam, w2, NS, FORM, GATE, MATH)
    return x


@launched
@triton.jit(do_not_specialize=("T", "gate_t", "gate_d", "segment", "segments"))
def coffee_bwd_kernel(
    upstream, inputs, checkpoints, grads, maps, cu_seqlens, T, gate_t, gate_d, segment, segments,
    D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, S: tl.constexpr, NS: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, FORM: tl.constexpr, FILTER: tl.constexpr, GATE: tl.constexpr,
    DGATE: tl.constexpr, PACKED: tl.constexpr, PARALLEL: tl.constexpr, SUMMARY: tl.constexpr,
    MATH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One segment of `segment` groups of one sequence, L lanes; a checkpoint every R groups.

    dparams is [programs' rows, 4, D, N]: each program's share of dlam, dw, dC, dw_filter. In PARALLEL `b` holds the
    carries that enter the segments, with SUMMARY it receives their maps together with A.
    """
    dy, dfinal = upstream
    u, lam, w, C, F, gate = inputs
    du, dgate, dparams, dx0 = grads
    A, b = maps
    BLOCKS: tl.constexpr = (D * S + L - 1) // L
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_n = row // segments
    i_s = (row % segments).to(tl.int32)
    lane = tl.program_id(0) % BLOCKS * L + tl.arange(0, L)
    f, split = lane // S, lane % S
    m_f = f < D
    m_y = m_f & (split == 0)
    if PACKED:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        slot = bos // (P * R) + i_n
    else:
        bos = i_n * T
        length = T
        slot = i_n * ((T + P * R - 1) // (P * R))
    o_p = f * N + split
    b_lam = load_states(lam, o_p, m_f, S, NS, ACC, N - split)
    b_w = load_states(w, o_p, m_f, S, NS, ACC, N - split)
    b_w2 = scaled(b_w, NS, FORM, MATH)
    b_C = load_states(C, o_p, m_f, S, NS, ACC, N - split)
    b_F = b_C
    if FILTER:
        b_F = load_states(F, o_p, m_f, S, NS, ACC, N - split)
    weights = b_lam, b_w, b_w2, b_C, b_F
    o_x = (i_n * D + f) * N + split
    o_s = (row * D + f) * NP + split
    zero = tl.zeros([L], ACC)
    one = zero + 1
    sums, prod, carry = (), (), ()
    for _i in tl.static_range(NS):
        prod = prod + (one,)
        carry = carry + (zero,)
    for _i in tl.static_range(4 * NS if FILTER else 3 * NS):
        sums = sums + (zero,)
    if not SUMMARY:
        if PARALLEL:
            carry = load_states(b, o_s, m_f, S, NS, ACC, NP)
        else:
            carry = load_states(dfinal, o_x, m_f, S, NS, ACC, N - split)
    p_u, p_dy, p_du, p_dg = u + bos * D + f, dy + bos * D + f, du + bos * D + f, dgate + bos * D + f
    p_g = gate + bos * gate_t + f * gate_d if GATE else gate
    p_k = checkpoints + (slot * D + f) * NP + split
    first = i_s * segment
    stop = tl.minimum((length + P - 1) // P, first + segment)
    if first < stop:
        whole = tl.minimum(length // P, stop)
        if whole < stop:
            # the sequence's last group fills no group: token by token, each from the group's start again; a second
            # unrolled copy would double the time to compile, and more
            x = _before_group(
                p_k, p_u, p_g, whole, gate_t, m_f, b_lam, b_w2, D, P, R, NP, S, NS, FORM, GATE, MATH, ACC
            )  # fmt: skip
            t = whole.to(tl.int64) * P
            for back in range(length - whole * P):
                k = length - whole * P - 1 - back
                before = _walk(x, p_u, p_g, t, k, gate_t, m_f, b_lam, b_w2, D, NS, FORM, GATE, MATH, ACC)
                us_one = load_rows(p_u, (t + k) * D, D, m_f, 1, 1, ACC, False)
                dys_one = load_rows(p_dy, (t + k) * D, D, m_f, 1, 1, ACC, False)
                factors = load_gates(p_g, (t + k) * gate_t, gate_t, m_f, 1, 1, ACC, GATE)
                carry, prod, sums = _reverse_group(
                    before, carry, prod, sums, (us_one, dys_one, factors), weights,
                    p_du + (t + k) * D, p_dg + (t + k) * D, D, m_y, 1, NS, L, S, FORM, FILTER, GATE, DGATE, SUMMARY,
                    MATH,
                )  # fmt: skip
        for back in range(whole - first):
            g = whole - 1 - back
            t = g.to(tl.int64) * P
            x = _before_group(
                p_k, p_u, p_g, g, gate_t, m_f, b_lam, b_w2, D, P, R, NP, S, NS, FORM, GATE, MATH, ACC
            )  # fmt: skip
            us = load_rows(p_u, t * D, D, m_f, P, P, ACC, False)
            dys = load_rows(p_dy, t * D, D, m_f, P, P, ACC, False)
            factors = load_gates(p_g, t * gate_t, gate_t, m_f, P, P, ACC, GATE)
            carry, prod, sums = _reverse_group(
                x, carry, prod, sums, (us, dys, factors), weights, p_du + t * D, p_dg + t * D, D, m_y,
                P, NS, L, S, FORM, FILTER, GATE, DGATE, SUMMARY, MATH,
            )  # fmt: skip
    if SUMMARY:
        store_states(A, o_s, m_f, S, prod, NS, NP)
        store_states(b, o_s, m_f, S, carry, NS, NP)
    else:
        if i_s == 0:
            store_states(dx0, o_x, m_f, S, carry, NS, N - split)
        p_p = dparams + row * (4 * D * N) + o_p
        for j in tl.static_range(4 if FILTER else 3):
            store_states(p_p + j * D * N, 0, m_f, S, sums[j * NS : j * NS + NS], NS, N - split)
