"""Plain weights of one softmax-attention layer, the form in which the start of a mixer receives what it replaces.

Every decoder family stores its attention differently (fused qkv, interleaved heads, transposed Conv1D). `families.py`
brings them all to this form, so a start (`from_attention`) never looks at a family. It answers with one `TensorFate`
for every tensor listed by `attention.tensors()`; the conversion refuses a tensor without a fate.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class AttentionWeights:
    """Separate, head-wise projections: row block h of `q_weight` is query head h, `[out, in]` as in nn.Linear.

    `q_norm`/`k_norm` are effective scales (Gemma's `1 + weight` already added) of an RMSNorm over one head `[D]` or
    over all heads `[H * D]`; `None` where the family has none. Rotary pairs are channels (i, i + d/2) of a head,
    whatever the family's own order; `rotary` is the layout of the cos and sin that the backbone hands to its layers:
    "half" = [c, c], "pairs" = every entry twice in a row, "single" = c alone, `None` = no rotary embeddings. `extra`
    holds tensors without a common name, such as attention sinks. `sources` maps every field (or `extra.<name>`) to
    the teacher's tensor names it was read from.
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
    rotary: str | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors present, by field name; those of `extra` as `extra.<name>`."""
        names = [f"{role}_{kind}" for kind in ("weight", "bias", "norm") for role in "qkvo"]
        found = {name: getattr(self, name, None) for name in names}
        found |= {f"extra.{name}": tensor for name, tensor in self.extra.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class TensorFate:
    """What became of one attention tensor.

    `field`: a key of `AttentionWeights.tensors()`; `fate`: "used" (copied bit for bit), "transformed" (changed on the
    way, `reason` says how) or "dropped" (`reason` says why); `targets`: the mixer's parameter names it went into.
    """

    field: str
    fate: str
    targets: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self):
        if self.fate not in ("used", "transformed", "dropped"):
            raise ValueError(f"{self.field}: fate {self.fate!r}; it must be used, transformed or dropped")
        if self.fate != "used" and not self.reason:
            raise ValueError(f"{self.field} is {self.fate} without a reason; give one")
