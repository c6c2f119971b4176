"""Launches of the short_conv kernels: one read and one write of the activations per pass."""

import torch
from torch import Tensor

from .._chunks import chunk_table
from .._common import compute_dtype, num_sequences
from .._groups import flat
from .._launch import accumulator, by_rows, cdiv, next_power_of_2, page_strides
from .._tape import taped
from .arguments import Inputs, Token, Upstream
from .kernels.backward import short_conv_bwd_kernel
from .kernels.forward import short_conv_fwd_kernel
from .kernels.step import short_conv_step_kernel


def _launch_shape(x: Tensor, cu_seqlens: Tensor | None, BT: int):
    """Chunk tables and the number of tiles along time."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        NT = max(1, cdiv(T, BT))
        return None, None, NT, B * NT
    first, sequence, bound = chunk_table(cu_seqlens, T, BT)
    return first, sequence, 1, bound


@taped
@flat(Inputs)
def short_conv_fwd_triton(a: Inputs) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, C] and the final states [N, C, K-1], both in x.dtype."""
    x, weight, bias, initial_state, cu_seqlens, lengths, silu, limit = a
    (x, stride), weight = by_rows(x), weight.contiguous()
    (_, T, C), K = x.shape, weight.shape[1]
    N = num_sequences(x.shape[0], cu_seqlens)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    initial_state = None if initial_state is None else initial_state.contiguous()
    if cu_seqlens is None and lengths is None and T:
        final = x.new_empty(N, C, K - 1)
    else:  # no tile writes the final state of a sequence without tokens, so the result starts as the initial state
        final = x.new_zeros(N, C, K - 1) if initial_state is None else initial_state.to(x.dtype, copy=True)
    BT, BC = (64 if T > 512 else 16), min(512, next_power_of_2(C))
    first, sequence, NT, tiles = _launch_shape(x, cu_seqlens, BT)
    short_conv_fwd_kernel[(tiles, cdiv(C, BC))](
        (x, weight, bias, initial_state), y, final, (cu_seqlens, first, sequence, lengths), T, NT, N, C, stride,
        K=K, BT=BT, BC=BC, SILU=silu, ACC=accumulator(x.dtype), HAS_BIAS=bias is not None,
        HAS_STATE=initial_state is not None, PACKED=cu_seqlens is not None, RAGGED=lengths is not None, LIMIT=limit,
        num_warps=4,
    )  # fmt: skip
    return y, final


@taped
@flat(Upstream, Inputs)
def short_conv_bwd_triton(upstream: Upstream, a: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dx, dweight, dbias [C] and the gradient of the initial states [N, C, K-1]."""
    (dy, dstate), (x, weight, bias, initial_state, cu_seqlens, lengths, silu, limit) = upstream, a
    dy, dstate, weight = dy.contiguous(), dstate.contiguous(), weight.contiguous()
    x, stride = by_rows(x)
    initial_state = None if initial_state is None else initial_state.contiguous()
    (_, T, C), K = x.shape, weight.shape[1]
    dx = (torch.zeros_like if lengths is not None else torch.empty_like)(x, memory_format=torch.contiguous_format)
    dinitial = dstate.clone()
    BT, BC = (128 if T > 512 else 32), min(256, next_power_of_2(C))
    first, sequence, NT, tiles = _launch_shape(x, cu_seqlens, BT)
    # unused tiles of a packed launch write nothing
    dparams = (torch.zeros if cu_seqlens is not None else torch.empty)(
        tiles, K + 1, C, dtype=compute_dtype(x.dtype), device=x.device
    )
    short_conv_bwd_kernel[(tiles, cdiv(C, BC))](
        (dy, dstate), (x, weight, bias, initial_state), (dx, dparams, dinitial),
        (cu_seqlens, first, sequence, lengths), T, NT, num_sequences(x.shape[0], cu_seqlens), C, stride,
        K=K, BT=BT, BC=BC, SILU=silu, ACC=accumulator(x.dtype), HAS_BIAS=bias is not None,
        HAS_STATE=initial_state is not None, PACKED=cu_seqlens is not None, RAGGED=lengths is not None, LIMIT=limit,
        num_warps=4,
    )  # fmt: skip
    dparams = dparams.sum(0)
    return dx, dparams[:K].T.contiguous(), dparams[K].clone(), dinitial


@taped
@flat(Token)
def short_conv_step_triton(token: Token) -> Tensor:
    """One launch that reads one token [B, 1, C] and shifts `state` [B, C, K-1], or its pages, in place."""
    x, weight, bias, state, state_indices, silu, limit = token
    (x, stride), weight = by_rows(x), weight.contiguous()
    B, _, C = x.shape
    K = weight.shape[1]
    in_place = state_indices is not None or state.is_contiguous()
    target = state if in_place else state.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    BC = min(256, next_power_of_2(C))
    short_conv_step_kernel[(B, cdiv(C, BC))](
        x, weight, bias, target, state_indices, *page_strides(state_indices, target), y, C, stride,
        K=K, BC=BC, SILU=silu, ACC=accumulator(x.dtype), LIMIT=limit, num_warps=2,
    )  # fmt: skip
    if not in_place:
        state.copy_(target)
    return y
