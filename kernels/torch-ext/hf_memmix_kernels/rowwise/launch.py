"""Launches of the rowwise kernels: one read and one write of the activations per pass."""

import torch
from torch import Tensor

from .._launch import accumulator, by_rows, cdiv, next_power_of_2
from .._tape import taped
from .kernels.decay import decay_bwd_kernel, decay_fwd_kernel
from .kernels.forward_kl import forward_kl_kernel
from .kernels.gated_norm import gated_norm_bwd_kernel, gated_norm_fwd_kernel
from .kernels.gated_product import gated_product_bwd_kernel, gated_product_fwd_kernel
from .kernels.unit_heads import rotate_kernel, unit_heads_bwd_kernel, unit_heads_fwd_kernel

TILE = 4096  # elements of each tensor that one program holds
PRODUCT_TILE, PRODUCT_WARPS = 2048, 4  # the same of a program of the product, and its num_warps
KL_TILE, KL_WARPS = 2048, 8  # logits that a program of the divergence reads at a time, and its num_warps
LOOPS = 16  # tiles per program in the backward of the norm, at most; it sums the gradient of the weight over them
PROGRAMS = 512  # with fewer programs, multiprocessors would wait, so a program then has fewer tiles
PARTIAL_SUMS = 2**18  # numbers that all programs leave for torch to sum; more take longer than the wait (README)


