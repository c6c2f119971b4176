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

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.convert import cast_student
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.hashes import file_hash, read_sealed, teacher_hash, write_sealed
from hf_memmix.conversion.layer_choice import layer_text
from hf_memmix.conversion.layer_cost import LayerCost, layer_cost, measured_kinds
from hf_memmix.conversion.mixer_files import load_mixers, mixer_file, options_of_layers, read_metadata, write_mixers
from hf_memmix.conversion.records import bytes_text
from hf_memmix.conversion.saving import remove_folder
from hf_memmix.errors import UserError
from hf_memmix.mixers import ATTENTION
from hf_memmix.swap import memory_mixers
from hf_memmix.training.evaluation.layer_selection import rank_layers
from hf_memmix.training.evaluation.mixer_choice import best_choice
from hf_memmix.training.evaluation.selection_data import SelectionData
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.run_identity import config_of, identity_of
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
    folder, dtype = Path(folder), student.dtype
    path = mixer_file(folder, mixer)
    identity = identity_of(student, teacher, data, recipe)
    if (read_metadata(path) or {}).get("identity") == identity:
        load_mixers(student, folder)
        return student
    path.unlink(missing_ok=True)
    scratch = folder / f"{mixer}-{_short(identity)}"
    for other in folder.glob(f".{mixer}-*.run"):  # of a killed run with other settings
        if other.name != f".{scratch.name}.run":
            remove_folder(other, beside=scratch)
    with run_folder(scratch) as checkpoints:
        train(student, teacher, data, checkpoints, recipe=recipe, callbacks=callbacks)
        write_mixers(student, path, identity)
    return cast_student(student, dtype)


