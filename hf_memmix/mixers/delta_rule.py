"""What the mixers of the gated delta rule share: a token replaces what the memory holds for its key by its value.

    S_t = (I - beta_t k_t k_t^T) Diag(e^g_t) S_{t-1} + beta_t k_t v_t^T;  y_t = D^-1/2 S_t^T q_t;  q, k of norm 1

The mixers differ in where the log decays g come from, and in the output gate: `gated_delta.py` and `kda.py`.

Shapes: B batch, T tokens, H query heads, Hk key/value heads, D head size.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_memmix_kernels import chunk_gated_delta, gated_delta_step
from hf_memmix_kernels._common import MAX_HEAD_DIM
from hf_memmix_kernels.gated_delta.arguments import Gates
from hf_memmix_kernels.gated_delta.layer import gated_delta_layer_step

from ..padding import before_the_end
from .half_lives import half_lives
from .heads import HeadsMixer, HeadsOptions
from .layer_step import parameters_of
from .layers import at_least_fp32, init_decay, init_layers
from .options import mixer_options


@mixer_options
class DeltaRuleOptions(HeadsOptions):
    """Options of the gated delta rule beside `HeadsOptions`; the defaults are those of the papers.

    Args:
        negative_eigenvalues: beta = 2 sigmoid(W_b x), between 0 and 2. A write above 1 turns what the memory holds
            for the key into its opposite, which lets a layer count modulo 2 (Grazzi et al., arXiv:2411.12537).
        half_lives: the shortest and the longest half-life of the heads in tokens, log-spaced, before training. None:
            the paper's decays, or those of the start from attention.
    """

    negative_eigenvalues: bool = False
    half_lives: list[float | int] | None = half_lives()


class DeltaRuleMixer(HeadsMixer):
    """Base class of such mixers. A subclass makes the parameters of its decay in `add_decay` and computes it in
    `log_decay`.

    A sequence over several processes is scanned in turn, because the transition of the memory is no diagonal matrix.
    """

    fp32_parameters = no_weight_decay = ("A_log", "dt_bias")
    max_head_dim: ClassVar[int] = MAX_HEAD_DIM
    # linear layers, one after the other, whose output x gives `log_decay`: -e^A_log softplus(x + dt_bias). Without
    # them the layer has no `layer_step`
    decay_layers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.add_inputs(key_dim=self.head_dim, convolve_v=self.options.use_v_conv)
        self.add_decay()
        self.b_proj = nn.Linear(self.hidden, self.heads, bias=False)
        self.add_output()

    def add_decay(self):
        """Make the parameters of the decay, `A_log`, `dt_bias` and linear layers."""
        raise NotImplementedError

    def log_decay(self, products: dict[str, Tensor]) -> Tensor:
        """g in fp32, [B, T, H] or [B, T, H, D], from the products of the layer's input."""
        raise NotImplementedError

    def project(self, x, rotary):
        products = self.products(x)
        beta = at_least_fp32(products["b_proj"]).sigmoid()
        beta = 2 * beta if self.plain["negative_eigenvalues"] else beta
        return self.project_heads(products, rotary) | {"log_decay": self.log_decay(products), "beta": beta}

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        q, k, v, new = self.heads_scan(tokens, states, lengths, cu_seqlens)
        log_decay, beta = tokens["log_decay"], tokens["beta"]
        if lengths is not None:
            # a pad neither decays nor writes
            valid = before_the_end(lengths, q.shape[1])[..., None].to(beta.dtype)
            log_decay, beta = log_decay * valid.view(*valid.shape, *[1] * (log_decay.dim() - 3)), beta * valid
        initial = {"initial_state": states["S"] if states else None, "cu_seqlens": cu_seqlens}
        y, new["S"] = chunk_gated_delta(q, k, v, log_decay, beta, scale=self._scale(), **initial)
        return y, new

    def step(self, tokens, states, state_indices=None):
        q, k, v = self.heads_step(tokens, states, state_indices)
        gates, where = (tokens["log_decay"], tokens["beta"]), {"state_indices": state_indices}
        return gated_delta_step(q, k, v, *gates, states["S"], scale=self._scale(), **where)

    def layer_step(self, x, rotary, states):
        layer = self.layer_around("gated_delta", x, rotary, states) if self.decay_layers else None
        found = None if layer is None else parameters_of(self, (*self.decay_layers, "b_proj"))
        if found is None or found[1] != [None] * len(found[1]):
            return None
        weights = [None] * (3 - len(found[0])) + found[0]
        gates = Gates(*weights, self.dt_bias, self.A_log, 2.0 if self.plain["negative_eigenvalues"] else 1.0)
        return gated_delta_layer_step(layer, gates, states["S"], scale=self._scale())

    def state_shapes(self, batch, dtype=torch.float32):
        memory = (batch, self.heads, self.key_dim, self.head_dim), torch.promote_types(dtype, torch.float32)
        return self.convolution_shapes(batch, dtype) | {"S": memory}

    def init_weights(self):
        """N(0, 0.02) matrices and taps, zero biases, unit norms; decay A ~ U(0, 16), dt log-uniform in [1e-3, 0.1]."""
        init_layers(self)
        init_decay(self.A_log, self.dt_bias, self.options.half_lives)

    def _scale(self) -> float | None:
        return None if self.plain["use_o_norm"] else 1.0
