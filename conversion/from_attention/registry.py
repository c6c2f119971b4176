"""The table of starts from attention, and how a mixer gets its row.

    @starts("gka", options=options_for)
    def take_over(mixer, attention): ...

Without a row, a model cannot be converted to this mixer. Both functions see plain weights (`AttentionWeights`),
never a decoder family.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from hf_memmix.conversion.attention_weights import AttentionWeights, TensorFate
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import check_mixer_name


@dataclass(frozen=True)
class Start:
    """How a layer of one mixer is initialised from an attention.

    `options(attention)`: the options, other than the defaults, that the mixer needs to hold the weights of this
    attention. `take_over(mixer, attention)`: fills the mixer in place and returns a fate for every entry of
    `attention.tensors()`; raises ValueError for a tensor that the mixer cannot hold.
    """

    options: Callable[[AttentionWeights], dict]
    take_over: Callable[[nn.Module, AttentionWeights], list[TensorFate]]

    def fill(self, mixer: nn.Module, attention: AttentionWeights) -> list[TensorFate]:
        """`take_over`. A mixer with the option `unshare_kv_heads` gets the keys and values repeated for every head."""
        if not getattr(mixer.options, "unshare_kv_heads", False):
            return self.take_over(mixer, attention)
        own = attention.unshared()
        fates = self.take_over(mixer, own)
        repeated = {name for name, tensor in own.tensors().items() if tensor is not attention.tensors()[name]}
        return [
            replace(fate, fate="transformed", reason=UNSHARED)
            if fate.fate == "used" and fate.field in repeated
            else fate
            for fate in fates
        ]


STARTS: dict[str, Start] = {}
UNSHARED = "repeated, so that every query head has keys and values of its own"


def starts(
    name: str,
    options: Callable[[AttentionWeights], dict] = lambda attention: {},
):
    """Function decorator: make `take_over` the start of the mixer that is registered under `name`.

    Raises:
        ValueError: that mixer has a start already.
    """

    def register(take_over):
        if name in STARTS:
            raise UserError(f"the mixer {name!r} has a start from attention already; remove one of the two")
        STARTS[name] = Start(options, take_over)
        return take_over

    return register


def start_of(name: str) -> Start:
    """The start of the mixer `name`. Raises ValueError if there is no such mixer or it has no start."""
    check_mixer_name(name)
    if name in STARTS:
        return STARTS[name]
    raise UserError(
        f"layers of the mixer {name!r} cannot start from attention, train a model with them from scratch; mixers that"
        f" can: {', '.join(STARTS)}"
    )
