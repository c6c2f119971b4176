"""The plan that `memmix select` writes: which layers stay attention, and the mixer of each other layer.

A plan for one mixer has the fields `mixer` and `keep`; one for several mixers has `mixer_types`, one entry per layer.
Both may have `mixers`, the options by mixer, and `trained`, the folder with aligned weights, relative to the plan. A
plan that is written by hand may have `layers` in place of `mixer_types`, as in `convert_model`:

    {"layers": {"ska": [1], "mamba2": "rest"}}
"""

import json
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.layer_choice import LayerChoice
from hf_memmix.conversion.limits import check_converted
from hf_memmix.conversion.mixer_layout import mixer_types_of
from hf_memmix.conversion.records import write_json
from hf_memmix.mixers import ATTENTION, MIXERS, MemoryMixer

ONE_MIXER = {"mixer": str, "keep": list, "num_layers": int}
SEVERAL = {"mixer_types": (list, dict, str), "num_layers": int}
READ = {*ONE_MIXER, *SEVERAL, "layers", "mixers", "trained"}
# what memmix select writes beside these, for people and for cards; "out" stands in what it prints
RECORDED = {
    *("mixers_of", "text", "settings", "environment", "teacher", "candidates", "budget", "totals", "single"),
    *("times_of", "scores", "recipe", "train_tokens", "out"),
}


def write_plan(plan: dict, path: str | Path) -> None:
    """Write a plan as a JSON file, atomically."""
    write_json(path, plan)


