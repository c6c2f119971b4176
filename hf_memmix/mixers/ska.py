"""SKA, Spectral Koopman Attention: ridge regression on the past, filtered by powers of the keys' own dynamics.

    G = sum k_t k_t^T;  M = sum k_t k_{t-1}^T;  C = sum v_t k_t^T;  P = (G + eps nu^2 I)^-1;  nu = max |k_t|
    y_t = eta (gamma / |M|)^K C P (M P)^K q_t,  out = W_o y;  the sums run over all chunks before the chunk of token t

Paper: "Echo: Spectral Koopman Attention", section 3.2. |M| is the spectral norm of the whitened M, see
`hf_memmix_kernels.ska`. Keys and queries have rank r, values the head size P. There is no rotary embedding: M
contains the order of the tokens.

Shapes: B batch, T tokens, H query heads, Hk key/value heads, r rank, P head size.
"""

from dataclasses import astuple

import torch
from torch import nn
from transformers import initialization as init

from hf_memmix_kernels import cg_lift, chunk_ska, ska_per_token_state, ska_state_shapes, ska_step
from hf_memmix_kernels._common import MAX_HEAD_DIM
from hf_memmix_kernels.ska.arguments import Estimate, State
from hf_memmix_kernels.ska.layer import ska_layer_step
from hf_memmix_kernels.ska.op import MAX_RANK, NORMALIZATIONS
from hf_memmix_kernels.ska.operator import Operator

from ..errors import UserError
from .base import AttentionShape, MemoryMixer, register_mixer
from .kept_bytes import KeptBytes
from .layer_step import layer_around
from .layers import at_least_fp32, init_layers
from .options import MixerOptions, between, mixer_options, one_of
from .tp_plan import heads_plan

MAX_POWER = 8
MAX_CHUNK = 2**20  # tokens; a limit is needed because the operator is used only after its chunk has ended
ETA = 1.5  # scale of the readout before training, as in the paper
STATES = ("statistics", "operator", "previous", "nu", "position")


@mixer_options
class SKAOptions(MixerOptions):
    """Options of the SKA layer; the defaults are the paper's if it states them.

    Args:
        rank: r of keys and queries, at most 128. The paper has 24 and 32. Above 64, no Triton kernel runs.
        power: K; 0 means plain ridge regression.
        chunk_size: tokens between two estimates of the operator. It is part of the model: a saved state depends on it.
            The tokens of the first chunk read nothing, so the layer learns only from sequences of at least
            chunk_size + 2 tokens, and a model in train mode refuses shorter ones: take 8 or 16 for short sequences.
        eps: ridge, in units of nu^2. If a matrix is not positive definite, the ridge is made ten times larger, up to
            three times.
        spectral_norm: divide by the spectral norm.
        sigma_floor: smallest such divisor; the paper has no such bound.
        normalization: nu is over the keys that are stored; the paper's is over all keys, also those that the action
            mask hides. "running_max" is causal. "sequence_max", as in the paper, computes nu over the tokens of one
            forward, so a sequence that is cut into several forwards gives slightly different outputs.
        refresh_every: None means `chunk_size`. 1 means an estimate at every token, as in the paper: a model that was
            trained in chunks then reads newer statistics, at O(r^2) per decoded token and O(r^3) per prompt token.
        use_cg_lift: keys and queries pass through the lift of complex pairs of the paper's appendix, and a shared
            linear map back to r.
        unshare_kv_heads: every query head has keys and values of its own.
        qkv_bias, o_bias: biases of the projections.
    """

    rank: int = between(32, 1, MAX_RANK, "the paper's are 24 and 32")
    power: int = between(2, 0, MAX_POWER, "the paper's K is 2")
    chunk_size: int = between(64, 1, MAX_CHUNK, "the default is 64")
    eps: float | int = between(1e-3, 1e-5, 100, "the paper's is 1e-3; below 1e-5 float32 loses the inverse")
    spectral_norm: bool = True
    sigma_floor: float | int = between(0.1, 1e-6, 1, "the default is 0.1")
    normalization: str = one_of("running_max", NORMALIZATIONS)
    refresh_every: int | None = None
    use_cg_lift: bool = False
    unshare_kv_heads: bool = False
    qkv_bias: bool = False
    o_bias: bool = False

    def validate_operator(self):
        if self.refresh_every not in (None, 1, self.chunk_size):
            raise UserError(
                f"refresh_every={self.refresh_every!r} must be None, 1 or chunk_size={self.chunk_size}: within a chunk"
                " the operator is refreshed at every token or not at all"
            )
        if self.refresh_every == 1 and self.normalization != "running_max":
            raise UserError("refresh_every=1 needs normalization='running_max'; the whole sequence is not known")
        if self.use_cg_lift and self.rank % 2:
            raise UserError(f"use_cg_lift=True pairs the features of a key: rank={self.rank} must be even")


