"""The weights of one softmax-attention layer in a plain form, from which a mixer is initialised.

Every decoder family stores its attention differently (fused qkv, interleaved heads, transposed Conv1D). `families.py`
brings them all to this form, so the functions in `from_attention` need no code for single families. Such a function
returns one `TensorFate` for every tensor of `attention.tensors()`. The conversion refuses a tensor without a fate.
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from hf_memmix.errors import UserError


@dataclass
class AttentionWeights:
    """Separate projections, ordered by head. Weights are `[out, in]` as in nn.Linear; rows h * D to (h + 1) * D of
    `q_weight` are query head h.

    Shapes: H query heads, Hk key/value heads, D head size, d rotated channels per head.

    `q_norm`, `k_norm`: scale of an RMSNorm over one head `[D]` or over all heads `[H * D]`; Gemma's `1 + weight` is
        already added. None if the family has no such norm.
    `rotary`: layout of the cos and sin that the layers of the backbone receive: "half" = [c, c], "pairs" = every
        entry twice in a row, "single" = c alone, None = no rotary embeddings. In all cases the channels i and i + d/2
        of a head form a pair, because the conversion reorders the rows of other families.
    `extra`: tensors that only some families have, such as attention sinks.
    `sources`: for every field (or `extra.<name>`), the names of the teacher's tensors from which it was read.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_weight: Tensor  # [H * D, hidden]
    k_weight: Tensor  # [Hk * D, hidden]
    v_weight: Tensor  # [Hk * D, hidden]
    o_weight: Tensor  # [hidden, H * D]
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    scaling: float | None = None  # multiplier of the attention scores
    softcap: float | None = None  # c in c tanh(scores / c)
    norm_eps: float | None = None  # epsilon of the norms of q and k
    rotary: str | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors present, by field name; those of `extra` as `extra.<name>`."""
        names = [f"{role}_{kind}" for kind in ("weight", "bias", "norm") for role in "qkvo"]
        found = {name: getattr(self, name, None) for name in names}
        found |= {f"extra.{name}": tensor for name, tensor in self.extra.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def unshared(self) -> "AttentionWeights":
        """The same attention with keys and values of its own for every query head, repeated from those of its group.

        Its tensors of k and v have H * D rows.
        """
        groups = self.num_heads // self.num_kv_heads

        def repeated(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor.unflatten(0, (self.num_kv_heads, -1)).repeat_interleave(groups, 0).flatten(0, 1)

        # a norm over one head is the same for all of them
        over_all = self.q_norm is not None and self.q_norm.numel() != self.head_dim
        names = [f"{role}_{kind}" for role in "kv" for kind in ("weight", "bias")] + (["k_norm"] if over_all else [])
        own = {name: repeated(getattr(self, name)) for name in names}
        return replace(self, num_kv_heads=self.num_heads, **own)


@dataclass(frozen=True)
class TensorFate:
    """What the conversion did with one attention tensor.

    `field`: a key of `AttentionWeights.tensors()`.
    `fate`: "used" (copied bit for bit), "transformed" (`reason` describes the change) or "dropped" (`reason` explains
        why).
    `targets`: names of the mixer's parameters that received the tensor.
    """

    field: str
    fate: str
    targets: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self):
        if self.fate not in ("used", "transformed", "dropped"):
            raise UserError(f"{self.field}: fate {self.fate!r}; it must be used, transformed or dropped")
        if self.fate != "used" and not self.reason:
            raise UserError(f"{self.field} is {self.fate} without a reason; give one")
