"""Short convolution in Triton: one read and one write of the activations per pass, plus an in-place decode step.

Tiles never cross a sequence. A program walks its tile's rows in time order and keeps the last K inputs, in backward
also the last K pre-activation gradients, in registers: every element is loaded and its activation evaluated once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._chunks import chunk_table
from .._common import compute_dtype, num_sequences

# rows loaded ahead of use: enough loads in flight to cover the memory latency
PREFETCH = tl.constexpr(4)


@triton.jit
def _tile(
    i_t, cu_seqlens, first, sequence, lengths, T, NT, BT: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr
):
    """The tile's sequence, that sequence's first row and length, and the tile's first position in it."""
    if PACKED:  # noqa: SIM102
        i_n = tl.load(sequence + i_t)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        start = (i_t - tl.load(first + i_n)) * BT
    else:
        i_n = i_t // NT
        bos = i_n.to(tl.int64) * T
        length = T
        if RAGGED:
            length = tl.load(lengths + i_n).to(tl.int32)
        start = (i_t % NT) * BT
    return i_n, bos, length, start


@triton.jit
def _windows(
    x, weight, state, o_c, m_c, o_n, bos, start, length, C,
    K: tl.constexpr, ACC: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The taps, and the K inputs before the tile, oldest first, the oldest about to leave."""
    w, xs = (), ()
    for j in tl.static_range(K):
        w = w + (tl.load(weight + o_c * K + j, mask=m_c, other=0).to(ACC),)
        o_s = start - K + j
        b_x = tl.load(x + (bos + o_s) * C + o_c, mask=m_c & (o_s >= 0) & (o_s < length), other=0).to(ACC)
        if HAS_STATE:
            b_x += tl.load(state + o_n + (o_s + K - 1), mask=m_c & (o_s < 0) & (o_s + K > 0), other=0).to(ACC)
        xs = xs + (b_x,)
    return w, xs


@triton.jit
def short_conv_fwd_kernel(
    x, weight, bias, state, y, final, cu_seqlens, first, sequence, lengths,
    T, NT, N, C,
    K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """y of one tile of rows and one block of channels; the tile of the last token writes the final state."""
    i_t, i_c = tl.program_id(0), tl.program_id(1)
    if PACKED:  # noqa: SIM102
        # the grid is an upper bound: programs beyond the last chunk have nothing to do
        if tl.load(sequence + i_t) >= N:
            return
    i_n, bos, length, start = _tile(i_t, cu_seqlens, first, sequence, lengths, T, NT, BT, PACKED, RAGGED)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    o_n = (i_n.to(tl.int64) * C + o_c) * (K - 1)
    b_b = tl.zeros([BC], ACC)
    if HAS_BIAS:
        b_b = tl.load(bias + o_c, mask=m_c, other=0).to(ACC)
    w, xs = _windows(x, weight, state, o_c, m_c, o_n, bos, start, length, C, K, ACC, HAS_STATE)
    stop = tl.minimum(start + BT, T if RAGGED else length)
    for t in range(start, stop, PREFETCH):
        rows = ()
        for u in tl.static_range(PREFETCH):
            rows = rows + (tl.load(x + (bos + t + u) * C + o_c, mask=m_c & (t + u < length), other=0),)
        for u in tl.static_range(PREFETCH):
            xs = xs[1:] + (rows[u].to(ACC),)
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
            b_f = tl.load(x + (bos + i_s) * C + o_c, mask=m_c & (i_s >= 0), other=0)
            if HAS_STATE:
                b_f += tl.load(state + o_n + i_s + K - 1, mask=m_c & (i_s < 0), other=0).to(b_f.dtype)
            tl.store(final + o_n + j, b_f, mask=m_c)


@triton.jit
def short_conv_bwd_kernel(
    dy, dfinal, x, weight, bias, state, dx, dparams, dstate, cu_seqlens, first, sequence, lengths,
    T, NT, N, C,
    K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """dx of one tile and its share of dw and db [K + 1, C]; a sequence's first tile writes the state's gradient."""
    i_t, i_c = tl.program_id(0), tl.program_id(1)
    if PACKED:  # noqa: SIM102
        if tl.load(sequence + i_t) >= N:
            return
    i_n, bos, length, start = _tile(i_t, cu_seqlens, first, sequence, lengths, T, NT, BT, PACKED, RAGGED)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    o_n = (i_n.to(tl.int64) * C + o_c) * (K - 1)
    zero = tl.zeros([BC], ACC)
    b_b = zero
    if HAS_BIAS:
        b_b = tl.load(bias + o_c, mask=m_c, other=0).to(ACC)
    w, xs = _windows(x, weight, state, o_c, m_c, o_n, bos, start, length, C, K, ACC, HAS_STATE)
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
            rows_x = rows_x + (tl.load(x + (bos + t + u) * C + o_c, mask=m_u, other=0).to(ACC),)
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
            # gradients of the parameters belong to the tile's own rows, not to the K-1 it looks ahead
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
            tl.store(dx + (bos + i_p) * C + o_c, b_dx.to(dx.dtype.element_ty), mask=m_c & (i_p >= start) & m_p)
            m_s = (i_p < 0) & (start == 0)
            tl.store(dstate + o_n + i_s, b_dx.to(dstate.dtype.element_ty), mask=m_c & m_s)
    p_w = dparams + i_t.to(tl.int64) * (K + 1) * C + o_c
    for j in tl.static_range(K):
        tl.store(p_w + j * C, dws[j], mask=m_c)
    tl.store(p_w + K * C, b_db, mask=m_c)


@triton.jit
def short_conv_step_kernel(
    x, weight, bias, state, y, C,
    K: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, ACC: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One token of one sequence and block of channels: y, and the state shifted by one."""
    i_b, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_s = state + (i_b * C + o_c) * (K - 1)
    b_x = tl.load(x + i_b * C + o_c, mask=m_c, other=0)
    b_z = b_x.to(ACC) * tl.load(weight + o_c * K + K - 1, mask=m_c, other=0).to(ACC)
    if HAS_BIAS:
        b_z += tl.load(bias + o_c, mask=m_c, other=0).to(ACC)
    for j in tl.static_range(K - 1):
        b_s = tl.load(p_s + j, mask=m_c, other=0)
        b_z += b_s.to(ACC) * tl.load(weight + o_c * K + j, mask=m_c, other=0).to(ACC)
        if j > 0:
            tl.store(p_s + j - 1, b_s, mask=m_c)
    tl.store(p_s + K - 2, b_x.to(state.dtype.element_ty), mask=m_c)
    if SILU:
        b_z = b_z / (1 + tl.exp(-b_z))
    tl.store(y + i_b * C + o_c, b_z.to(y.dtype.element_ty), mask=m_c)


def _accumulator(x: Tensor):
    return tl.float64 if compute_dtype(x.dtype) == torch.float64 else tl.float32


def _launch_shape(x: Tensor, cu_seqlens: Tensor | None, BT: int):
    """Chunk tables and the number of tiles along time."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        NT = max(1, triton.cdiv(T, BT))
        return None, None, NT, B * NT
    first, sequence, bound = chunk_table(cu_seqlens, T, BT)
    return first, sequence, 1, bound


def short_conv_fwd_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, C] and the final states [N, C, K-1], both in x.dtype."""
    x, weight = x.contiguous(), weight.contiguous()
    (_, T, C), K = x.shape, weight.shape[1]
    N = num_sequences(x.shape[0], cu_seqlens)
    y = torch.empty_like(x)
    # a sequence without tokens has no tile that writes its final state: it keeps the initial one
    if initial_state is None:
        final = x.new_zeros(N, C, K - 1)
    else:
        initial_state = initial_state.contiguous()
        final = initial_state.to(x.dtype, copy=True)
    BT, BC = (64 if T > 512 else 16), min(512, triton.next_power_of_2(C))
    first, sequence, NT, tiles = _launch_shape(x, cu_seqlens, BT)
    short_conv_fwd_kernel[(tiles, triton.cdiv(C, BC))](
        x, weight, bias, initial_state, y, final, cu_seqlens, first, sequence, lengths, T, NT, N, C,
        K=K, BT=BT, BC=BC, SILU=silu, ACC=_accumulator(x), HAS_BIAS=bias is not None,
        HAS_STATE=initial_state is not None, PACKED=cu_seqlens is not None, RAGGED=lengths is not None, num_warps=4,
    )  # fmt: skip
    return y, final


def short_conv_bwd_triton(
    dy: Tensor,
    dstate: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dx, dweight, dbias [C] and the gradient of the initial states [N, C, K-1]."""
    dy, dstate, x, weight = dy.contiguous(), dstate.contiguous(), x.contiguous(), weight.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    (_, T, C), K = x.shape, weight.shape[1]
    dx = torch.zeros_like(x) if lengths is not None else torch.empty_like(x)
    dinitial = dstate.clone()
    BT, BC = (128 if T > 512 else 32), min(256, triton.next_power_of_2(C))
    first, sequence, NT, tiles = _launch_shape(x, cu_seqlens, BT)
    # unused tiles of a packed launch write nothing
    dparams = (torch.zeros if cu_seqlens is not None else torch.empty)(
        tiles, K + 1, C, dtype=compute_dtype(x.dtype), device=x.device
    )
    short_conv_bwd_kernel[(tiles, triton.cdiv(C, BC))](
        dy, dstate, x, weight, bias, initial_state, dx, dparams, dinitial, cu_seqlens, first, sequence, lengths,
        T, NT, num_sequences(x.shape[0], cu_seqlens), C,
        K=K, BT=BT, BC=BC, SILU=silu, ACC=_accumulator(x), HAS_BIAS=bias is not None,
        HAS_STATE=initial_state is not None, PACKED=cu_seqlens is not None, RAGGED=lengths is not None, num_warps=4,
    )  # fmt: skip
    dparams = dparams.sum(0)
    return dx, dparams[:K].T.contiguous(), dparams[K].clone(), dinitial


def short_conv_step_triton(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool) -> Tensor:
    """One token [B, 1, C]; shifts `state` [B, C, K-1] in place, in one launch."""
    x, weight = x.contiguous(), weight.contiguous()
    B, _, C = x.shape
    K = weight.shape[1]
    target = state if state.is_contiguous() else state.contiguous()
    y = torch.empty_like(x)
    BC = min(256, triton.next_power_of_2(C))
    short_conv_step_kernel[(B, triton.cdiv(C, BC))](
        x, weight, bias, target, y, C,
        K=K, BC=BC, SILU=silu, ACC=_accumulator(x), HAS_BIAS=bias is not None, num_warps=2,
    )  # fmt: skip
    if target is not state:
        state.copy_(target)
    return y
