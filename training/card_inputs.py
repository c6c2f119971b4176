"""The JSON files that a card is written from: what memmix commands print or write, checked field by field.

Somebody may have edited a file by hand. So every field that a card reads is compared with its kind, and the error
names the file and the field.
"""

import json
from pathlib import Path

from hf_memmix.errors import UserError

NUMBER = (int, float)
NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number", NUMBER: "a number"}
# A field is described by its kind, by the fields of an object, by [what each entry of a list is], or by (None, what it
# is otherwise)
TEXTS = [{"file": str, "sha256": str}]
REPORT = {
    **dict.fromkeys(("teacher_ppl", "student_ppl", "ppl_ratio", "top1_agreement", "kl"), NUMBER),
    **{"tokens": int, "block_size": int, "weights": str, "teacher": {"weights": str}, "text": TEXTS},
    "environment": dict.fromkeys(("hardware", "torch", "transformers"), str),
}
STAGE = {"stage": str, "steps": int, "tokens": int, "last_loss": NUMBER, "seconds": NUMBER}
PROBES = {"models": {"student": dict}, "settings": {"lengths": [int]}, "summary": [dict]}
FIGURES = {"exact": NUMBER, "choice": (None, NUMBER), "gain": (None, NUMBER), "gain_error": (None, NUMBER)}
PLAN = {"keep": [int], "num_layers": int}
GREEDY = PLAN | {"mixer": str, "trace": [{"layer": (None, int), "loss": NUMBER}], "stand_in": {"window": int}}
ONE_MIXER = PLAN | {"mixer": str, "layers": [{"layer": int, "rank": int, "score": NUMBER}]}
SEVERAL = PLAN | {"mixer_types": [str], "candidates": [str], "scores": [{"layer": int, "mixers": dict}]}


def read_report(path: str | Path) -> dict:
    """The output of `memmix report --json`. All functions here raise ValueError as `read_measurement` does."""
    return read_measurement(path, REPORT)


def read_stage(path: str | Path) -> dict:
    """The output of `memmix align --json` or `memmix distill --json`."""
    return read_measurement(path, STAGE)


def read_probes(path: str | Path) -> dict:
    """The file probes.json of `memmix eval`."""
    models = read_measurement(path, PROBES)["models"]
    row = {"task": str, "chance": (None, NUMBER)} | dict.fromkeys(models, (None, FIGURES))
    return read_measurement(path, PROBES | {"models": dict.fromkeys(models, dict), "summary": [row]})


def read_plan(path: str | Path) -> dict:
    """The plan of `memmix select`, for one mixer or for several."""
    plan = read_measurement(path, {})
    if "mixer_types" not in plan:
        return read_measurement(path, GREEDY if "trace" in plan else ONE_MIXER)
    plan = read_measurement(path, SEVERAL)
    row = {"layer": int, "mixers": {kind: {"score": NUMBER} for kind in plan["candidates"]}}
    found = read_measurement(path, SEVERAL | {"scores": [row]})
    if len(found["scores"]) != len(found["mixer_types"]):
        raise UserError(
            f"{str(path)!r}: scores has {len(found['scores'])} layers, mixer_types {len(found['mixer_types'])}; repeat"
            " the measurement"
        )
    return found


def read_measurement(path: str | Path, fields: dict) -> dict:
    """The JSON object in a file.

    Raises:
        ValueError: the file is missing or broken, lacks one of `fields`, or one has another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"the file {str(path)!r} does not exist; give the JSON file of a measurement")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{str(path)!r} is not JSON ({error}); repeat the measurement") from None
    missing = [key for key in fields if not isinstance(content, dict) or key not in content]
    if missing or not isinstance(content, dict):
        what = f"lacks {', '.join(missing)}" if missing else "is no JSON object"
        raise UserError(f"{str(path)!r} {what}; is it the JSON of another command?")
    if problem := _problem(content, fields, ""):
        raise UserError(f"{str(path)!r}: {problem}; repeat the measurement, or undo the change of the file")
    return content


def _problem(value, kind, where: str) -> str | None:
    """What is wrong with a field, or None. `where`: its name, such as "text[0].file"; "" for the whole object."""
    if isinstance(kind, tuple) and kind[0] is None:
        return None if value is None else _problem(value, kind[1], where)
    plain = dict if isinstance(kind, dict) else list if isinstance(kind, list) else kind
    if not isinstance(value, plain) or isinstance(value, bool):
        return f"{where} is {_short(value)}, not {NAMES[plain]}"
    if isinstance(kind, list):
        return next(filter(None, (_problem(one, kind[0], f"{where}[{i}]") for i, one in enumerate(value))), None)
    if not isinstance(kind, dict):
        return None
    for name, own in kind.items():
        inside = f"{where}.{name}" if where else name
        if name not in value:
            return f"{inside} is missing"
        if problem := _problem(value[name], own, inside):
            return problem
    return None


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
