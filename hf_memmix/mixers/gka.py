"""GKA, Gated KalmaNet: attention as ridge regression on the past, re-solved per token from a state of fixed size.

    H_t = e^g H + beta^2 k k^T;  U_t = e^g U + beta^2 v k^T;  x_t = CH_r(H_t + a |H_t| I, q_t)
    y_t = D^-1/2 U_t (q_t + alpha_t (x_t - q_t));  out = W_o (RMSNorm(y) * silu(W_g h))

Paper: Peng et al., "Gated KalmaNet: A Fading Memory Layer Through Test-Time Ridge Regression". Parameter names
and the order of operations are those of the official release, so its weights can be loaded.

Shapes: B batch, T tokens, H query heads, Hk key/value heads, D head size.
"""

from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init

from hf_memmix_kernels import chunk_gka, gka_step
from hf_memmix_kernels._common import MAX_HEAD_DIM
from hf_memmix_kernels.gka import gates_of_products, gates_of_token
from hf_memmix_kernels.gka.arguments import Gates, Solver
from hf_memmix_kernels.gka.layer import gka_layer_step
from hf_memmix_kernels.gka.op import sketched
from hf_memmix_kernels.gka.schedule import MAX_PHASES
from hf_memmix_kernels.rowwise import decay

from ..errors import UserError
from ..padding import before_the_end
from .base import register_mixer
from .half_lives import half_lives
from .heads import HeadsMixer, HeadsOptions
from .kept_bytes import KeptBytes
from .layer_step import parameters_of
from .layers import at_least_fp32, has_hooks, init_decay, init_layers
from .options import LARGEST_CHUNK, between, checked, mixer_options
from .ranks import decayed_sum

GATES = ("a_proj", "b_proj", "alpha_proj")
BETA_EPS = 1e-6  # added to beta, as in the GKA release
PHASES = (12, 10)  # the solver's default schedule
# per phase; the paper's solver converges in 30; a kernel holds one weight per iteration as a constant
MAX_ITERATIONS = 1000


def _check_phases(phases: list[int]):
    if not 1 <= len(phases) <= MAX_PHASES or not all(1 <= count <= MAX_ITERATIONS for count in phases):
        raise UserError(f"must be 1 to {MAX_PHASES} numbers of iterations, each 1 to {MAX_ITERATIONS}, e.g. [12, 10]")


@mixer_options
class GKAOptions(HeadsOptions):
    """Options of the GKA layer beside `HeadsOptions`; except for the solver's schedule, the defaults are the official
    release's.

    Args:
        solver_phases: Chebyshev iterations of each phase of iterative refinement. [30] is the paper's solver: one
            phase of 30 iterations. The default is faster and, in bf16, more accurate. May be changed at inference.
        ridge: a in lambda = a |H|.
        sketch_dim: s, at most the head size D: the ridge regression is solved in s dimensions, to which a learned
            matrix S [D, s] per key/value head projects q and k (Appendix H of the paper), and the states are
            [s, s] and [D, s] instead of [D, D]. S starts with orthonormal columns. None: no sketch.
        chunk_size: tokens per chunk of the parallel form; changes only the speed.
        use_decay, use_beta, use_alpha: the forget gate g, the write strength, and the blend of solution and query.
            Without them: g = 0, beta = 1, alpha = 1.
        half_lives: the shortest and the longest half-life of the heads in tokens, log-spaced, before training. None:
            the paper's decays, or those of the start from attention.
        unshare_kv_heads: every query head has keys and values of its own.
    """

    inference_options: ClassVar[tuple[str, ...]] = ("solver_phases", "chunk_size")

    solver_phases: list[int] = checked(lambda: list(PHASES), _check_phases)
    # smaller ridges are rounded away in float32; with larger ones the solution is proportional to the query
    ridge: float | int = between(0.02, 1e-7, 100, "the paper's is 0.02")
    sketch_dim: int | None = between(None, 1, MAX_HEAD_DIM, "at most the head size; None is without a sketch")
    chunk_size: int = between(64, 1, LARGEST_CHUNK, "the default is 64")
    use_decay: bool = True
    use_beta: bool = True
    use_alpha: bool = True
    half_lives: list[float | int] | None = half_lives()
    unshare_kv_heads: bool = False

    def validate_half_lives(self):
        if self.half_lives is not None and not self.use_decay:
            raise UserError(f"half_lives={self.half_lives} needs the forget gate; set use_decay to True")


