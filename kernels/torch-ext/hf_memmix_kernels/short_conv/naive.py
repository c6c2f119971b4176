"""Short depthwise causal convolution, token by token in float64: the reference for the fast paths.

z_t = b + sum_j w_j * x_{t-K+1+j},  y_t = silu(z_t) or z_t. Before the start, x is the carried state, or zero.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def naive_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    limit: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes as `short_conv`; everything is computed and returned in float64, differentiable by plain autograd."""
    taps = weight.shape[1]
    x, weight = x.double(), weight.double()
    x = x if limit is None else x.clamp(-limit, limit)
    bias = None if bias is None else bias.double()
    if cu_seqlens is None:
        spans = [(row, 0, x.shape[1] if lengths is None else int(lengths[row])) for row in range(x.shape[0])]
    else:
        bounds = cu_seqlens.tolist()
        spans = [(0, start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    rows = [[x.new_zeros(x.shape[2])] * x.shape[1] for _ in range(x.shape[0])]
    states = []
    for n, (row, start, stop) in enumerate(spans):
        if initial_state is None:
            window = [x.new_zeros(x.shape[2])] * (taps - 1)
        else:
            window = list(initial_state[n].double().unbind(-1))
        for t in range(start, stop):
            window.append(x[row, t])
            z = sum(weight[:, j] * window[j] for j in range(taps))
            z = z if bias is None else z + bias
            rows[row][t] = F.silu(z) if activation == "silu" else z
            window.pop(0)
        states.append(torch.stack(window, -1) if window else x.new_zeros(x.shape[2], 0))
    return torch.stack([torch.stack(row) for row in rows]), torch.stack(states)
