"""Lattice: m memory slots of unit norm per head; a token writes to a slot only what is orthogonal to it.

    s_i <- normalise(mu_t s_i - gamma_t c_i (h - s_i (s_i . h))),  y_t = S_t q_t,  out = W_o (RMSNorm(y) * GELU(W_g x))
    DEC: h = S k - v, c = k;   ENC: h = v, c = S^T v - k;   SIM: h = -v, c = k

ENC is a least mean squares step on s_i . v. It makes an error smaller only if gamma |v|^2 < 2 (with a forget gate,
gamma / mu in the place of gamma). With larger steps, slots swing from one side of v to the other, and gradients grow
from token to token. The paper does not say how it prevents this. Here v of ENC has unit norm, like k, and its step
is at most 3/2. A step divided by |v|^2, as in normalised least mean squares, was as stable in a small test of
recall, and not better.

Paper: Karami and Mirrokni, "Lattice: Learning to Efficiently Compress the Memory", arXiv:2504.05646, eq. 7, 10, 12 to
16. The block is its Figure 2: one projection for q and k, a short convolution for each, a GELU gate after the memory.

Shapes: B batch, T tokens, H heads, Hk key/value heads, d head size, m slots.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from hf_memmix_kernels.lattice import check_lattice, chunk_lattice, lattice_step
from hf_memmix_kernels.lattice.arguments import Gates
from hf_memmix_kernels.lattice.layer import lattice_layer_step
from hf_memmix_kernels.lattice.naive import VARIANTS
from hf_memmix_kernels.lattice.native_path import runs_native
from hf_memmix_kernels.lattice.sizes import MAX_DIM
from hf_memmix_kernels.rowwise import unit_heads

from ..errors import UserError
from ..padding import before_the_end
from .base import register_mixer
from .heads import UNIT_EPS, HeadsMixer, HeadsOptions
from .kept_bytes import KeptBytes
from .layer_step import parameters_of
from .layers import at_least_fp32, init_layers
from .options import between, mixer_options, one_of

ENC_STEP = 1.5  # largest step: errors become smaller below 2, and faster the further below
STEP_SIZES = ("sigmoid", "softplus", "constant")
FORGET_GATE_BIAS = 4.0  # at the start; the gate is then 0.98


@mixer_options
class LatticeOptions(HeadsOptions):
    """Options of the Lattice layer beside `HeadsOptions`.

    Args:
        variant: "dec", "enc" or "sim", the objective whose gradient step is the write; or one of the paper's
            baselines in the same block: "delta" (eq. 20) and "ttt" (eq. 19), whose slots may have any norm. In "enc"
            v has unit norm and steps are at most 1.5, even if `gamma_max` is larger.
        slots: number of slots m per head, at most the head size d; None means d.
        project: bring the slots back to unit norm after each write (eq. 14); without it, only eq. 13. The baselines
            ignore this option: they have no projection.
        step_size: gamma_t = gamma_max sigmoid(W x + b) per head, softplus(W x + b), or "constant": gamma_max
            sigmoid(b), the same for all tokens. The paper leaves it open.
        gamma_max: the largest step of "sigmoid" and "constant".
        use_forget_gate: mu_t = sigmoid(W x + b) per head (eq. 16).
        l1: threshold of the proximal step after each write (eq. 18), times gamma_t.
        share_qk: one projection for q and k, as in the paper; each then has H heads.
        use_unit_qk: q and k of unit norm.
        use_v_conv: as in GKA and Mamba-2; the paper's layer does not have it.
        unshare_kv_heads: every query head has keys and values of its own.
    """

    variant: str = one_of("dec", VARIANTS)
    slots: int | None = between(None, 1, MAX_DIM, "None is the head size")
    project: bool = True
    step_size: str = one_of("sigmoid", STEP_SIZES)
    gamma_max: float | int = between(1.0, 1e-6, 100, "a step of 1 replaces a slot, the default is 1")
    use_forget_gate: bool = False
    l1: float | int = between(0.0, 0, 1, "a slot has unit norm: a larger threshold would clear it")
    share_qk: bool = True
    use_unit_qk: bool = True
    use_v_conv: bool = False
    unshare_kv_heads: bool = False

    def validate_qk_norm(self):
        if self.qk_norm is not None and self.share_qk:
            raise UserError(f"qk_norm={self.qk_norm!r} needs separate projections of q and k; set share_qk to False")


@register_mixer("lattice")
class LatticeMixer(HeadsMixer):
    """The Lattice layer. States: S [B, H, d, m] in fp32, conv_q, conv_k and, with `use_v_conv`, conv_v
    [B, C, taps - 1].

    S starts at the learned `S0`. Its columns start orthonormal, and are brought to unit norm whenever it is used.
    """

    summary = (
        "[Lattice](https://arxiv.org/abs/2504.05646): slots of unit norm; a token writes to a slot only the "
        "part that is orthogonal to it"
    )
    options_class = LatticeOptions
    kept_bytes = KeptBytes(6, queries=32.0)  # measured beside gka
    fp32_parameters = ("S0",)
    no_weight_decay = ("S0", "gamma_bias")
    lora_targets = ("qk_proj", "q_proj", "v_proj")
    steering_layers = ("gamma_proj", "f_proj")
    max_head_dim = MAX_DIM
    input_layers = (*HeadsMixer.input_layers, "gamma_proj", "f_proj")
    head_parameters = ("S0", "gamma_bias", "gamma_proj", "f_proj")
    gate_activation = "gelu"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        options = self.options
        self.slots = options.slots or self.head_dim
        if self.slots > self.head_dim:
            raise UserError(
                f"layer {layer_idx}: {self.slots} slots of size {self.head_dim} cannot start orthogonal; set slots to"
                f" at most {self.head_dim}"
            )
        self.add_inputs(key_dim=self.slots, share_qk=options.share_qk, convolve_v=options.use_v_conv)
        self.S0 = nn.Parameter(torch.empty(self.heads, self.head_dim, self.slots, dtype=torch.float32))
        if options.step_size == "constant":
            self.gamma_bias = nn.Parameter(torch.empty(self.heads))
        else:
            self.gamma_proj = nn.Linear(self.hidden, self.heads, bias=True)
        if options.use_forget_gate:
            self.f_proj = nn.Linear(self.hidden, self.heads, bias=True)
        self.add_output()

    def project(self, x, rotary):
        options, products = self.plain, self.products(x)
        tokens = self.project_heads(products, rotary)
        tokens["gamma"] = self._step_size(x, products)
        if options["use_forget_gate"]:
            tokens["log_decay"] = F.logsigmoid(at_least_fp32(products["f_proj"]))
        if options["variant"] == "enc":
            # with projection, a forget gate has the effect of a larger step
            gated = options["use_forget_gate"] and options["project"]
            mu = tokens["log_decay"].exp() if gated else torch.ones_like(tokens["gamma"])
            tokens["gamma"] = tokens["gamma"].clamp(max=ENC_STEP * mu)
        return tokens

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        q, k, v, new = self.convolve(tokens, states, lengths, cu_seqlens)
        q, k, v = self.heads_for_memory(q, k, v, tokens)
        gamma, log_decay = tokens["gamma"], tokens.get("log_decay")
        if lengths is not None:
            # a step of size zero changes no slot
            valid = before_the_end(lengths, q.shape[1])[..., None].to(gamma.dtype)
            gamma = gamma * valid
            log_decay = None if log_decay is None else log_decay * valid
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        y, new["S"] = chunk_lattice(
            q,
            k,
            v,
            gamma,
            log_decay,
            initial_state=states["S"] if states else self.start().expand(sequences, -1, -1, -1),
            cu_seqlens=cu_seqlens,
            **self._recurrence(),
        )
        return y, new

    def step(self, tokens, states, state_indices=None):
        q, k, v = self._own_heads(*self.heads_step(tokens, states, state_indices, self.plain["use_unit_qk"]))
        memory = {"state": states["S"], "state_indices": state_indices}
        return lattice_step(q, k, v, tokens["gamma"], tokens.get("log_decay"), **memory, **self._recurrence())

    def layer_step(self, x, rotary, states):
        options = self.plain
        if not runs_native(None, **self._recurrence()):
            return None
        layer = self.layer_around("lattice", x, rotary, states, unit_norm=options["use_unit_qk"])
        found = None if layer is None else parameters_of(self, ("gamma_proj", "f_proj"))
        if found is None:
            return None
        weights, biases = found
        if options["step_size"] == "constant":
            biases[0] = self.gamma_bias
        gates = Gates(weights, biases, options["step_size"] == "softplus", options["gamma_max"], ENC_STEP, UNIT_EPS)
        return lattice_layer_step(layer, gates, states["S"], options["variant"])

    def initial_states(self, batch, device, dtype):
        states = self.allocate_states(batch, device, dtype)
        return states | {"S": self.start().to(states["S"]).repeat(batch, 1, 1, 1)}

    def start(self):
        """S_0 [H, d, m] with columns of unit norm."""
        return F.normalize(at_least_fp32(self.S0), dim=1)

    def state_shapes(self, batch, dtype=torch.float32):
        memory = (batch, self.heads, self.head_dim, self.slots), torch.promote_types(dtype, torch.float32)
        return self.convolution_shapes(batch, dtype) | {"S": memory}

    def init_weights(self):
        """N(0, 0.02) matrices and taps, zero biases, unit norms; orthonormal S_0, gamma_max / 2, a forget gate near 1.

        "softplus" starts at log 2.
        """
        init_layers(self)
        init.copy_(self.S0, torch.linalg.qr(torch.randn_like(self.S0, dtype=torch.float32)).Q)
        if self.options.step_size == "constant":
            init.zeros_(self.gamma_bias)
        if self.options.use_forget_gate:
            init.constant_(self.f_proj.bias, FORGET_GATE_BIAS)

    @classmethod
    def check_states(cls, options, states):
        """Slots must have unit norm if the write projects them to it."""
        if _projects(options.plain):
            check_lattice(state=states["S"])

    def check_weights(self):
        """S_0 may have columns of any norm except zero, because they are normalised when used."""
        sizes = torch.linalg.vector_norm(at_least_fp32(self.S0.detach()), dim=1)
        if self.S0.device.type != "meta" and not ((sizes > 0) & sizes.isfinite()).all():
            wrong = sizes[~((sizes > 0) & sizes.isfinite())]
            raise UserError(
                f"layer {self.layer_idx}: {wrong.numel()} columns of S0 have norm {wrong[0].item()} and so no"
                " direction; give them any other value, or take another checkpoint"
            )

    def _step_size(self, x, products):
        """gamma [B, T, H] in fp32."""
        options = self.plain
        if options["step_size"] == "constant":
            return (options["gamma_max"] * at_least_fp32(self.gamma_bias).sigmoid()).expand(*x.shape[:2], -1)
        logits = at_least_fp32(products["gamma_proj"])
        return F.softplus(logits) if options["step_size"] == "softplus" else options["gamma_max"] * logits.sigmoid()

    def angles(self, rotary):
        cos, sin = super().angles(rotary)
        if 2 * cos.shape[-1] > self.slots:
            raise UserError(
                f"layer {self.layer_idx}: rotary embeddings turn {2 * cos.shape[-1]} channels, q and k have"
                f" {self.slots}, one per slot; set slots to at least that, or use_rope to False"
            )
        return cos, sin

    def heads_for_memory(self, q, k, v, tokens):
        """[B, T, C] after the convolutions -> q, k [B, T, H, m] and v [B, T, H, d]; unit norms as the options say."""
        return self._own_heads(*self.split_heads(q, k, v, tokens, unit_norm=self.plain["use_unit_qk"]))

    def _own_heads(self, q, k, v):
        """q, k and v with one head of k and v per query head; in ENC v has unit norm."""
        if self.plain["variant"] == "enc":
            v = unit_heads(v, None, None, UNIT_EPS)
        # every query head has its own memory
        if k.shape[2] != self.heads:
            k = k.repeat_interleave(self.heads // k.shape[2], 2)
        if v.shape[2] != self.heads:
            v = v.repeat_interleave(self.heads // v.shape[2], 2)
        return q, k, v

    def _recurrence(self) -> dict:
        options = self.plain
        return {"variant": options["variant"], "project": _projects(options), "l1": options["l1"]}


def _projects(options: dict) -> bool:
    """Whether slots have unit norm, by the `plain` options."""
    return options["project"] and options["variant"] not in ("ttt", "delta")
