"""The baselines of the COFFEE paper, in the same core module: S6 (eq. 2) and COFFEE with a token gate (eq. 4).

S6: x_k = e^(A D_k) x_{k-1} + (e^(A D_k) - I) / A B_k u_k,  y_k = C_k x_k,  D, B, C = softplus(W_D u), W_B u, W_C u

Only the outputs at the last positions are needed; they have a closed form without a loop over time. Shapes as in
`coffee_core`: S copies, B batch, L tokens, D features, n states.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_memmix.models.coffee_core import CoreModule
from hf_memmix_kernels import chunk_coffee


class S6Layer(nn.Module):
    """S independent S6 layers, initialised as in Appendix H.2: A = -(1, ..., n), the matrices N(0, 1)."""

    def __init__(self, dim: int, states: int, copies: int = 1):
        super().__init__()
        self.dim, self.copies = dim, copies
        # A = -e^A_log: eigenvalues stay negative
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().expand(copies, dim, states).clone())
        self.W_B = nn.Parameter(torch.randn(copies, states, dim))
        self.W_C = nn.Parameter(torch.randn(copies, states, dim))
        self.W_D = nn.Parameter(torch.randn(copies, dim, dim))

    def forward(self, u: Tensor, last: int) -> Tensor:
        """[B, L, S * D] -> [B, last, S * D]."""
        A = -self.A_log.exp()
        u = u.unflatten(2, (self.copies, self.dim))
        step = F.softplus(torch.einsum("blsd,sed->blse", u, self.W_D))
        B = torch.einsum("blsd,snd->blsn", u, self.W_B)
        written = torch.expm1(A * step[..., None]) / A * B[:, :, :, None] * u[..., None]
        age = step.cumsum(1)
        outputs = []
        for k in range(u.shape[1] - last, u.shape[1]):
            # every exponent is negative: the steps from a token to this one
            kept = torch.exp(A * (age[:, k : k + 1] - age[:, : k + 1])[..., None])
            x = (kept * written[:, : k + 1]).sum(1)
            C = torch.einsum("bsd,snd->bsn", u[:, k], self.W_C)
            outputs.append((x * C[:, :, None]).sum(-1).flatten(1))
        return torch.stack(outputs, 1)


class S6Core(CoreModule):
    """The core module with S6; 3 n D + D^2 + M D parameters, embeddings N(0, 1)."""

    def __init__(self, symbols: int, dim: int, states: int, copies: int = 1):
        super().__init__(symbols, dim, copies)
        nn.init.normal_(self.embedding)
        self.layer = S6Layer(dim, states, copies)

    def mix(self, u, last):
        return self.layer(u, last)


class TokenGateCore(CoreModule):
    """COFFEE after the first of its three steps (eq. 4): the gate is sigmoid(W_D u_k), B and C are learned."""

    def __init__(self, symbols: int, dim: int, states: int, copies: int = 1):
        super().__init__(symbols, dim, copies)
        self.lam = nn.Parameter(torch.zeros(copies, dim, states))
        self.B = nn.Parameter(torch.randn(copies, dim, states))
        self.C = nn.Parameter(torch.randn(copies, dim, states))
        self.W_D = nn.Parameter(torch.randn(copies, dim, dim))

    def mix(self, u, last):
        features = u.unflatten(2, (self.copies, self.dim))
        gate = torch.einsum("blsd,sed->blse", features, self.W_D).sigmoid().flatten(2)
        # states are linear in B, which therefore acts through C
        C = (self.B * self.C).flatten(0, 1)
        return chunk_coffee(u, self.lam.flatten(0, 1), None, C, gate=gate, feedback="token")[0][:, u.shape[1] - last :]

    @torch.no_grad()
    def project_(self):
        """Bring lambda back into [-2, 0]."""
        self.lam.clamp_(-2, 0)