@register_mixer("gka")
class GKAMixer(HeadsMixer):
    """The GKA layer. States: H [B, H, s, s] and U [B, H, D, s] in fp32, conv_q, conv_k, conv_v [B, C, taps - 1].

    s is `sketch_dim`, or D without a sketch.
    """

    summary = (
        "[Gated KalmaNet](https://arxiv.org/abs/2511.21016): ridge regression of the values on the past keys, "
        "re-solved per token"
    )
    options_class = GKAOptions
    kept_bytes = KeptBytes(7, queries=18, keys=10, heads=22)  # counted from what its kernels keep
    fp32_parameters = no_weight_decay = ("A_log", "dt_bias")
    steering_layers = ("a_proj", "b_proj", "alpha_proj")
    linear = True
    max_head_dim = MAX_HEAD_DIM
    input_layers = (*HeadsMixer.input_layers, *GATES)
    head_parameters = ("a_proj", "A_log", "dt_bias", "b_proj", "alpha_proj")
    kv_head_parameters = ("sketch",)

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        options = self.options
        self.state_dim = options.sketch_dim or self.head_dim
        if self.state_dim > self.head_dim:
            raise UserError(
                f"layer {layer_idx}: sketch_dim={options.sketch_dim} is larger than the head size {self.head_dim}; set"
                f" it to at most {self.head_dim}, or to None for no sketch"
            )
        self.add_inputs(key_dim=self.head_dim, convolve_v=options.use_v_conv)
        if options.sketch_dim is not None:
            self.sketch = nn.Parameter(torch.empty(self.kv_heads, self.head_dim, self.state_dim))
        if options.use_decay:
            self.a_proj = nn.Linear(self.hidden, self.heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
            self.dt_bias = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        if options.use_beta:
            self.b_proj = nn.Linear(self.hidden, self.heads, bias=True)
        if options.use_alpha:
            self.alpha_proj = nn.Linear(self.hidden, self.heads, bias=True)
        self.add_output()

    def project(self, x, rotary):
        gates = self._gates_at_once(x)
        products = self.products(x, without=() if gates is None else GATES)
        tokens = self.project_heads(products, rotary)
        return tokens | (self._gates(x, products) if gates is None else gates)

    def _gates(self, x, products):
        """log_decay, beta and alpha from the products of the layer's input."""
        options, tokens = self.plain, {}
        if options["use_decay"] and options["use_beta"] and options["use_alpha"]:
            logits = [products[name] for name in GATES]
            found = gates_of_products(*logits, self.dt_bias, self.A_log, BETA_EPS)
            if found is not None:
                return dict(zip(("log_decay", "beta", "alpha"), found, strict=True))
        if options["use_decay"]:
            _, tokens["log_decay"] = decay(products["a_proj"], self.dt_bias, self.A_log)
        else:
            tokens["log_decay"] = at_least_fp32(x.new_zeros(*x.shape[:2], self.heads))
        if options["use_beta"]:
            tokens["beta"] = at_least_fp32(products["b_proj"]).sigmoid() + BETA_EPS
        if options["use_alpha"]:
            tokens["alpha"] = at_least_fp32(products["alpha_proj"]).sigmoid()
        return tokens

    def _gates_at_once(self, x):
        """The gates of one token in one call of native code or one kernel, or None where that is not possible."""
        options = self.plain
        if x.shape[1] != 1 or self.joined_layers is not None:
            return None
        if not (options["use_decay"] and options["use_beta"] and options["use_alpha"]):
            return None
        layers = [self._modules[name] for name in GATES]
        for layer in layers:
            if type(layer) is not nn.Linear or has_hooks(layer):
                return None
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        found = gates_of_token(x, weights, biases, self.dt_bias, self.A_log, BETA_EPS)
        return None if found is None else dict(zip(("log_decay", "beta", "alpha"), found, strict=True))

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        q, k, v, log_decay, beta, new = self.memory_inputs(tokens, states, lengths, cu_seqlens)
        y, (new["H"], new["U"]) = chunk_gka(
            q,
            k,
            v,
            log_decay,
            tokens.get("alpha"),
            beta,
            initial_state=(states["H"], states["U"]) if states else None,
            cu_seqlens=cu_seqlens,
            chunk_size=self.options.chunk_size,
            **self._solver(),
        )
        return y, new

    def memory_inputs(self, tokens, states, lengths, cu_seqlens):
        """q, k, v as the memory reads them; log_decay, beta, without effect at padding; states of the convolutions."""
        q, k, v, new = self.heads_scan(tokens, states, lengths, cu_seqlens)
        log_decay, beta = tokens["log_decay"], tokens.get("beta")
        if lengths is not None:
            valid = before_the_end(lengths, q.shape[1])[..., None].to(log_decay.dtype)
            log_decay = log_decay * valid
            beta = valid.expand_as(log_decay) if beta is None else beta * valid
        return q, k, v, log_decay, beta, new

    def piece_writes(self, tokens, states):
        """[H; U] and its decay."""
        _, k, v, log_decay, beta, _ = self.memory_inputs(tokens, states, None, None)
        k = sketched(k, self._solver()["sketch"])
        strength = None if beta is None else beta.square()
        return decayed_sum(torch.cat([k, v], -1), k, log_decay, strength)

    def memory_states(self, memory):
        H, U = memory.split([self.state_dim, self.head_dim], 2)
        return {"H": H, "U": U}

    def step(self, tokens, states, state_indices=None):
        q, k, v = self.heads_step(tokens, states, state_indices)
        gates = tokens["log_decay"], tokens.get("alpha"), tokens.get("beta")
        memory = (states["H"], states["U"])
        return gka_step(q, k, v, *gates, memory, state_indices=state_indices, **self._solver())

    def layer_step(self, x, rotary, states):
        options = self.plain
        gated = options["use_decay"] and options["use_beta"] and options["use_alpha"]
        layer = self.layer_around("gka", x, rotary, states) if gated and options["sketch_dim"] is None else None
        found = None if layer is None else parameters_of(self, GATES)
        if found is None:
            return None
        weights, biases = found
        gates = Gates(x, *weights, *biases, self.dt_bias, self.A_log, BETA_EPS)
        scale = self.head_dim**-0.5 if options["use_o_norm"] else 1.0
        solver = Solver(list(options["solver_phases"].values()), options["ridge"], scale)
        return gka_layer_step(layer, gates, (states["H"], states["U"]), solver)

    def state_shapes(self, batch, dtype=torch.float32):
        sizes, fp32 = {"H": self.state_dim, "U": self.head_dim}, torch.promote_types(dtype, torch.float32)
        memory = {name: ((batch, self.heads, rows, self.state_dim), fp32) for name, rows in sizes.items()}
        return self.convolution_shapes(batch, dtype) | memory

    def init_weights(self):
        """N(0, 0.02) matrices and taps, zero biases, unit norms; decay A ~ U(0, 16), dt log-uniform in [1e-3, 0.1];
        sketches with orthonormal columns in random directions.
        """
        init_layers(self)
        if self.options.sketch_dim is not None:
            init.copy_(self.sketch, torch.linalg.qr(torch.randn_like(self.sketch, dtype=torch.float32)).Q)
        if self.options.use_decay:
            init_decay(self.A_log, self.dt_bias, self.options.half_lives)

    def _solver(self) -> dict:
        options = self.plain
        return {
            "sketch": self.sketch if options["sketch_dim"] is not None else None,
            "refinement": tuple(options["solver_phases"].values()),
            "ridge": options["ridge"],
            "scale": None if options["use_o_norm"] else 1.0,
        }
