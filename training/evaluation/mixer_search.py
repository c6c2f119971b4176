"""Chooses a mixer for every layer by measurement, after pretraining and before distillation.

Every candidate mixer is aligned in every layer of the teacher (`align`: one pass over the teacher's hidden states
trains all layers of one candidate, and no layer depends on another). Each pair (layer, mixer) gets the loss of the
teacher in which this mixer computes this layer alone (`layer_selection`), and its cost (`conversion.layer_cost`). Then
one mixer per layer is chosen: the lowest sum of scores that meets the budgets (`mixer_choice`, exact). The sum assumes
that the losses of single replacements add up; the student of the plan is the test of it.

The order of the steps follows Jet-Nemotron's search after pretraining (Gu et al., arXiv:2508.15884): first where full
attention stays, then which linear block, then costs on the hardware. It trains a once-for-all network and searches it
by beam; here all layers are scored alone, so the choice is one small optimisation.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.layer_cost import LayerCost, layer_cost, measured_kinds
from hf_memmix.conversion.mixer_files import load_mixers, mixer_file, read_metadata, write_mixers
from hf_memmix.conversion.records import bytes_text, write_json
from hf_memmix.mixers import ATTENTION
from hf_memmix.training.evaluation.mixer_choice import best_choice
from hf_memmix.training.hashes import file_hash, teacher_hash
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.run_identity import identity_of
from hf_memmix.training.run_lock import run_folder
from hf_memmix.training.train import train


@dataclass(frozen=True)
class Budget:
    """What a mixture may cost; None is no limit.

    Args:
        state_bytes: bytes per sequence of all layers, at the context of the costs.
        decode_ms: estimated milliseconds per decoded token of all layers' mixers and attention.
        keep_count: largest number of layers that stay attention.
        keep_layers: layers that stay attention in any case; they count towards `keep_count`.
    """

    state_bytes: int | None = None
    decode_ms: float | None = None
    keep_count: int = 0
    keep_layers: tuple[int, ...] = ()


def aligned_student(
    teacher: nn.Module,
    mixer: str,
    data,
    folder: str | Path,
    recipe: Recipe,
    *,
    seed: int = 0,
    callbacks=None,
    **options,
) -> nn.Module:
    """A student with `mixer` in every layer, aligned by `recipe`. Its mixers are kept in `folder`.

    A file of the same teacher, data, recipe and options is read instead of training again. An interrupted training
    continues from its last checkpoint.

    Raises:
        ValueError: as in `convert_model` and `train`, or another process works in `folder`.
    """
    student = convert_model(teacher, mixer, seed=seed, mixers={mixer: options})
    path = mixer_file(folder, mixer)
    identity = identity_of(student, teacher, data, recipe)
    if (read_metadata(path) or {}).get("identity") == identity:
        load_mixers(student, folder)
        return student
    path.unlink(missing_ok=True)
    with run_folder(Path(folder) / f"{mixer}-{_short(identity)}") as scratch:
        dtype = student.dtype
        train(student, teacher, data, scratch, recipe=recipe, callbacks=callbacks)
        write_mixers(student, path, identity)
    return student.to(dtype)


def _short(identity: dict) -> str:
    """A short hash of an identity, so that the checkpoints of another run are never continued."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def saved_scores(path: str | Path, identity: dict, measure: Callable[[], dict]) -> dict:
    """`measure()`, or what an earlier call with the same `identity` has written to `path`."""
    path = Path(path)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        saved = {}
    if isinstance(saved, dict) and saved.get("identity") == identity:
        return saved["ranking"]
    ranking = measure()
    write_json(path, {"identity": identity, "ranking": ranking})
    return ranking


def costs_of(teacher: nn.Module, students: dict[str, nn.Module], context: int, dtype: torch.dtype) -> list[dict]:
    """`{kind: LayerCost}` of every layer, for attention and for each mixer of `students`, at a context in tokens."""
    layers = range(teacher.config.num_hidden_layers)
    models = {ATTENTION: teacher} | students
    return [
        {
            kind: layer_cost(kind, attention_module(model, layer), model.config, layer, context, dtype)
            for kind, model in models.items()
        }
        for layer in layers
    ]