def read_plan(path: str | Path, num_layers: int) -> dict:
    """The plan in `path`, for a teacher of `num_layers` layers.

    Raises:
        ValueError: the file does not exist, is broken, contradicts itself, has an unknown field, or belongs to another
            teacher.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no plan {str(path)!r}; memmix select writes one")
    try:
        plan = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}); let memmix select write it again") from None
    if isinstance(plan, dict) and isinstance(plan.get("layers"), (dict, str)):
        if "mixer_types" in plan:
            raise ValueError(f"{str(path)!r} names the mixers by layers and by mixer_types; remove one of them")
        plan = {"num_layers": num_layers} | plan | {"mixer_types": plan["layers"]}
    kinds = SEVERAL if isinstance(plan, dict) and "mixer_types" in plan else ONE_MIXER
    if not isinstance(plan, dict) or any(not isinstance(plan.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{str(path)!r} is not a plan: it lacks {', '.join(kinds)}; let memmix select write it again")
    if unknown := sorted(plan.keys() - READ - RECORDED):
        raise ValueError(
            f"{str(path)!r} has {', '.join(map(repr, unknown))}, which a plan does not have; it may have"
            f" {', '.join(sorted(READ))}"
        )
    _check_optional(plan, path)
    if plan["num_layers"] != num_layers:
        raise ValueError(
            f"{str(path)!r} is for {plan['num_layers']} layers, but the teacher has {num_layers}; run memmix select"
            " for this teacher"
        )
    if kinds is ONE_MIXER:
        LayerChoice.of(plan["keep"], f"keep of {str(path)!r}").layers(num_layers)
    else:
        types = mixer_types_of(plan["mixer_types"], num_layers, f"mixer_types of {str(path)!r}")
        plan = plan | {"mixer_types": types}
        _check_one_choice(plan, path)
    return plan


def _check_optional(plan: dict, path: Path) -> None:
    """Raise ValueError if `mixers` or `trained` has a wrong type."""
    mixers, trained = plan.get("mixers"), plan.get("trained")
    if mixers is not None and not (isinstance(mixers, dict) and all(isinstance(own, dict) for own in mixers.values())):
        raise ValueError(f'mixers of {str(path)!r} is {mixers!r}; give options by mixer, e.g. {{"gka": {{...}}}}')
    if not isinstance(trained, str | None):
        raise ValueError(f"trained of {str(path)!r} is {trained!r}; give the folder of the aligned mixers")


def _check_one_choice(plan: dict, path: Path) -> None:
    """Raise ValueError if `keep` or `mixer`, which are not read in a plan of several mixers, say something else."""
    types = plan["mixer_types"]
    kept = [layer for layer, kind in enumerate(types) if kind == ATTENTION]
    if "keep" in plan and LayerChoice.of(plan["keep"], f"keep of {str(path)!r}").layers(len(types)) != kept:
        raise ValueError(
            f"keep of {str(path)!r} is {plan['keep']!r}, but its layers keep attention in {kept}; correct one of them"
        )
    if "mixer" in plan:
        raise ValueError(f"mixer of {str(path)!r} is {plan['mixer']!r}, but its layers name the mixers; remove it")


def plan_arguments(plan: dict) -> dict:
    """The arguments of `convert_model` that a plan stands for."""
    options = plan.get("mixers") or {}
    if "mixer_types" in plan:
        return {"layers": plan["mixer_types"], "mixers": options}
    return {"mixer": plan["mixer"], "keep": plan["keep"]} | ({"mixers": options} if options else {})


def trained_folder(plan: dict, path: str | Path) -> Path | None:
    """The folder of the aligned mixers that belong to the plan in `path`; None if the plan names none.

    Raises:
        ValueError: the folder does not exist.
    """
    if plan.get("trained") is None:
        return None
    folder = Path(path).parent / plan["trained"]
    if not folder.is_dir():
        raise ValueError(
            f"{str(path)!r} needs its aligned mixers in {str(folder)!r}, which is no folder; put it there, or remove"
            ' "trained" from the plan to start from new mixers'
        )
    return folder


def take_mixers(student: PreTrainedModel, *trained: PreTrainedModel) -> None:
    """Load the mixers of trained models, e.g. aligned students without attention, into the same layers of `student`.

    Each layer takes the mixer of the first model that has one of the same kind in this layer.

    Raises:
        ValueError: in one of these layers, all models have attention or a mixer of another kind or other options.
    """
    for model in (student, *trained):
        check_converted(model)
    for layer in student.config.memory_layers:
        models = [model for model in trained if layer in model.config.memory_layers]
        if not models:
            raise ValueError(f"layer {layer} of the trained student is attention, so there is no mixer to take")
        kind = student.config.mixer_types[layer]
        source = next((model for model in models if model.config.mixer_types[layer] == kind), models[0])
        theirs = attention_module(source, layer)
        options = theirs.options.to_dict()
        load_mixer(attention_module(student, layer), theirs.state_dict(), theirs.name, options)


def different_options(kind: str, ours: dict, theirs: dict) -> str:
    """Which options of two mixers of one kind differ, e.g. "ridge is 0.05 and 0.02"; "" if they compute the same.

    Options that can be changed at inference (`inference_options`) are left out.
    """
    options_class = MIXERS[kind].options_class
    ours, theirs = (options_class.from_dict(options).to_dict() for options in (ours, theirs))
    names = [name for name in ours if name not in options_class.inference_options and ours[name] != theirs[name]]
    return ", ".join(f"{name} is {ours[name]!r} and {theirs[name]!r}" for name in names)


def load_mixer(mixer: MemoryMixer, values: dict[str, Tensor], kind: str, options: dict) -> None:
    """Load the tensors of a trained mixer of some kind, with its options, into a mixer, in place.

    Raises:
        ValueError: the two have different kinds or options, except options that can be changed at inference.
    """
    if mixer.name == kind and (different := different_options(kind, mixer.options.to_dict(), options)):
        raise ValueError(
            f"the mixers of layer {mixer.layer_idx} differ in options ({different}); convert with those of the trained"
            " student"
        )
    try:
        mixer.load_state_dict(values)
    except RuntimeError:
        kinds = f"{type(mixer).__name__}, {MIXERS[kind].__name__}"
        raise ValueError(
            f"the mixers of layer {mixer.layer_idx} differ ({kinds}) in kind or options; convert with those of the"
            " trained student"
        ) from None
