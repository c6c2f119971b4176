"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): orthogonal updates of weight matrices.

    M_t = mu M_{t-1} + G_t,   W_t = (1 - lr decay) W_{t-1} - lr sqrt(max(1, rows / columns)) orthogonal(G_t + mu M_t)

`orthogonal` sets all singular values to about 1, by five steps of a quintic Newton-Schulz iteration in bf16. Matrices
of one shape are stacked, so the number of launches does not depend on the number of layers.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Matrices [N, rows, columns] with nearly the same singular vectors, and singular values between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16().mT if tall else matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """The optimizer for matrices [rows, columns]; other parameters need another one."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        parameters = list(parameters)
        if wrong := [tuple(p.shape) for p in parameters if p.ndim != 2]:
            raise ValueError(
                f"Muon updates matrices, not tensors of shape {wrong[0]}; give these to another optimizer"
            )
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for (rows, columns), parameters in shapes.items():
                gradient = torch.stack([p.grad for p in parameters])
                state = self.state[parameters[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(gradient)
                momentum = state["momentum"].mul_(group["momentum"]).add_(gradient)
                update = orthogonal(gradient.add_(momentum, alpha=group["momentum"]))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = -group["lr"] * max(1, rows / columns) ** 0.5
                torch._foreach_add_(parameters, list(update.unbind(0)), alpha=scale)
