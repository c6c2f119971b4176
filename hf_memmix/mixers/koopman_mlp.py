"""Koopman MLP: a feed-forward layer that rotates and shrinks pairs of features, in place of SwiGLU's second matrix.

    u = silu(W_in x);  (u_2i, u_2i+1) <- K_i (u_2i, u_2i+1);  y = W_out u  (gated: y = W_out (u * silu(W_g x)))
    K_i = [[a, -b], [b, a]] / max(1, |(a, b)|),  so |K_i| <= 1

Paper: "Echo: Spectral Koopman Attention", section 3.3 and appendix: K is a contraction times a rotation.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..errors import UserError
from .feed_forward import FeedForward
from .tp_plan import Cut, Part, TensorParallelPlan
from .weight_decay import SparedFromDecay


class KoopmanMLP(FeedForward, SparedFromDecay):
    """The layer [B, T, hidden] -> [B, T, hidden].

    Args:
        hidden: size of input and output.
        inner: number of features, even. With the d_ff of a SwiGLU it has a third fewer parameters than the SwiGLU.
        gated: multiply the features by silu(W_g x); it then has as many parameters as the SwiGLU.

    Raises:
        ValueError: `inner` is odd or not positive.
    """

    no_weight_decay = ("spectrum",)

    def __init__(self, hidden: int, inner: int, gated: bool = False):
        super().__init__()
        if inner < 2 or inner % 2:
            raise UserError(
                f"a Koopman MLP works on pairs of features: their number {inner} must be even and positive"
            )
        self.in_proj = nn.Linear(hidden, inner, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False) if gated else None
        self.out_proj = nn.Linear(inner, hidden, bias=False)
        self.spectrum = nn.Parameter(torch.empty(2, inner // 2))  # a and b of each pair

    def rotation(self) -> tuple[Tensor, Tensor]:
        """a and b [inner / 2] of the K_i, after the projection to |K_i| <= 1."""
        a, b = self.spectrum
        # clamp the square, not its root: at a = b = 0 the root has no gradient
        scale = (a.square() + b.square()).clamp_min(1).rsqrt()
        return a * scale, b * scale

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.silu(self.in_proj(x)).unflatten(-1, (-1, 2)).unbind(-1)
        a, b = self.rotation()
        u = torch.stack([a * first - b * second, b * first + a * second], -1).flatten(-2)
        if self.gate_proj is not None:
            u = u * F.silu(self.gate_proj(x))
        return self.out_proj(u)

    def tp_plan(self, ranks):
        """The plan divides by pairs of features. If they cannot be divided equally, every rank holds the
        whole layer.
        """
        pairs = self.spectrum.shape[1]
        if pairs % ranks:
            return TensorParallelPlan(ranks)
        columns = ("in_proj",) if self.gate_proj is None else ("in_proj", "gate_proj")
        return TensorParallelPlan(ranks, columns, ("out_proj",), {"spectrum": Cut(1, (Part(pairs, ranks),))})

    def init_weights(self):
        """N(0, 0.02) matrices; radius 1, angles evenly from 0 to pi."""
        for projection in (self.in_proj, self.gate_proj, self.out_proj):
            if projection is not None:
                init.normal_(projection.weight, std=0.02)
        angles = torch.linspace(0, math.pi, self.spectrum.shape[1], device=self.spectrum.device)
        init.copy_(self.spectrum, torch.stack([angles.cos(), angles.sin()]))
