"""The plan that `memmix select` writes: which layers stay attention, and the mixer of each other layer.

A plan for one mixer has the fields `mixer` and `keep`; one for several mixers has `mixer_types`, one entry per layer.
Both may have `mixers`, the options by mixer, and `trained`, the folder with aligned weights, relative to the plan. A
plan that is written by hand may have `layers` in place of `mixer_types`, as in `convert_model`:

    {"layers": {"ska": [1], "mamba2": "rest"}}
"""

import json
from pathlib import Path

from hf_memmix.conversion.layer_choice import LayerChoice
from hf_memmix.conversion.mixer_layout import mixer_types_of
from hf_memmix.conversion.records import write_json
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import ATTENTION

ONE_MIXER = {"mixer": str, "keep": list, "num_layers": int}
SEVERAL = {"mixer_types": (list, dict, str), "num_layers": int}
READ = {*ONE_MIXER, *SEVERAL, "layers", "mixers", "trained"}
# what memmix select writes beside these, for people and for cards; "out" stands in what it prints
RECORDED = {
    *("mixers_of", "text", "settings", "environment", "teacher", "candidates", "budget", "totals", "single"),
    *("times_of", "scores", "recipe", "train_tokens", "out", "stand_in", "trace"),
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
        raise UserError(f"there is no plan {str(path)!r}; memmix select writes one")
    try:
        plan = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} is not JSON ({error}); let memmix select write it again") from None
    if isinstance(plan, dict) and isinstance(plan.get("layers"), (dict, str)):
        if "mixer_types" in plan:
            raise UserError(f"{str(path)!r} names the mixers by layers and by mixer_types; remove one of them")
        plan = {"num_layers": num_layers} | plan | {"mixer_types": plan["layers"]}
    kinds = SEVERAL if isinstance(plan, dict) and "mixer_types" in plan else ONE_MIXER
    if not isinstance(plan, dict) or any(not isinstance(plan.get(name), kind) for name, kind in kinds.items()):
        raise UserError(f"{str(path)!r} is not a plan: it lacks {', '.join(kinds)}; let memmix select write it again")
    if unknown := sorted(plan.keys() - READ - RECORDED):
        raise UserError(
            f"{str(path)!r} has {', '.join(map(repr, unknown))}, which a plan does not have; it may have"
            f" {', '.join(sorted(READ))}"
        )
    _check_optional(plan, path)
    if plan["num_layers"] != num_layers:
        raise UserError(
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
        raise UserError(f'mixers of {str(path)!r} is {mixers!r}; give options by mixer, e.g. {{"gka": {{...}}}}')
    if not isinstance(trained, str | None):
        raise UserError(f"trained of {str(path)!r} is {trained!r}; give the folder of the aligned mixers")


def _check_one_choice(plan: dict, path: Path) -> None:
    """Raise ValueError if `keep` or `mixer`, which are not read in a plan of several mixers, say something else."""
    types = plan["mixer_types"]
    kept = [layer for layer, kind in enumerate(types) if kind == ATTENTION]
    if "keep" in plan and LayerChoice.of(plan["keep"], f"keep of {str(path)!r}").layers(len(types)) != kept:
        raise UserError(
            f"keep of {str(path)!r} is {plan['keep']!r}, but its layers keep attention in {kept}; correct one of them"
        )
    if "mixer" in plan:
        raise UserError(f"mixer of {str(path)!r} is {plan['mixer']!r}, but its layers name the mixers; remove it")


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
        raise UserError(
            f"{str(path)!r} needs its aligned mixers in {str(folder)!r}, which is no folder; put it there, or remove"
            ' "trained" from the plan to start from new mixers'
        )
    return folder
