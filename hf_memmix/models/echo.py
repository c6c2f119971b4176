"""The language models of the Echo paper: Mamba-2 layers, a few SKA layers between them, Koopman MLPs.

    model = EchoForCausalLM(EchoConfig.preset("180m"))

Embeddings, norms, residuals and head are Llama's. Only kept attention layers use rotary embeddings.
"""

from typing import ClassVar

from transformers import LlamaConfig

from ..errors import UserError
from ..mixers import KoopmanMLP
from .family import FamilyConfig, register_family, sizes

FEED_FORWARDS = ("koopman", "koopman_gated", "swiglu")


def echo_layers(num_layers: int, ska: int = 2) -> list[str]:
    """One mixer per layer: Mamba-2, and SKA in `ska` evenly spaced inner layers; the first and last are Mamba-2.

    Raises:
        ValueError: there are fewer inner layers than that.
    """
    last = num_layers - 1
    if not 0 <= ska <= max(last - 1, 0):
        raise UserError(
            f"num_ska_layers={ska} must be 0 to {max(last - 1, 0)}: the model has {num_layers} layers, of which the"
            " first and the last are Mamba-2"
        )
    places = {round((i + 1) * last / (ska + 1)) for i in range(ska)}
    return ["ska" if i in places else "mamba2" for i in range(num_layers)]


@register_family
class EchoConfig(FamilyConfig, LlamaConfig):
    """A decoder of Mamba-2 and SKA layers with Koopman MLPs; all other fields are Llama's.

        EchoConfig.preset("180m")
        EchoConfig.preset("1m", num_ska_layers=0)                              # baseline: state space layers only
        EchoConfig.preset("1m", num_ska_layers=0, attention_layers=[1, 2])     # baseline: with attention

    Args:
        num_ska_layers: SKA layers, evenly spaced; the first and the last layer are always Mamba-2, as in the paper's
            language models. In its synthetic experiments SKA is last: mixer_types=["mamba2", "mamba2", "ska", "ska"].
        feed_forward: "koopman", "koopman_gated" or "swiglu", Llama's own.

    Presets: "180m", "50m" and "1m", the paper's three sizes. The paper states the hidden size, depth and heads of the
    first, the SKA layers of the first two, and the number of parameters of all. The other sizes here are chosen to
    fit.
    """

    model_type: ClassVar[str] = "memmix_echo"
    mixer: ClassVar[str] = "mamba2"
    presets: ClassVar[dict] = {
        "1m": sizes(
            128, 4, 4, 384, vocab_size=256, max_position_embeddings=4096, feed_forward="swiglu",
            mixers={"ska": {"rank": 24, "chunk_size": 8}, "mamba2": {"state_size": 64, "head_dim": 32}},
        ),
        "50m": sizes(512, 12, 8, 1368, max_position_embeddings=4096, num_ska_layers=4),
        "180m": sizes(768, 24, 12, 2048, max_position_embeddings=4096),
    }  # fmt: skip

    num_ska_layers: int = 2
    feed_forward: str = "koopman"

    def __post_init__(self, **kwargs):
        if self.feed_forward not in FEED_FORWARDS:
            raise UserError(f"feed_forward={self.feed_forward!r} must be one of {FEED_FORWARDS}")
        super().__post_init__(**kwargs)

    def layer_mixers(self) -> list[str]:
        """As `echo_layers`, with its errors."""
        return echo_layers(self.num_hidden_layers, self.num_ska_layers)

    def make_feed_forward(self, layer_idx: int):
        """A `KoopmanMLP`, or None for Llama's."""
        if self.feed_forward == "swiglu":
            return None
        return KoopmanMLP(self.hidden_size, self.intermediate_size, gated=self.feed_forward == "koopman_gated")
