"""The functions of this folder as plain formulas in float64, which autograd differentiates: the reference for the fast
paths.
"""

import torch
from torch import Tensor

ACTIVATIONS = {
    None: lambda x: torch.ones_like(x),
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x * 0.5**0.5)) / 2,
}


def naive_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in float64; the result has the dtype of x."""
    y, pairs = x.double(), cos.shape[-1]
    cos, sin = cos.double()[:, :, None], sin.double()[:, :, None]
    first, second, rest = y[..., :pairs], y[..., pairs : 2 * pairs], y[..., 2 * pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def naive_unit_heads(x: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """`unit_heads` in float64; the result has the dtype of x."""
    y = x.double() if cos is None else naive_rotate(x.double(), cos, sin)
    return (y / (y.square().sum(-1, keepdim=True).sqrt() + eps)).to(x.dtype)


def naive_gated_norm(
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: str | None = "silu",
    norm_first: bool = True,
    limit: float | None = None,
    gate_limit: float | None = None,
) -> Tensor:
    """`gated_norm` in float64; the result has the dtype of y."""
    x, w = y.double(), weight.double().view(-1, y.shape[-1])
    x = x if limit is None else x.clamp(-limit, limit)
    if gate is None:
        a = torch.ones_like(x)
    else:
        gate = gate.double()
        a = ACTIVATIONS[activation](gate if gate_limit is None else gate.clamp(-gate_limit, gate_limit))
    x = x if norm_first else x * a
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w
    return (x * a if norm_first else x).to(y.dtype)


def naive_gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """`gated_product` in float64; the result has the dtype of the gate."""
    gate, up, dtype = gate.double(), up.double(), gate.dtype
    return (ACTIVATIONS["silu"](gate) * up).to(dtype)


def naive_decay(
    x: Tensor,
    bias: Tensor,
    A_log: Tensor,
    limit: float | None = None,
    smallest: float | None = None,
    largest: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`decay` in float64."""
    x = x.double() if limit is None else x.double().clamp(-limit, limit)
    z = x + bias.double()
    dt = z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))
    if smallest is not None or largest is not None:
        dt = dt.clamp(smallest, largest)
    return dt, -A_log.double().exp() * dt


def naive_forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """The KL divergence of every row of logits [N, V], KL(teacher || student), in float64: [N]."""
    log_s, log_t = student.double().log_softmax(-1), teacher.double().log_softmax(-1)
    return torch.where(log_t.exp() == 0, 0, log_t.exp() * (log_t - log_s)).sum(-1)