@register_mixer("ska")
class SKAMixer(MemoryMixer):
    """The SKA layer. States, in fp32: statistics [G | M^T | C^T] [B, Hk, r, 2 r + P], operator [B, Hk, r, P] (the
    inverse [B, Hk, r, r] with refresh_every=1), previous key [B, Hk, r], nu [B, Hk], position in the chunk [B, Hk].
    """

    summary = (
        "Spectral Koopman Attention (Echo): ridge regression on a low-rank projection, filtered by powers of the "
        "keys' transition operator"
    )
    options_class = SKAOptions
    kept_bytes = KeptBytes(3, queries=5.7)  # measured beside gka
    fp32_parameters = no_weight_decay = ("gamma", "eta")
    input_layers = ("q_proj", "k_proj", "v_proj")
    token_arguments = ("action_mask",)

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        options = self.options
        shape = AttentionShape.of(config, options.unshare_kv_heads)
        shape.check(self, MAX_HEAD_DIM)
        hidden, self.heads, self.kv_heads, self.head_dim = astuple(shape)
        rank = options.rank
        self.q_proj = nn.Linear(hidden, self.heads * rank, bias=options.qkv_bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * rank, bias=options.qkv_bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=options.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=options.o_bias)
        if options.use_cg_lift:
            self.lift_proj = nn.Linear(3 * rank // 2, rank, bias=False)
        for name in self.fp32_parameters:
            setattr(self, name, nn.Parameter(torch.empty(self.heads, dtype=torch.float32)))

    def project(self, x, rotary):
        products = self.products(x)
        q, k = (products[name].unflatten(-1, (-1, self.plain["rank"])) for name in ("q_proj", "k_proj"))
        if self.plain["use_cg_lift"]:
            q, k = (self.lift_proj(cg_lift(t)) for t in (q, k))
        return {"q": q, "k": k, "v": products["v_proj"].unflatten(-1, (-1, self.head_dim))}

    def scan(self, tokens, states, lengths=None, cu_seqlens=None):
        options = self.options
        state = None if states is None else tuple(states[name] for name in STATES)
        if self._per_token and state is not None:
            state = self._after_chunks_of_one(state)
        y, state = chunk_ska(
            *self._arguments(tokens),
            **self._model(),
            chunk_size=1 if self._per_token else options.chunk_size,
            normalization=options.normalization,
            initial_state=state,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
        )
        if self._per_token:
            state = ska_per_token_state(state, eps=options.eps)
        return y, dict(zip(STATES, state, strict=True))

    def step(self, tokens, states, state_indices=None):
        options = self.plain
        state = tuple(states[name] for name in STATES)
        return ska_step(
            *self._arguments(tokens),
            state,
            **self._model(),
            chunk_size=options["chunk_size"],
            refresh_every=options["refresh_every"],
            state_indices=state_indices,
        )

    def layer_step(self, x, rotary, states):
        options = self.plain
        layer = None if self._per_token or options["use_cg_lift"] else layer_around("ska", self, x, None, states)
        if layer is None:
            return None
        state, estimate = State(*[states[name] for name in STATES]), Estimate(**self._model())
        return ska_layer_step(layer, (self.gamma, self.eta), state, options["chunk_size"], estimate)

    def readout(self, y, x, tokens=None):
        return self.o_proj(y.flatten(2))

    def state_shapes(self, batch, dtype=torch.float32):
        rank, dtype = self.options.rank, torch.promote_types(dtype, torch.float32)
        shapes = dict(zip(STATES, ska_state_shapes(batch, self.kv_heads, rank, self.head_dim), strict=True))
        if self._per_token:
            shapes["operator"] = (batch, self.kv_heads, rank, rank)
        return {name: (shape, dtype) for name, shape in shapes.items()}

    def tp_plan(self, ranks):
        return heads_plan(self, ranks, by_heads=("q_proj", "gamma", "eta"), by_kv_heads=("k_proj", "v_proj"))

    def init_weights(self):
        """As in the paper: orthogonal q and k, N(0, 0.02) values, zero output, gamma = 1, eta = `ETA`."""
        init_layers(self)
        for projection in (self.q_proj, self.k_proj):
            init.orthogonal_(projection.weight)
        init.zeros_(self.o_proj.weight)
        init.ones_(self.gamma)
        init.constant_(self.eta, ETA)

    @classmethod
    def minimum_training_length(cls, options):
        """A token reads the chunks before its own, which have two keys if power > 0, and needs a label."""
        size = 1 if options.refresh_every == 1 else options.chunk_size
        return max(size, 2 if options.power else 1) + 2

    def check_split(self):
        if self.options.normalization == "sequence_max":
            raise UserError(
                f"ska of layer {self.layer_idx}: normalization='sequence_max' reads the whole sequence, of which each"
                " process has a part; use normalization='running_max', or train without context parallelism"
            )

    @property
    def _per_token(self) -> bool:
        return self.options.refresh_every == 1 and self.options.chunk_size > 1

    def _arguments(self, tokens) -> tuple:
        """q, k, v, action mask, gamma and eta of the op."""
        gamma, eta = at_least_fp32(self.gamma), at_least_fp32(self.eta)
        return (*(tokens[n] for n in "qkv"), tokens.get("action_mask"), gamma, eta)

    def _model(self) -> dict:
        return {name: self.plain[name] for name in ("power", "eps", "spectral_norm", "sigma_floor")}

    def _after_chunks_of_one(self, state):
        """The state of `chunk_ska(chunk_size=1)` from that of `ska_step(refresh_every=1)`."""
        S, _, previous, nu, position = state
        operator = Operator(S, nu, Estimate(**self._model()), check=S.device.type == "cpu").WT
        return S, operator.contiguous(), previous, nu, torch.zeros_like(position)
