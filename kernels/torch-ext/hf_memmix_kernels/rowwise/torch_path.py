"""The torch path: plain operators, which autograd differentiates and torch.compile fuses with their neighbours."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._common import compute_dtype

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


def rotate_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def unit_heads_torch(x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    x = x if cos is None else rotate_torch(x, cos, sin)
    size = torch.linalg.vector_norm(x.to(compute_dtype(x.dtype)), dim=-1, keepdim=True)
    return x / (size + eps).to(x.dtype)


def gated_norm_torch(
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: str | None,
    norm_first: bool,
    limit: float | None,
    gate_limit: float | None,
    average_over_ranks: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    dtype, act = compute_dtype(y.dtype), ACTIVATIONS.get(activation)
    x, w = y.to(dtype), weight.view(-1, y.shape[-1])
    x = x if limit is None else x.clamp(-limit, limit)
    if gate is not None and gate_limit is not None:
        gate = gate.clamp(-gate_limit, gate_limit)
    if gate is not None and not norm_first:
        x = x * act(gate.to(dtype))
    mean_square = x.square().mean(-1, keepdim=True)
    if average_over_ranks is not None:
        mean_square = average_over_ranks(mean_square)
    x = x * torch.rsqrt(mean_square + eps)
    if not norm_first:
        return (w * x.to(y.dtype)).to(y.dtype)
    x = (x * w).to(y.dtype)
    return x if gate is None else x * act(gate)


def gated_product_torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def decay_torch(
    x: Tensor, bias: Tensor, A_log: Tensor, limit: float | None, smallest: float | None, largest: float | None
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(x.dtype)
    x = x if limit is None else x.clamp(-limit, limit)
    dt = F.softplus(x.to(dtype) + bias.to(dtype))
    if smallest is not None or largest is not None:
        dt = dt.clamp(smallest, largest)
    return dt, -A_log.to(dtype).exp() * dt


def forward_kl_torch(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    dtype = compute_dtype(student.dtype)
    log_s, log_t = (logits.to(dtype).log_softmax(-1) for logits in (student, teacher))
    p_t = log_t.exp()
    kl = log_t.sub_(log_s).mul_(p_t).masked_fill_(p_t == 0, 0).sum(-1)
    student.copy_(log_s.exp_().sub_(p_t).mul_(weight.to(dtype)[:, None]))
    return kl