def _rows_per_program(width: int) -> int:
    """Number of rows of `width` elements that one program holds, a power of two."""
    return next_power_of_2(max(1, TILE // width) + 1) // 2


def _warps(rows: int, width: int) -> int:
    """num_warps, a power of two that gives each thread about 32 elements."""
    return min(16, next_power_of_2(max(1, rows * width // 1024)))


def _loops(tiles: int, width: int) -> int:
    """Tiles per program in the backward of the norm of rows of `width` numbers, a power of two."""
    programs = max(1, min(PROGRAMS, PARTIAL_SUMS // width))
    return next_power_of_2(max(1, min(LOOPS, tiles // programs)) + 1) // 2


def _head_arguments(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[dict, tuple[int]]:
    """The kernel arguments that all passes over heads share, and the grid."""
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
        "D": D, "HALF": half, "BH": half_block, "BR": rest_block, "R": R,
        "ACC": accumulator(x.dtype), "num_warps": _warps(R, D),
    }  # fmt: skip
    return arguments, (cdiv(rows, R),)


@taped
def unit_heads_fwd_triton(x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """y [B, T, H, D] in x.dtype."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        arguments, grid = _head_arguments(x, cos, sin)
        unit_heads_fwd_kernel[grid](x, y, eps=eps, **arguments)
    return y


@taped
def unit_heads_bwd_triton(dy: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """dx [B, T, H, D] in x.dtype."""
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        arguments, grid = _head_arguments(x, cos, sin)
        unit_heads_bwd_kernel[grid](x, dy, dx, eps=eps, **arguments)
    return dx


@taped
def rotate_triton(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """y [B, T, H, D] in x.dtype: rotated, or turned back."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        arguments, grid = _head_arguments(x, cos, sin)
        rotate_kernel[grid](x, y, BACK=back, **arguments)
    return y


def _norm_arguments(y, gate, weight, eps, activation, norm_first, limit, gate_limit) -> tuple[Tensor | None, dict]:
    """The gate, a copy if its rows lie too far apart, and the kernel arguments that forward and backward share."""
    D = y.shape[-1]
    block = next_power_of_2(D)
    R = _rows_per_program(block)
    place = 1, D
    if gate is not None and not gate.is_contiguous():
        gate, stride = by_rows(gate) if gate.dim() > 2 else (gate.contiguous(), D)
        place = gate.shape[2:-1].numel(), stride
    return gate, {
        "rows": y.numel() // max(1, D), "groups": weight.numel() // max(1, D), "eps": eps,
        "limits": tuple(float("inf") if x is None else float(x) for x in (limit, gate_limit)), "place": place,
        "D": D, "BD": block, "R": R,
        "HAS_GATE": gate is not None, "GELU": activation == "gelu", "NORM_FIRST": norm_first,
        "ACC": accumulator(y.dtype), "num_warps": _warps(R, block),
    }  # fmt: skip


@taped
def gated_norm_fwd_triton(y, gate, weight, *options) -> Tensor:
    """The output, contiguous, in the shape and dtype of y. `options` are those of `_norm_arguments`."""
    y, weight = y.contiguous(), weight.contiguous()
    out = torch.empty_like(y)
    if y.numel():
        gate, arguments = _norm_arguments(y, gate, weight, *options)
        grid = (cdiv(arguments["rows"], arguments["R"]),)
        gated_norm_fwd_kernel[grid](y, gate, weight, out, **arguments)
    return out


@taped
def gated_norm_bwd_triton(do, y, gate, weight, *options):
    """dy, dgate (None without a gate) and dweight, in the dtypes of their tensors."""
    y, weight, do = y.contiguous(), weight.contiguous(), do.contiguous()
    dy = torch.empty_like(y)
    dgate = None if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, arguments = _norm_arguments(y, gate, weight, *options)
    groups, D = arguments["groups"], arguments["D"]
    # a program reads rows of one group only, so it sums the gradient of one row of weights
    tiles = cdiv(arguments["rows"] // max(1, groups), arguments["R"])
    loops = _loops(tiles * groups, D)
    per_group = cdiv(tiles, loops)
    dweight = torch.empty(
        groups, per_group, D, dtype=torch.promote_types(weight.dtype, torch.float32), device=y.device
    )
    if not y.numel():
        return dy, dgate, torch.zeros_like(weight)
    gated_norm_bwd_kernel[(groups * per_group,)](
        do, (y, gate, weight), (dy, dgate, dweight), per_group=per_group, LOOPS=loops, **arguments
    )
    return dy, dgate, dweight.sum(1).flatten().to(weight.dtype)


@taped
def gated_product_fwd_triton(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, contiguous, in the dtype of the gate."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if size := gate.numel():
        gated_product_fwd_kernel[(cdiv(size, PRODUCT_TILE),)](
            gate, up, out, size, BLOCK=PRODUCT_TILE, ACC=accumulator(gate.dtype), num_warps=PRODUCT_WARPS
        )
    return out


@taped
def gated_product_bwd_triton(do: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    do, gate, up = do.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if size := gate.numel():
        gated_product_bwd_kernel[(cdiv(size, PRODUCT_TILE),)](
            do, gate, up, dgate, dup, size, BLOCK=PRODUCT_TILE, ACC=accumulator(gate.dtype), num_warps=PRODUCT_WARPS
        )
    return dgate, dup


def _decay_arguments(x: Tensor, limit, smallest, largest) -> dict:
    """The kernel arguments that forward and backward share, besides the tensors and the stride."""
    H, inf = x.shape[-1], float("inf")
    block = next_power_of_2(H)
    R = _rows_per_program(block)
    limits = (x if x is not None else default for x, default in ((limit, inf), (smallest, -inf), (largest, inf)))
    return {
        "rows": x.numel() // max(1, H), "H": H, "limits": tuple(map(float, limits)), "R": R, "BH": block,
        "ACC": accumulator(x.dtype), "num_warps": _warps(R, block),
    }  # fmt: skip


@taped
def decay_fwd_triton(x: Tensor, bias: Tensor, A_log: Tensor, *limits) -> tuple[Tensor, Tensor]:
    """dt and g [B, T, H] in the dtype of sums."""
    (x, stride), bias, A_log = by_rows(x), bias.contiguous(), A_log.contiguous()
    dt, g = torch.empty(2, *x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if x.numel():
        arguments = _decay_arguments(x, *limits)
        grid = (cdiv(arguments["rows"], arguments["R"]),)
        decay_fwd_kernel[grid]((x, bias, A_log), dt, g, stride=stride, **arguments)
    return dt, g


@taped
def decay_bwd_triton(ddt: Tensor | None, dg: Tensor | None, x: Tensor, bias: Tensor, A_log: Tensor, *limits):
    """dx, dbias and dA_log, in the dtypes of their tensors."""
    (x, stride), bias, A_log = by_rows(x), bias.contiguous(), A_log.contiguous()
    upstream = tuple(None if t is None else t.contiguous() for t in (ddt, dg))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, torch.zeros_like(bias), torch.zeros_like(A_log)
    arguments = _decay_arguments(x, *limits)
    programs = cdiv(arguments["rows"], arguments["R"])
    dparams = torch.empty(programs, 2, x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    decay_bwd_kernel[(programs,)](upstream, (x, bias, A_log), dx, dparams, stride=stride, **arguments)
    dbias, dA_log = dparams.sum(0)
    return dx, dbias.to(bias.dtype), dA_log.to(A_log.dtype)


def forward_kl_triton(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """The divergence [N] in the dtype of sums; the rows of `student` [N, V] become its gradient times `weight` [N]."""
    kl = torch.empty(student.shape[0], dtype=torch.promote_types(student.dtype, torch.float32), device=student.device)
    if student.numel():
        tile = min(KL_TILE, next_power_of_2(student.shape[1]))
        forward_kl_kernel[(student.shape[0],)](
            student, teacher, weight, kl, student.shape[1], student.stride(0), teacher.stride(0),
            BLOCK=tile, ACC=accumulator(student.dtype), num_warps=KL_WARPS,
        )  # fmt: skip
    return kl