def scores_of(rankings: dict[str, dict]) -> list[dict[str, float]]:
    """`{kind: score}` of every layer from the `rank_layers` of each mixer. Attention, the teacher itself, has 0."""
    rows = zip(*(ranking["layers"] for ranking in rankings.values()), strict=True)
    return [
        {ATTENTION: 0.0} | {kind: row["score"] for kind, row in zip(rankings, layer, strict=True)} for layer in rows
    ]


def choose_mixers(scores: list[dict[str, float]], costs: list[dict[str, LayerCost]], budget: Budget) -> list[str]:
    """The kind of every layer: the lowest sum of scores within the budget.

    Args:
        scores, costs: by kind, for every layer; the candidates of a layer are the keys of `scores`.

    Raises:
        ValueError: no choice meets the budget, or a candidate has no measured time, but the budget has `decode_ms`.
    """
    allowed = []
    for layer, row in enumerate(scores):
        stays, may_stay = layer in budget.keep_layers, budget.keep_count > 0
        allowed.append([kind for kind in row if (kind == ATTENTION if stays else kind != ATTENTION or may_stay)])
    kinds = {kind for row in allowed for kind in row}
    if budget.decode_ms is not None and (unknown := sorted(kinds - set(measured_kinds()))):
        raise ValueError(
            f"decode_ms is {budget.decode_ms:g}, but the time of {unknown[0]} was not measured; measure it with"
            " kernels/benchmarks/benchmark_layers.py, or leave the mixer or the budget out"
        )
    limits = {"keep_count": max(budget.keep_count, len(budget.keep_layers))}
    parts: dict[str, Callable] = {"keep_count": lambda kind, cost: int(kind == ATTENTION)}
    if budget.state_bytes is not None:
        limits["state_bytes"], parts["state_bytes"] = budget.state_bytes, lambda kind, cost: cost.state_bytes
    if budget.decode_ms is not None:
        limits["decode_ms"] = int(budget.decode_ms * 1e6)  # in nanoseconds
        parts["decode_ms"] = lambda kind, cost: round(cost.decode_us * 1e3)
    spent = [
        [[part(kind, row[kind]) for part in parts.values()] for kind in kinds]
        for kinds, row in zip(allowed, costs, strict=True)
    ]
    values = [[row[kind] for kind in kinds] for kinds, row in zip(allowed, scores, strict=True)]
    picks = best_choice(values, spent, list(limits.values()))
    if picks is None:
        raise ValueError(_too_small(limits, spent))
    return [kinds[pick] for kinds, pick in zip(allowed, picks, strict=True)]


def _too_small(limits: dict[str, int], spent: list) -> str:
    show = {"state_bytes": bytes_text, "decode_ms": lambda ns: f"{ns / 1e6:.3f} ms", "keep_count": str}
    for place, (name, limit) in enumerate(limits.items()):
        least = sum(min(row[place] for row in rows) for rows in spent)
        if least > limit:
            return (
                f"{name} is {show[name](limit)}, but the smallest mixture of these candidates takes"
                f" {show[name](least)}; give a larger budget, or a smaller candidate"
            )
    return f"no mixture meets {' and '.join(limits)} together; give a larger budget, or other candidates"


def totals(types: list[str], scores: list[dict[str, float]], costs: list[dict[str, LayerCost]]) -> dict:
    """`{"score", "state_bytes", "decode_ms", "prefill_us"}` of a choice; times are None if one kind has none."""
    chosen = [row[kind] for kind, row in zip(types, costs, strict=True)]
    decode, prefill = ([getattr(cost, name) for cost in chosen] for name in ("decode_us", "prefill_us"))
    return {
        "score": sum(row[kind] for kind, row in zip(types, scores, strict=True)),
        "state_bytes": sum(cost.state_bytes for cost in chosen),
        "decode_ms": None if None in decode else sum(decode) / 1e3,
        "prefill_us": None if None in prefill else sum(prefill),
    }


def scores_identity(teacher: nn.Module, path: Path, settings: dict) -> dict:
    """What the scores of a candidate depend on: the teacher, the mixers in `path`, the settings of the measurement."""
    return json.loads(json.dumps({"teacher": teacher_hash(teacher), "mixers": file_hash(path)} | settings))
