"""Backward kernel of short_conv. It reads tokens as the forward kernel does and also keeps the last K gradients of the
preactivation in registers.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import PREFETCH, cut, load_window, locate_tile


@launched
@triton.jit
def short_conv_bwd_kernel(
    upstream, inputs, grads, layout, T, NT, N, C, stride,
    K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """dx of one tile and its share of dw and db [K + 1, C]; a sequence's first tile writes the state's gradient."""
    dy, dfinal = upstream
    x, weight, bias, state = inputs
    dx, dparams, dstate = grads
    cu_seqlens, first, sequence, lengths = layout
    i_t, i_c = tl.program_id(0), tl.program_id(1)
    if PACKED:  # noqa: SIM102
        if tl.load(sequence + i_t) >= N:
            return
    i_n, bos, length, start = locate_tile(i_t, cu_seqlens, first, sequence, lengths, T, NT, BT, PACKED, RAGGED)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    o_n = (i_n.to(tl.int64) * C + o_c) * (K - 1)
    zero = tl.zeros([BC], ACC)
    b_b = zero
    if HAS_BIAS:
        b_b = tl.load(bias + o_c, mask=m_c, other=0).to(ACC)
    w, xs = load_window(x, stride, weight, state, o_c, m_c, o_n, bos, start, length, C, K, ACC, HAS_STATE, LIMIT)
    dzs, dws = (), ()
    for _ in tl.static_range(K):
        dzs = dzs + (zero,)
        dws = dws + (zero,)
    b_db = zero
    stop = start + BT
    for t in range(start, stop + K - 1, PREFETCH):
        rows_x, rows_dy = (), ()
        for u in tl.static_range(PREFETCH):
            m_u = m_c & (t + u < length)
            b_x = tl.load(x + (bos + t + u) * stride + o_c, mask=m_u, other=0).to(ACC)
            rows_x = rows_x + (cut(b_x, LIMIT),)
            rows_dy = rows_dy + (tl.load(dy + (bos + t + u) * C + o_c, mask=m_u, other=0).to(ACC),)
        for u in tl.static_range(PREFETCH):
            i_s = t + u
            xs = xs[1:] + (rows_x[u],)
            b_dz = rows_dy[u]
            if SILU:
                b_z = b_b
                for j in tl.static_range(K):
                    b_z += w[j] * xs[j]
                b_g = 1 / (1 + tl.exp(-b_z))
                b_dz = b_dz * b_g * (1 + b_z * (1 - b_g))
            dzs = dzs[1:] + (b_dz,)
            # gradients of the parameters count the tile's own rows, not the K-1 rows after it that it also reads
            b_own = tl.where(i_s < stop, b_dz, 0)
            b_db += b_own
            acc = ()
            b_dx = zero
            for j in tl.static_range(K):
                acc = acc + (dws[j] + b_own * xs[j],)
                b_dx += w[K - 1 - j] * dzs[j]
            dws = acc
            i_p = i_s - (K - 1)
            o_f = i_p - (length - (K - 1))
            m_p = (i_p < stop) & (i_p < length)
            b_dx += tl.load(dfinal + o_n + o_f, mask=m_c & (o_f >= 0) & m_p, other=0).to(ACC)
            m_s = (i_p < 0) & (start == 0)
            tl.store(dstate + o_n + i_s, b_dx.to(dstate.dtype.element_ty), mask=m_c & m_s)
            if LIMIT is not None:
                # xs[0] is the input whose gradient this is
                b_dx = tl.where(tl.abs(xs[0]) < LIMIT, b_dx, 0)
            tl.store(dx + (bos + i_p) * C + o_c, b_dx.to(dx.dtype.element_ty), mask=m_c & (i_p >= start) & m_p)
    p_w = dparams + i_t.to(tl.int64) * (K + 1) * C + o_c
    for j in tl.static_range(K):
        tl.store(p_w + j * C, dws[j], mask=m_c)
    tl.store(p_w + K * C, b_db, mask=m_c)
