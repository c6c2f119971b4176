"""A plan, as `memmix select` writes it: which mixer takes over, and which layers stay attention."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.layer_choice import LayerChoice
from hf_memmix.conversion.records import write_json
from hf_memmix.conversion.teacher_forcing import converted_layers


def write_plan(plan: dict, path: str | Path) -> None:
    """Write `plan` as JSON, whole or not at all. It holds at least `mixer`, `keep` and `num_layers`."""
    write_json(path, plan)


def read_plan(path: str | Path, num_layers: int) -> dict:
    """The plan in `path`, for a teacher of `num_layers` layers.

    Raises:
        ValueError: there is none, it is broken, or it is another teacher's.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no plan {str(path)!r}; memmix select writes one")
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON ({error}); let memmix select write it anew") from None
    kinds = {"mixer": str, "keep": list, "num_layers": int}
    if not isinstance(plan, dict) or any(not isinstance(plan.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{str(path)!r} is no plan: it lacks {', '.join(kinds)}; let memmix select write it anew")
    if plan["num_layers"] != num_layers:
        raise ValueError(
            f"{str(path)!r} is for {plan['num_layers']} layers, the teacher has {num_layers}; select anew"
        )
    LayerChoice.of(plan["keep"], f"keep of {str(path)!r}").layers(num_layers)
    return plan


def take_mixers(student: PreTrainedModel, trained: PreTrainedModel) -> None:
    """Load the mixers of `trained`, e.g. an aligned student without attention, into the same layers of `student`.

    Raises:
        ValueError: `trained` has no mixer in some of them, or another one.
    """
    have = set(converted_layers(trained))
    for layer in converted_layers(student):
        if layer not in have:
            raise ValueError(f"layer {layer} of the trained student is attention; it can give no mixer for it")
        ours, theirs = (attention_module(model, layer) for model in (student, trained))
        try:
            ours.load_state_dict(theirs.state_dict())
        except RuntimeError:
            raise ValueError(
                f"the mixers of layer {layer} differ ({type(ours).__name__}, {type(theirs).__name__}) in kind or "
                "options; convert with those of the trained student"
            ) from None
