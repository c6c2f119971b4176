"""The scans over the chunks, forward and in reverse, and the output of every chunk.

    X = Y - W S,    S <- e^(G_C) S + (beta e^(G_C - G) * K)^T X
    dW = s B^T do + (e^(G_C - G) * K) dS,    dS <- e^(G_C) dS + s (e^G * Q)^T do - W^T (beta dW)

A program has all channels of the keys and a block of those of the values, because X needs the whole state. Every
operand that does not depend on the state comes from memory as it is, so that it can be loaded ahead: one decay per
head scales rows of the products, decays of channels are already in `k`, e^(G_C - G) K, and in `q`, s e^G Q.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from ...gla.kernels.tiles import locate_chunk, locate_sequence
from .tiles import load_end


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_scan_kernel(
    inputs, initial, outputs, layout, T, sizes, stride,
    RK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The states before every chunk, the errors X, and the last state."""
    k, G, beta, W, Y = inputs
    states, X, final = outputs
    cu_seqlens, first = layout
    NT, N, H, K, V = sizes
    i_v, i_nh = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    i_n, i_h = i_nh // H, i_nh % H
    bos, length = locate_sequence(i_n, cu_seqlens, T, PACKED)
    i_c = tl.load(first + i_n) if PACKED else i_n * NT
    o_k, o_v, o_t = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, BT)
    m_k, m_v = o_k < K, o_v < V
    o_s, m_s = o_k[:, None] * V + o_v[None, :], m_k[:, None] & m_v[None, :]
    b_s = tl.load(initial + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0).to(ACC)
    for i_t in range(0, tl.cdiv(length, BT)):
        m_t = i_t * BT + o_t < length
        o_row = bos + i_t * BT + o_t
        m_tk, m_tv = m_t[:, None] & m_k[None, :], m_t[:, None] & m_v[None, :]
        b_W = tl.load(W + (o_row * H + i_h)[:, None] * K + o_k[None, :], mask=m_tk, other=0)
        b_k = tl.load(k + o_row[:, None] * stride + i_h // RK * K + o_k[None, :], mask=m_tk, other=0)
        b_Y = tl.load(Y + (o_row * H + i_h)[:, None] * V + o_v[None, :], mask=m_tv, other=0)
        b_beta = tl.load(beta + o_row * H + i_h, mask=m_t, other=0)
        b_end = load_end(G, bos + tl.minimum(i_t * BT + BT, length) - 1, i_h, H, K, o_k, CHANNELS)
        b_state = b_s.to(states.dtype.element_ty)
        tl.store(states + ((i_c + i_t).to(tl.int64) * H + i_h) * K * V + o_s, b_state, mask=m_s)
        b_X = b_Y.to(ACC) - tl.dot(b_W, b_state, input_precision=PRECISION, out_dtype=ACC)
        tl.store(X + (o_row * H + i_h)[:, None] * V + o_v[None, :], b_X.to(X.dtype.element_ty), mask=m_tv)
        if CHANNELS:
            b_w = b_X * b_beta[:, None]
        else:
            b_G = tl.load(G + o_row * H + i_h, mask=m_t, other=0)
            b_w = b_X * (b_beta[:, None] * tl.exp(b_end - b_G[:, None]))
        b_s *= tl.trans(tl.exp(b_end))
        b_s = tl.dot(tl.trans(b_k), b_w.to(b_k.dtype), b_s, input_precision=PRECISION, out_dtype=ACC)
    tl.store(final + i_nh.to(tl.int64) * K * V + o_s, b_s, mask=m_s)


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_scan_back_kernel(
    upstream, inputs, outputs, layout, scale, T, sizes, strides,
    RQ: tl.constexpr, RK: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of the states after every chunk, those of beta X, and that of the initial state."""
    do, dfinal = upstream
    q, k, G, beta, W, B = inputs
    dstates, dwrites, dinitial = outputs
    cu_seqlens, first = layout
    NT, N, H, K, V = sizes
    s_q, s_k = strides
    i_v, i_nh = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV)
    i_n, i_h = i_nh // H, i_nh % H
    bos, length = locate_sequence(i_n, cu_seqlens, T, PACKED)
    i_c = tl.load(first + i_n) if PACKED else i_n * NT
    chunks = tl.cdiv(length, BT)
    o_k, o_v, o_t = tl.arange(0, BK), i_v * BV + tl.arange(0, BV), tl.arange(0, BT)
    m_k, m_v = o_k < K, o_v < V
    o_s, m_s = o_k[:, None] * V + o_v[None, :], m_k[:, None] & m_v[None, :]
    b_ds = tl.load(dfinal + i_nh.to(tl.int64) * K * V + o_s, mask=m_s, other=0).to(ACC)
    for i in range(0, chunks):
        i_t = chunks - 1 - i
        m_t = i_t * BT + o_t < length
        o_row = bos + i_t * BT + o_t
        m_tk, m_tv = m_t[:, None] & m_k[None, :], m_t[:, None] & m_v[None, :]
        b_do = tl.load(do + (o_row * H + i_h)[:, None] * V + o_v[None, :], mask=m_tv, other=0)
        b_B = tl.load(B + (o_row * H + i_h)[:, None] * BT + o_t[None, :], mask=m_t[:, None], other=0)
        b_k = tl.load(k + o_row[:, None] * s_k + i_h // RK * K + o_k[None, :], mask=m_tk, other=0)
        b_q = tl.load(q + o_row[:, None] * s_q + i_h // RQ * K + o_k[None, :], mask=m_tk, other=0)
        b_W = tl.load(W + (o_row * H + i_h)[:, None] * K + o_k[None, :], mask=m_tk, other=0)
        b_beta = tl.load(beta + o_row * H + i_h, mask=m_t, other=0)
        b_end = load_end(G, bos + tl.minimum(i_t * BT + BT, length) - 1, i_h, H, K, o_k, CHANNELS)
        b_dstate = b_ds.to(dstates.dtype.element_ty)
        tl.store(dstates + ((i_c + i_t).to(tl.int64) * H + i_h) * K * V + o_s, b_dstate, mask=m_s)
        b_dw = tl.dot(tl.trans(b_B), b_do, input_precision=PRECISION, out_dtype=ACC) * scale
        if CHANNELS:
            b_dw = tl.dot(b_k, b_dstate, b_dw, input_precision=PRECISION, out_dtype=ACC)
            b_read = b_do
        else:
            b_G = tl.load(G + o_row * H + i_h, mask=m_t, other=0)[:, None]
            b_dw += tl.dot(b_k, b_dstate, input_precision=PRECISION, out_dtype=ACC) * tl.exp(b_end - b_G)
            b_read = (b_do.to(ACC) * (scale * tl.exp(b_G))).to(b_q.dtype)
        tl.store(dwrites + (o_row * H + i_h)[:, None] * V + o_v[None, :], b_dw.to(dwrites.dtype.element_ty), mask=m_tv)
        b_dw *= -b_beta[:, None]
        b_high = b_dw.to(b_W.dtype)
        b_ds *= tl.trans(tl.exp(b_end))
        b_ds = tl.dot(tl.trans(b_q), b_read, b_ds, input_precision=PRECISION, out_dtype=ACC)
        b_ds = tl.dot(tl.trans(b_W), b_high, b_ds, input_precision=PRECISION, out_dtype=ACC)
        if CHANNELS and W.dtype.element_ty != ACC:  # one of four roundings of equal size; decays per head have three
            b_low = (b_dw - b_high.to(ACC)).to(b_W.dtype)
            b_ds = tl.dot(tl.trans(b_W), b_low, b_ds, input_precision=PRECISION, out_dtype=ACC)
    tl.store(dinitial + i_nh.to(tl.int64) * K * V + o_s, b_ds, mask=m_s)


@launched
@triton.jit(do_not_specialize=["T"])
def gated_delta_output_kernel(
    inputs, chunks, o, layout, scale, T, sizes, stride,
    RQ: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """o = (decayed q) S + scale B (beta X); with one decay per head, e^G scales rows of the product."""
    q, G, beta = inputs
    states, X, B = chunks
    NT, N, H, K, V = sizes
    i_v, i_c, i_h = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(0) // tl.cdiv(V, BV), tl.program_id(1)
    bos, length = locate_chunk(i_c, layout, T, NT, N, BT, PACKED)
    if PACKED and length <= 0:
        return
    o_t, o_v = tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    m_t, m_v, o_row = o_t < length, o_v < V, bos + o_t
    m_tv = m_t[:, None] & m_v[None, :]
    p_s = states + (i_c.to(tl.int64) * H + i_h) * K * V
    b_B = tl.load(B + (o_row * H + i_h)[:, None] * BT + o_t[None, :], mask=m_t[:, None], other=0)
    b_X = tl.load(X + (o_row * H + i_h)[:, None] * V + o_v[None, :], mask=m_tv, other=0)
    b_x = (b_X.to(ACC) * tl.load(beta + o_row * H + i_h, mask=m_t, other=0)[:, None]).to(b_X.dtype)
    b_o = tl.zeros([BT, BV], ACC)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        b_q = tl.load(q + o_row[:, None] * stride + i_h // RQ * K + o_k[None, :], mask=m_tk, other=0)
        b_h = tl.load(p_s + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0)
        b_o = tl.dot(b_q, b_h, b_o, input_precision=PRECISION, out_dtype=ACC)
    if not CHANNELS:
        b_o *= scale * tl.exp(tl.load(G + o_row * H + i_h, mask=m_t, other=0))[:, None]
    b_o += scale * tl.dot(b_B, b_x, input_precision=PRECISION, out_dtype=ACC)
    tl.store(o + (o_row * H + i_h)[:, None] * V + o_v[None, :], b_o.to(o.dtype.element_ty), mask=m_tv)
