"""The launch of the kernel of all convolutions of a layer and the unit norm after them, for one token per sequence."""

from torch import Tensor

from .._launch import accumulator, by_rows, cdiv, next_power_of_2, page_strides
from .arguments import Heads
from .kernels.heads import short_conv_heads_kernel

BLOCK = 128  # channels of a program of a convolution without heads
CHANNELS_OF_WARP = 128


def heads_triton(arguments: Heads) -> Tensor:
    """The outputs of `op.unit_heads_after_convolutions`, one after the other in one flat tensor."""
    x, weights, states, head_dims, cos, sin, eps, silu, state_indices = arguments
    batch, (_, taps), head_dim = x[0].shape[0], weights[0].shape, max(head_dims)
    half = 0 if cos is None else cos.shape[-1]
    if cos is not None and cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    channels = [t.shape[-1] for t in x]
    programs = [C // D if D else cdiv(C, BLOCK) for C, D in zip(channels, head_dims, strict=True)]
    rows = [by_rows(t) for t in x]
    y = x[0].new_empty(batch * sum(channels))
    short_conv_heads_kernel[(batch, sum(programs))](
        tuple(t for t, _ in rows), tuple(w.contiguous() for w in weights), tuple(states),
        tuple(y.split([batch * C for C in channels])), (cos, sin), state_indices,
        tuple(stride for _, stride in rows), tuple(page_strides(state_indices, *states)),
        (0, 0) if cos is None else (cos.stride(0), cos.stride(2)), tuple(channels), tuple(programs), eps,
        DIMS=tuple(head_dims), HALF=half, BH=next_power_of_2(max(1, half)),
        BR=next_power_of_2(max(1, head_dim - 2 * half)), BC=BLOCK, K=taps, SILU=silu, ACC=accumulator(x[0].dtype),
        num_warps=next_power_of_2(max(1, head_dim // CHANNELS_OF_WARP)),
    )  # fmt: skip
    return y
