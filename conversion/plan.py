"""The plan that `memmix select` writes: the mixer, and the layers that stay attention."""

import json
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.layer_choice import LayerChoice
from hf_memmix.conversion.records import write_json
from hf_memmix.conversion.teacher_forcing import converted_layers
from hf_memmix.mixers import MIXERS, MemoryMixer


def write_plan(plan: dict, path: str | Path) -> None:
    """Write a plan, which has at least `mixer`, `keep` and `num_layers`, as a JSON file, atomically."""
    write_json(path, plan)


def read_plan(path: str | Path, num_layers: int) -> dict:
    """The plan in `path`, for a teacher of `num_layers` layers.

    Raises:
        ValueError: the file does not exist, is broken, or belongs to another teacher.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no plan {str(path)!r}; memmix select writes one")
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); let memmix select write it again") from None
    kinds = {"mixer": str, "keep": list, "num_layers": int}
    if not isinstance(plan, dict) or any(not isinstance(plan.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{str(path)!r} is not a plan: it lacks {', '.join(kinds)}; let memmix select write it again")
    if plan["num_layers"] != num_layers:
        raise ValueError(
            f"{str(path)!r} is for {plan['num_layers']} layers, but the teacher has {num_layers}; run memmix select"
            " for this teacher"
        )
    LayerChoice.of(plan["keep"], f"keep of {str(path)!r}").layers(num_layers)
    return plan


def take_mixers(student: PreTrainedModel, trained: PreTrainedModel) -> None:
    """Load the mixers of `trained`, e.g. an aligned student without attention, into the same layers of `student`.

    Raises:
        ValueError: in one of these layers, `trained` has attention or a mixer of another kind or other options.
    """
    have = set(converted_layers(trained))
    for layer in converted_layers(student):
        if layer not in have:
            raise ValueError(f"layer {layer} of the trained student is attention, so there is no mixer to take")
        theirs = attention_module(trained, layer)
        load_mixer(attention_module(student, layer), theirs.state_dict(), theirs.name)


def load_mixer(mixer: MemoryMixer, values: dict[str, Tensor], kind: str) -> None:
    """Load the tensors of a trained mixer of some kind into a mixer, in place.

    Raises:
        ValueError: the two have different kinds or options.
    """
    try:
        mixer.load_state_dict(values)
    except RuntimeError:
        kinds = f"{type(mixer).__name__}, {MIXERS[kind].__name__}"
        raise ValueError(
            f"the mixers of layer {mixer.layer_idx} differ ({kinds}) in kind or options; convert with those of the"
            " trained student"
        ) from None
