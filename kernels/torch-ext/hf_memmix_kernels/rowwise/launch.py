"""Launches of the rowwise kernels: one read and one write of the activations per pass."""

import torch
from torch import Tensor

from .._launch import accumulator, cdiv, next_power_of_2
from .kernels.gated_norm import gated_norm_bwd_kernel, gated_norm_fwd_kernel
from .kernels.unit_heads import unit_heads_bwd_kernel, unit_heads_fwd_kernel

TILE = 4096  # elements of each tensor that one program holds
LOOPS = 16  # tiles per program in the backward of the norm, which sums the gradient of the weight over them


def _rows_per_program(width: int) -> int:
    """Number of rows of `width` elements that one program holds, a power of two."""
    return next_power_of_2(max(1, TILE // width) + 1) // 2


def _warps(rows: int, width: int) -> int:
    """num_warps, a power of two that gives each thread about 32 elements."""
    return min(16, next_power_of_2(max(1, rows * width // 1024)))


def _unit_arguments(x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> tuple[dict, tuple[int]]:
    """The kernel arguments that forward and backward share, and the grid."""
    batch, length, heads, D = x.shape
    rows, half = batch * length * heads, 0 if cos is None else cos.shape[-1]
    half_block = next_power_of_2(max(1, half))
    rest_block = next_power_of_2(max(1, D - 2 * half))
    R = _rows_per_program(2 * half_block + rest_block)
    if cos is not None and cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    s_b, s_t, s_r = (0, 0, 0) if cos is None else cos.stride()
    arguments = {
        "cos": cos, "sin": sin, "rows": rows, "heads": heads, "length": length, "s_b": s_b, "s_t": s_t, "s_r": s_r,
        "eps": eps, "D": D, "HALF": half, "BH": half_block, "BR": rest_block, "R": R,
        "ACC": accumulator(x.dtype), "num_warps": _warps(R, D),
    }  # fmt: skip
    return arguments, (cdiv(rows, R),)


def unit_heads_fwd_triton(x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """y [B, T, H, D] in x.dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        arguments, grid = _unit_arguments(x, cos, sin, eps)
        unit_heads_fwd_kernel[grid](x, y, **arguments)
    return y


def unit_heads_bwd_triton(dy: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """dx [B, T, H, D] in x.dtype."""
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        arguments, grid = _unit_arguments(x, cos, sin, eps)
        unit_heads_bwd_kernel[grid](x, dy, dx, **arguments)
    return dx


def _norm_arguments(y, gate, weight, eps, activation, norm_first, limit) -> dict:
    D = y.shape[-1]
    block = next_power_of_2(D)
    R = _rows_per_program(block)
    return {
        "rows": y.numel() // max(1, D), "groups": weight.numel() // max(1, D), "eps": eps,
        "limit": float("inf") if limit is None else limit, "D": D, "BD": block, "R": R,
        "HAS_GATE": gate is not None, "GELU": activation == "gelu", "NORM_FIRST": norm_first,
        "ACC": accumulator(y.dtype), "num_warps": _warps(R, block),
    }  # fmt: skip


def gated_norm_fwd_triton(y, gate, weight, eps, activation, norm_first, limit) -> Tensor:
    """The output, contiguous, in the shape and dtype of y."""
    y, weight = y.contiguous(), weight.contiguous()
    gate = None if gate is None else gate.contiguous()
    out = torch.empty_like(y)
    if y.numel():
        arguments = _norm_arguments(y, gate, weight, eps, activation, norm_first, limit)
        grid = (cdiv(arguments["rows"], arguments["R"]),)
        gated_norm_fwd_kernel[grid](y, gate, weight, out, **arguments)
    return out


def gated_norm_bwd_triton(do, y, gate, weight, eps, activation, norm_first, limit):
    """dy, dgate (None without a gate) and dweight, in the dtypes of their tensors."""
    y, weight, do = y.contiguous(), weight.contiguous(), do.contiguous()
    gate = None if gate is None else gate.contiguous()
    dy, dgate = torch.empty_like(y), None if gate is None else torch.empty_like(gate)
    arguments = _norm_arguments(y, gate, weight, eps, activation, norm_first, limit)
    groups, D = arguments["groups"], arguments["D"]
    # a program reads rows of one group only, so it sums the gradient of one row of weights
    per_group = cdiv(cdiv(arguments["rows"] // max(1, groups), arguments["R"]), LOOPS)
    dweight = torch.empty(
        groups, per_group, D, dtype=torch.promote_types(weight.dtype, torch.float32), device=y.device
    )
    if not y.numel():
        return dy, dgate, torch.zeros_like(weight)
    gated_norm_bwd_kernel[(groups * per_group,)](
        do, y, gate, weight, dy, dgate, dweight, per_group=per_group, LOOPS=LOOPS, **arguments
    )
    return dy, dgate, dweight.sum(1).flatten().to(weight.dtype)
