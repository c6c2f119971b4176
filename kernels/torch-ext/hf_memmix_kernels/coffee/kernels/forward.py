"""COFFEE forward: the fused sequential scan. `tiles.py` says how the states lie in threads."""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import (
    advance,
    advance_short,
    argument,
    dot,
    load_gates,
    load_rows,
    load_states,
    scaled,
    sigmoid,
    store_states,
)


@triton.jit
def filtered(x, C, F, NS: tl.constexpr, L: tl.constexpr, S: tl.constexpr, FILTER: tl.constexpr, MATH: tl.constexpr):
    """y = C . x, through the output filter if there is one."""
    y = dot(x, C, NS, L, S)
    if FILTER:
        y = y * sigmoid(argument(dot(x, F, NS, L, S), MATH), MATH)
    return y


@triton.jit
def _group(
    x, z, us, factors, weights, p_y, p_k, t, m_f, m_y,
    D: tl.constexpr, NP: tl.constexpr, CK: tl.constexpr, SAVE: tl.constexpr, P: tl.constexpr, NS: tl.constexpr,
    L: tl.constexpr, S: tl.constexpr, FORM: tl.constexpr, FILTER: tl.constexpr, GATE: tl.constexpr,
    CHAIN: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """P tokens: their outputs stored, the states after them (and with CHAIN what their next gates take, z = w x)."""
    lam, w, C, F = weights
    for k in tl.static_range(P):
        # where CK > P only every CK // P th group keeps its state
        if SAVE and k % CK == 0:  # noqa: SIM102
            if CK <= P or t % CK == 0:
                store_states(p_k + tl.cast((t + k) // CK, tl.int64) * (D * NP), 0, m_f, S, x, NS, NP)
        if CHAIN:
            x, z = advance_short(x, z, us[k], lam, w, NS, MATH)
        else:
            x, phi = advance(x, us[k], factors[k], lam, w, NS, FORM, GATE, MATH)
        y = filtered(x, C, F, NS, L, S, FILTER, MATH)
        tl.store(p_y + k * D, y.to(p_y.dtype.element_ty), mask=m_y)
    return x, z


@launched
@triton.jit(do_not_specialize=("T", "gate_t", "gate_d"))
def coffee_fwd_kernel(
    inputs, x0, outputs, cu_seqlens, T, gate_t, gate_d,
    D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, S: tl.constexpr, NS: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, CK: tl.constexpr, FORM: tl.constexpr, FILTER: tl.constexpr, GATE: tl.constexpr,
    PACKED: tl.constexpr, SAVE: tl.constexpr, CHAIN: tl.constexpr, MATH: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One sequence, L lanes: y of every token, the final state, and the state before every CK-th token."""
    u, lam, w, C, F, gate = inputs
    y, final, checkpoints = outputs
    BLOCKS: tl.constexpr = (D * S + L - 1) // L
    i_n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    lane = tl.program_id(0) % BLOCKS * L + tl.arange(0, L)
    f, split = lane // S, lane % S
    m_f = f < D
    m_y = m_f & (split == 0)
    if PACKED:
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        slot = bos // CK + i_n
    else:
        bos = i_n * T
        length = T
        slot = i_n * ((T + CK - 1) // CK)
    b_lam = load_states(lam, f * N + split, m_f, S, NS, ACC, N - split)
    b_w = scaled(load_states(w, f * N + split, m_f, S, NS, ACC, N - split), NS, FORM, MATH)
    b_C = load_states(C, f * N + split, m_f, S, NS, ACC, N - split)
    b_F = b_C
    if FILTER:
        b_F = load_states(F, f * N + split, m_f, S, NS, ACC, N - split)
    weights = b_lam, b_w, b_C, b_F
    x = load_states(x0, (i_n * D + f) * N + split, m_f, S, NS, ACC, N - split)
    z = ()
    for i in tl.static_range(NS):
        z = z + (b_w[i] * x[i],)
    p_u = u + bos * D + f
    p_y = y + bos * D + f
    p_g = gate + bos * gate_t + f * gate_d if GATE else gate
    p_k = checkpoints + (slot * D + f) * NP + split
    # rows of the next group are loaded while this one is worked on
    us = load_rows(p_u, 0, D, m_f, length, P, ACC, True)
    factors = load_gates(p_g, 0, gate_t, m_f, length, P, ACC, GATE)
    full = length // P * P
    for t in range(0, full, P):
        left = length - t - P
        us_next = load_rows(p_u, P * D, D, m_f, left, P, ACC, True)
        if GATE:
            factors_next = load_gates(p_g, P * gate_t, gate_t, m_f, left, P, ACC, GATE)
        x, z = _group(
            x, z, us, factors, weights, p_y, p_k, t, m_f, m_y, D, NP, CK, SAVE,
            P, NS, L, S, FORM, FILTER, GATE, CHAIN, MATH,
        )  # fmt: skip
        us = us_next
        if GATE:
            factors = factors_next
            p_g += P * gate_t
        p_u += P * D
        p_y += P * D
    # what fills no group, token by token: a second unrolled copy would double the time to compile, and more
    for t in range(full, length):
        us_one = load_rows(p_u, 0, D, m_f, 1, 1, ACC, False)
        factors_one = load_gates(p_g, 0, gate_t, m_f, 1, 1, ACC, GATE)
        x, z = _group(
            x, z, us_one, factors_one, weights, p_y, p_k, t, m_f, m_y, D, NP, CK, SAVE,
            1, NS, L, S, FORM, FILTER, GATE, CHAIN, MATH,
        )  # fmt: skip
        if GATE:
            p_g += gate_t
        p_u += D
        p_y += D
    store_states(final, (i_n * D + f) * N + split, m_f, S, x, NS, N - split)
