"""GKA with a constant ridge (Appendix F.1 of the paper): (H_t + lambda I) x_t = q_t with one lambda for all tokens.

H_t grows with the number of tokens and the ridge does not, so the condition number has no limit, and the weights of
the Chebyshev iteration differ between tokens. The kernels have constant weights; this mixer runs in torch.
"""

import functools

import torch
from torch import Tensor

from hf_memmix.mixers import GKAMixer, GKAOptions, mixer_options
from hf_memmix.mixers.base import MemoryMixer, register_mixer
from hf_memmix_kernels._common import num_sequences
from hf_memmix_kernels.gka.torch_path import _Chunks, _Rows

ITERATIONS = 30  # the paper's


def chebyshev(chunks: _Chunks, right: Tensor, ridge: float) -> Tensor:
    """CH(H_t + ridge I, right) of Algorithm 1, where the spectrum lies between ridge and ridge + |H_t|.

    `right` and the result are [N, H, chunks, C, D].
    """
    norm = chunks.norm[..., None]
    step, rho2 = 2 / (norm + 2 * ridge), (norm / (norm + 2 * ridge)).square()
    before, x, omega = torch.zeros_like(right), step * right, 2.0
    for _ in range(ITERATIONS):
        omega = 4 / (4 - rho2 * omega)
        residual = right - chunks.apply_H(x) - ridge * x
        before, x = x, x + step * omega * residual + (omega - 1) * (x - before)
    return x


class _GradientOfSolution(torch.autograd.Function):
    """Zeros, whose gradient for the residual is z = CH(H_t + ridge I, dx_t) (Table 1 of the paper)."""

    @staticmethod
    def forward(ctx, residual, solve):
        ctx.solve = solve
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx, dx):
        return ctx.solve(dx), None


@mixer_options
class ConstantRidgeOptions(GKAOptions):
    """`GKAOptions`; `ridge` is lambda itself, 0.25 in the paper."""

    ridge: float | int = 0.25

    def validate_sketch_dim(self):
        if self.sketch_dim is not None:
            raise ValueError(f"sketch_dim={self.sketch_dim}: there is no sketch with a constant ridge, leave it None")


@register_mixer("gka-constant-ridge")
class ConstantRidgeMixer(GKAMixer):
    """`GKAMixer` with a constant ridge, for the training of whole sequences; its step is a scan of one token."""

    options_class = ConstantRidgeOptions
    step = MemoryMixer.step

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        q, k, v, log_decay, beta, new = self.memory_inputs(tokens, states, lengths, cu_seqlens)
        with torch.autocast(q.device.type, enabled=False):
            rows = _Rows(q, k, self.options.chunk_size, cu_seqlens)
            chunks = self._chunks(rows, k, v, log_decay, beta, states, cu_seqlens)
            queries, solve = rows.split(q), functools.partial(chebyshev, chunks, ridge=self.options.ridge)
            with torch.no_grad():
                found = solve(queries)
            residual = queries - chunks.apply_H(found) - self.options.ridge * found
            x = found + _GradientOfSolution.apply(residual, solve)
            if self.options.use_alpha:
                x = queries + rows.split(tokens["alpha"])[..., None] * (x - queries)
            y = rows.merge(chunks.read(x)) * (self.head_dim**-0.5 if self.options.use_o_norm else 1.0)
        new["H"], new["U"] = chunks.h_final, chunks.u_final
        return y.to(q.dtype), new

    def _chunks(self, rows: _Rows, k, v, log_decay, beta, states, cu_seqlens) -> _Chunks:
        if beta is None:
            beta = torch.ones_like(log_decay)
        if states:
            h0, u0 = states["H"], states["U"]
        else:
            sequences = num_sequences(log_decay.shape[0], cu_seqlens)
            h0 = u0 = log_decay.new_zeros(sequences, self.heads, self.head_dim, self.head_dim)
        split = (rows.split_grouped(k), rows.split_grouped(v), rows.split(log_decay), rows.split(beta))
        return _Chunks(*split, h0, u0, self.options.ridge)
