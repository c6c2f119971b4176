"""Forward kernel of short_conv: a program reads the tokens of its tile in order and keeps the last K inputs in
registers.

Every element is loaded once and its activation is evaluated once.
"""

import triton
import triton.language as tl

from ..._recorder import launched
from .tiles import PREFETCH, cut, load_window, locate_tile


# the numbers of tokens and sequences change from batch to batch of a server: they must not compile another kernel
@launched
@triton.jit(do_not_specialize=["T", "NT", "N"])
def short_conv_fwd_kernel(
    inputs, y, final, layout, T, NT, N, C, stride,
    K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """y of one tile of rows and one block of channels; the tile of the last token writes the final state.

    Tokens of x are `stride` elements apart.
    """
    x, weight, bias, state = inputs
    cu_seqlens, first, sequence, lengths = layout
    i_t, i_c = tl.program_id(0), tl.program_id(1)
    if PACKED:  # noqa: SIM102
        # the grid is an upper bound; programs beyond the last chunk return
        if tl.load(sequence + i_t) >= N:
            return
    i_n, bos, length, start = locate_tile(i_t, cu_seqlens, first, sequence, lengths, T, NT, BT, PACKED, RAGGED)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    o_n = (i_n.to(tl.int64) * C + o_c) * (K - 1)
    b_b = tl.zeros([BC], ACC)
    if HAS_BIAS:
        b_b = tl.load(bias + o_c, mask=m_c, other=0).to(ACC)
    w, xs = load_window(x, stride, weight, state, o_c, m_c, o_n, bos, start, length, C, K, ACC, HAS_STATE, LIMIT)
    stop = tl.minimum(start + BT, T if RAGGED else length)
    for t in range(start, stop, PREFETCH):
        rows = ()
        for u in tl.static_range(PREFETCH):
            rows = rows + (tl.load(x + (bos + t + u) * stride + o_c, mask=m_c & (t + u < length), other=0),)
        for u in tl.static_range(PREFETCH):
            xs = xs[1:] + (cut(rows[u].to(ACC), LIMIT),)
            b_z = b_b
            for j in tl.static_range(K):
                b_z += w[j] * xs[j]
            if SILU:
                b_z = b_z / (1 + tl.exp(-b_z))
            if RAGGED:
                b_z = tl.where(t + u < length, b_z, 0)
            tl.store(y + (bos + t + u) * C + o_c, b_z.to(y.dtype.element_ty), mask=m_c & (t + u < stop))
    if (start < length) & (start + BT >= length):
        # the tile of the last token writes the final state
        for j in tl.static_range(K - 1):
            i_s = length - (K - 1) + j
            b_f = tl.load(x + (bos + i_s) * stride + o_c, mask=m_c & (i_s >= 0), other=0)
            b_f = cut(b_f.to(ACC), LIMIT).to(b_f.dtype)
            if HAS_STATE:
                b_f += tl.load(state + o_n + i_s + K - 1, mask=m_c & (i_s < 0), other=0).to(b_f.dtype)
            tl.store(final + o_n + j, b_f, mask=m_c)