def _short(identity: dict) -> str:
    """A short hash of an identity, so that the checkpoints of another run are never continued."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Measured:
    """What is known of all candidates.

    Args:
        rankings: `rank_layers` by mixer.
        costs: for every layer `{kind: LayerCost}`, of attention and of the mixers.
        options: of the mixers.
    """

    rankings: dict[str, dict]
    costs: list[dict[str, LayerCost]]
    options: dict[str, dict]

    def scores(self) -> list[dict[str, float]]:
        """`{kind: score}` of every layer, see `scores_of`."""
        return scores_of(self.rankings)


def costs_of(teacher: nn.Module, students: dict[str, nn.Module], context: int, dtype: torch.dtype) -> list[dict]:
    """`{kind: LayerCost}` of every layer, of attention and of each mixer; see `layer_cost`.

    `teacher` and `students`, by the name of their mixer, may be without values (on the meta device).

    Raises:
        ValueError: a student has attention in a layer.
    """
    layers = range(teacher.config.num_hidden_layers)
    for kind, student in students.items():
        if (have := student.config.memory_layers) != list(layers):
            left = layer_text([layer for layer in layers if layer not in have])
            raise UserError(f"the student with {kind} has attention in layers {left}; convert all of its layers")
    models = {ATTENTION: teacher} | students
    return [
        {
            kind: layer_cost(kind, attention_module(model, layer), model.config, layer, context, dtype)
            for kind, model in models.items()
        }
        for layer in layers
    ]


def measure_candidates(
    teacher: nn.Module,
    candidates: dict[str, Callable[[], nn.Module] | None],
    folder: str | Path,
    data: SelectionData,
    costs: list[dict[str, LayerCost]],
    *,
    recipe: Recipe,
    blocks,
    weight: float = 1.0,
    batch_size: int = 8,
    teacher_id: str | None = None,
    place: Callable[[nn.Module], nn.Module] | None = None,
    show: Callable = lambda title: contextlib.nullcontext(lambda *at: None),
) -> Measured:
    """Align and score every candidate in every layer. One candidate at a time is in memory.

    Args:
        candidates: by the name of the mixer, a function that loads a student with this mixer in all layers, or None to
            align a new one.
        folder: keeps `<mixer>.safetensors` and `<mixer>.json`; what is there of the same work is used again.
        costs: see `costs_of`.
        blocks: training data of the alignment; None if all candidates are given.
        teacher_id: `teacher_hash` of the teacher's folder; default: the hash of the model's tensors.
        place: for a teacher that is spread over several devices, a function that lets a student's mixers compute
            beside it. Of the students only the mixers need values then.
        show: `show(title)` is a context manager that yields `advance(done, total)` for one step of the work.

    Raises:
        ValueError: as in `aligned_student` and `rank_layers`.
    """
    folder = Path(folder)
    device, precision = teacher.get_input_embeddings().weight.device, teacher.dtype
    hashed, scoring = teacher_id or teacher_hash(teacher), {"weight": weight, "batch_size": batch_size}
    rankings, options = {}, {}
    for kind, given in candidates.items():
        if given is None:
            with show(f"aligning {kind}: step") as advance:
                steps = [_Steps(advance)]
                student = aligned_student(teacher, kind, blocks, folder, recipe, seed=recipe.seed, callbacks=steps)
        else:
            student = given()
            mixers = student if place is None else nn.ModuleList(memory_mixers(student).values())
            _keep_mixers(student, mixer_file(folder, kind), {"student": teacher_hash(mixers)})
        if place is None:
            student = cast_student(student, precision).to(device).eval()
            teacher.to(device)  # the training may have moved it
        else:
            student = place(student)
        models = {"teacher": hashed, "config": config_of(teacher.config)}
        identity = {"weight": weight, **data.record, **models, "mixers": file_hash(mixer_file(folder, kind))}
        with show(f"scoring {kind}:") as advance:
            measure = functools.partial(
                rank_layers, teacher, student, data.blocks, data.samples, progress=advance, **scoring
            )
            rankings[kind] = saved_scores(folder / f"{kind}.json", json.loads(json.dumps(identity)), measure)
        options[kind] = json.loads(json.dumps(student.config.mixers[kind]))
    return Measured(rankings, costs, options)


def _keep_mixers(student: nn.Module, path: Path, identity: dict) -> None:
    """`write_mixers`, unless the file holds them already: its bytes, which identify scores, differ at each writing."""
    known = read_metadata(path) or {}
    if known.get("identity") != identity or known.get("options") != options_of_layers(student):
        write_mixers(student, path, identity)


class _Steps(TrainerCallback):
    """Shows the steps of a training by `advance(done, total)`."""

    def __init__(self, advance: Callable[[int, int], None]):
        self.advance = advance

    def on_train_begin(self, args, state, control, **kwargs):
        self.advance(state.global_step, state.max_steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.advance(state.global_step, state.max_steps)


def saved_scores(path: str | Path, identity: dict, measure: Callable[[], dict]) -> dict:
    """`measure()`, or what an earlier call with the same `identity` has written to `path`."""
    path = Path(path)
    with contextlib.suppress(ValueError):  # missing or changed: measure again
        saved = read_sealed(path, "")
        if saved["identity"] == identity:
            return saved["ranking"]
    ranking = measure()
    write_sealed(path, {"identity": identity, "ranking": ranking})
    return ranking


def scores_of(rankings: dict[str, dict]) -> list[dict[str, float]]:
    """`{kind: score}` of every layer from the `rank_layers` of each mixer. Attention, the teacher itself, has 0."""
    rows = zip(*(ranking["layers"] for ranking in rankings.values()), strict=True)
    return [
        {ATTENTION: 0.0} | {kind: row["score"] for kind, row in zip(rankings, layer, strict=True)} for layer in rows
    ]


def check_budget(costs: list[dict[str, LayerCost]], budget: Budget) -> None:
    """Raise ValueError if no choice of the kinds in `costs` meets the budget; no score is needed for that."""
    choose_mixers([dict.fromkeys(row, 0.0) for row in costs], costs, budget)


def choose_mixers(scores: list[dict[str, float]], costs: list[dict[str, LayerCost]], budget: Budget) -> list[str]:
    """The kind of every layer: the lowest sum of scores within the budget.

    Args:
        scores, costs: by kind, for every layer; the candidates of a layer are the keys of `scores`.

    Raises:
        ValueError: no choice meets the budget, a budget is not finite, or a candidate has no measured time, but the
            budget has `decode_ms`.
    """
    if budget.decode_ms is not None and not math.isfinite(budget.decode_ms):
        raise UserError(f"decode_ms is {budget.decode_ms}; give a number of milliseconds, or leave it out")
    allowed = []
    for layer, row in enumerate(scores):
        stays, may_stay = layer in budget.keep_layers, budget.keep_count > 0
        allowed.append([kind for kind in row if (kind == ATTENTION if stays else kind != ATTENTION or may_stay)])
    unknown = {
        kind for kinds, row in zip(allowed, costs, strict=True) for kind in kinds if row[kind].decode_us is None
    }
    if budget.decode_ms is not None and unknown:
        kind = min(unknown)
        named = f"the window beside {kind}" if kind in measured_kinds() else kind
        raise UserError(
            f"decode_ms is {budget.decode_ms:g}, but the time of {named} was not measured; measure it with"
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
        raise UserError(_too_small(limits, spent))
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
    """`{"score", "state_bytes", "decode_ms", "prefill_us"}` of a choice. A time is None if a kind was not timed."""
    chosen = [row[kind] for kind, row in zip(types, costs, strict=True)]
    decode, prefill = ([getattr(cost, name) for cost in chosen] for name in ("decode_us", "prefill_us"))
    return {
        "score": sum(row[kind] for kind, row in zip(types, scores, strict=True)),
        "state_bytes": sum(cost.state_bytes for cost in chosen),
        "decode_ms": None if None in decode else sum(decode) / 1e3,
        "prefill_us": None if None in prefill else sum(prefill),
    }
