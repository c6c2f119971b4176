"""Chooses the layers that stay attention before any training: greedily, with a window in place of every mixer.

Forward: all layers have a window; attention comes back in one layer at a time, where the loss falls most. Backward:
all layers have their attention; a window replaces it in one layer at a time, where the loss rises least. The loss of a
set of layers is that of `layer_selection`:

    KL(teacher || teacher with windows) + weight (nll of answers - the teacher's)

Unlike scores of single layers, a step sees what the layers chosen before already do. Selection by greedy steps on the
KL: "Distilling to Hybrid Attention Models via KL-Guided Layer Selection", arXiv:2512.20569.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_memmix.conversion.hashes import read_sealed, write_sealed
from hf_memmix.conversion.logits import logits_head
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import DEFAULT_SINKS
from hf_memmix.training.evaluation.layer_runs import LayerRuns
from hf_memmix.training.evaluation.layer_selection import divergence, text_loss
from hf_memmix.training.evaluation.picture import new_picture, write_picture
from hf_memmix.training.evaluation.probes.material import Sample
from hf_memmix.training.evaluation.probes.score import nll_of_answers
from hf_memmix.training.evaluation.selection_data import SelectionData
from hf_memmix.training.run_identity import differences


@dataclass(frozen=True)
class Batch:
    """What one forward reads: `ids` [B, T], of text (`task` is None) or of the `samples` of a probe."""

    ids: Tensor
    task: str | None = None
    samples: tuple[Sample, ...] = ()


def batches_of(data: SelectionData, batch_size: int) -> list[Batch]:
    """The text and the probes in batches, in a fixed order."""
    found = [Batch(ids) for ids in data.blocks.split(batch_size)]
    for task, samples in data.samples.items():
        for begin in range(0, len(samples), batch_size):
            some = tuple(samples[begin : begin + batch_size])
            found.append(Batch(torch.tensor([sample.ids for sample in some]), task, some))
    return found


@dataclass(frozen=True)
class Candidate:
    """A set of windowed layers that is measured. `base`: the set whose hidden states are reused."""

    windowed: frozenset[int]
    base: frozenset[int]

    @property
    def start(self) -> int:
        """The first layer that is not as in `base`."""
        return min(self.windowed ^ self.base, default=0)


def measure_batch(runs: LayerRuns, head, batch: Batch, candidates: list[Candidate], advance=lambda: None):
    """The sums of one batch for every candidate; all of them have the same base.

    A layer changes nothing below it, so each layer of the base is computed once, and each candidate from its first
    changed layer on.

    advance: called after every candidate.

    Returns `{"kl", "loss"}`, sums over predicted tokens, or `{"nll"}`, the sum over answers, for every candidate.
    """
    found: list[dict] = [{} for _ in candidates]
    hidden, target = None, runs.last_hidden(batch.ids) if batch.task is None else None
    last = max(candidate.start for candidate in candidates)
    for layer in range(last + 1):
        for place, candidate in enumerate(candidates):
            if candidate.start != layer:
                continue
            final = runs.last_hidden(batch.ids, candidate.windowed, layer, hidden)
            if target is None:
                found[place] = {"nll": sum(nll_of_answers(runs.teacher, head, final, list(batch.samples)))}
            else:
                found[place] = {"kl": divergence(head, target, final), "loss": text_loss(head, final, batch.ids)}
            advance()
        if layer < last:
            hidden = runs.next_hidden(batch.ids, candidates[0].base, layer, hidden)
    return found


def layers_computed(batch: Batch, candidates: list[Candidate], depth: int) -> int:
    """How many layers `measure_batch` computes of a model of `depth` layers."""
    starts = [candidate.start for candidate in candidates]
    return sum(depth - start for start in starts) + max(starts) + (depth if batch.task is None else 0)


class Search:
    """A greedy search, which can be interrupted after every batch.

    Args:
        teacher: see `LayerRuns`.
        data: the text and the probes.
        window: tokens of the windows.
        sinks: first tokens that the windows read as well.
        drop: backward in place of forward.
        weight: of the answers.
        batch_size: sequences of one forward.
        file: where the search is kept, sealed; None keeps nothing.
        identity: what else must be the same for the file to be continued, as JSON values.
        restart: replace the file of another search.

    Raises:
        ValueError: as in `LayerRuns`, the weight is negative, or the file belongs to another search.
    """

    def __init__(
        self,
        teacher: nn.Module,
        data: SelectionData,
        *,
        window: int,
        sinks: int = DEFAULT_SINKS,
        drop: bool = False,
        weight: float = 1.0,
        batch_size: int = 8,
        file: str | Path | None = None,
        identity: dict | None = None,
        restart: bool = False,
    ):
        if not weight >= 0:
            raise UserError(f"the weight of the answers is {weight}; it must be at least 0")
        self.runs, self.drop, self.weight = LayerRuns(teacher, window, sinks), drop, weight
        self.head, self.batches = logits_head(teacher), batches_of(data, batch_size)
        self.depth = len(self.runs.layers)
        self.tokens, self.tasks = data.blocks[:, 1:].numel(), list(data.samples)
        self.answers = {task: sum(len(s.answers) for s in drawn) for task, drawn in data.samples.items()}
        self.file = None if file is None else Path(file)
        where = {"dtype": str(teacher.dtype), "device": teacher.get_input_embeddings().weight.device.type}
        own = {"window": window, "sinks": sinks, "drop": drop, "weight": weight, "batch_size": batch_size} | where
        self.identity = json.loads(json.dumps(own | (identity or {})))
        self.measured: list[list[dict]] = []  # of each step the sums of each candidate
        self.partial: list[list[dict]] = []  # of the step that is not finished: of each batch
        if self.file is not None and self.file.exists() and not (restart and self._is_another()):
            self._continue()

    def run(self, count: int, progress=None, estimate: Callable[[float], None] | None = None) -> dict:
        """Search until `count` layers have attention.

        Args:
            progress: `progress(done, total)` is called with numbers of measured candidates, each once per batch.
            estimate: called before the search with its seconds, from one measured forward of each kind of batch.

        Returns:
            `{"keep", "teacher", "trace"}`. `trace` has one row after each change, the first one before any:
            `{"layer", "kept", "loss", "kl", "text_loss", "nll", "answers", "candidates"}` with the changed layer, the
            number of layers with attention and the loss by candidate. `teacher` has its `text_loss` and `answers`.

        Raises:
            ValueError: `count` is not from 1 to the number of layers - 1, or a loss is not finite.
        """
        if not 1 <= count < self.depth:
            raise UserError(f"count is {count}; of {self.depth} layers, 1 to {self.depth - 1} can stay attention")
        steps = self.depth - count if self.drop else count
        with self.runs.routed():
            left = self._left(steps)
            if left and estimate is not None:
                estimate(self._seconds(left))
            done, total = 0, sum(len(candidates) for _, candidates in left)

            def advance() -> None:
                nonlocal done
                done += 1
                if progress is not None:
                    progress(done, total)

            while len(self.measured) <= steps:
                self._step(advance)
        return self._result(steps)

    # ---- the sets of a step, and what a step has found

    def _changes(self, steps: int) -> list[int]:
        """The layers that the first `steps` steps have changed."""
        return [row["layer"] for row in self._rows(steps)[1:]]

    def _base(self, changed: Collection[int]) -> frozenset[int]:
        """The windowed layers after these changes."""
        layers = frozenset(range(self.depth))
        return frozenset(changed) if self.drop else layers - frozenset(changed)

    def _candidates(self, step: int, changed: Collection[int]) -> list[Candidate]:
        """The sets of a step: in step 0 the teacher, then windows in all layers; later one per layer that is left."""
        if step == 0:
            every = frozenset(range(self.depth))
            return [Candidate(windowed, windowed) for windowed in (frozenset(), every)]
        base = self._base(changed)
        return [Candidate(base ^ {layer}, base) for layer in range(self.depth) if layer not in changed]

    def _step(self, advance: Callable[[], None]) -> None:
        """Measure the candidates of the next step."""
        step = len(self.measured)
        changed = self._changes(step - 1) if step else []
        candidates = self._candidates(step, changed)
        for batch in self.batches[len(self.partial) :]:
            self.partial.append(measure_batch(self.runs, self.head, batch, candidates, advance))
            self._write()
        self.measured.append([self._sums(place) for place in range(len(candidates))])
        self.partial = []
        self._write()

    def _sums(self, place: int) -> dict:
        """The means of one candidate over all batches of the step."""
        kinds = [(batch.task, found[place]) for batch, found in zip(self.batches, self.partial, strict=True)]
        text = [found for task, found in kinds if task is None]
        sums = {task: sum(found["nll"] for of, found in kinds if of == task) for task in self.tasks}
        return {
            "kl": sum(found["kl"] for found in text) / self.tokens,
            "text_loss": sum(found["loss"] for found in text) / self.tokens,
            "answers": {task: value / self.answers[task] for task, value in sums.items()},
        }

    def _scored(self, sums: dict) -> dict:
        """The means of a candidate with `nll`, the rise of the answers' nll, and `loss`."""
        teacher = self.measured[0][0]["answers"]
        rises = [value - teacher[task] for task, value in sums["answers"].items()]
        nll = sum(rises) / len(rises) if rises else 0.0
        return {"loss": sums["kl"] + self.weight * nll, "nll": nll} | sums

    def _rows(self, steps: int) -> list[dict]:
        """The trace of the first `steps` steps."""
        first = self._scored(self.measured[0][0 if self.drop else 1])
        rows, changed = [{"layer": None, "kept": self.depth if self.drop else 0} | first | {"candidates": {}}], []
        for found in self.measured[1 : steps + 1]:
            layers = [layer for layer in range(self.depth) if layer not in changed]
            scored = {layer: self._scored(sums) for layer, sums in zip(layers, found, strict=True)}
            losses = {layer: row["loss"] for layer, row in scored.items()}
            if broken := [layer for layer, loss in losses.items() if not math.isfinite(loss)]:
                raise UserError(f"the loss with a change in layer {broken[0]} is not finite; the teacher is broken")
            best = min(losses, key=lambda layer: (losses[layer], layer))
            changed.append(best)
            kept = self.depth - len(self._base(changed))
            rows.append({"layer": best, "kept": kept} | scored[best] | {"candidates": losses})
        return rows

    def _result(self, steps: int) -> dict:
        rows = self._rows(steps)
        windowed = self._base([row["layer"] for row in rows[1:]])
        teacher = {name: self.measured[0][0][name] for name in ("text_loss", "answers")}
        keep = [layer for layer in range(self.depth) if layer not in windowed]
        return {"keep": keep, "teacher": teacher, "trace": rows}

    # ---- the file of a search

    def _write(self) -> None:
        if self.file is not None:
            record = {"measured": self.measured, "partial": self.partial}
            write_sealed(self.file, {"identity": self.identity, **record})

    def _is_another(self) -> bool:
        with contextlib.suppress(UserError):
            return read_sealed(self.file, "")["identity"] != self.identity
        return True

    def _continue(self) -> None:
        remedy = "remove it, or give --overwrite to begin anew"
        saved = read_sealed(self.file, remedy)
        if different := "; ".join(differences(saved.get("identity", {}), self.identity)):
            raise UserError(f"{str(self.file)!r} belongs to another search ({different}); {remedy}")
        self.measured, self.partial = saved["measured"], saved["partial"]

    # ---- how long a search takes

    def _left(self, steps: int) -> list[tuple[Batch, list[Candidate]]]:
        """What is still to be measured. Which layers will be chosen is not known: `_likely` ones stand for them."""
        left = []
        for step in range(len(self.measured), steps + 1):
            candidates = self._candidates(step, self._likely(step))
            ready = len(self.partial) if step == len(self.measured) else 0
            left += [(batch, candidates) for batch in self.batches[ready:]]
        return left

    def _likely(self, step: int) -> list[int]:
        """Layers that may have been changed before a step: those that are known, then layers spread evenly."""
        known = self._changes(min(step, len(self.measured)) - 1) if step and self.measured else []
        rest = [layer for layer in range(self.depth) if layer not in known]
        more = max(0, step - 1 - len(known))
        return known + [rest[int((i + 0.5) * len(rest) / more)] for i in range(more)]

    def _seconds(self, left: list[tuple[Batch, list[Candidate]]]) -> float:
        """Seconds for these measurements, from one forward of the first batch of each kind."""
        every = frozenset(range(self.depth))
        whole, each = [Candidate(every, every)], {}
        for batch in {batch.task: batch for batch, _ in reversed(left)}.values():
            measure_batch(self.runs, self.head, batch, whole)  # the first one is slower
            began = time.perf_counter()
            measure_batch(self.runs, self.head, batch, whole)
            each[batch.task] = (time.perf_counter() - began) / layers_computed(batch, whole, self.depth)
        return sum(each[batch.task] * layers_computed(batch, some, self.depth) for batch, some in left)


def plot_trace(plan: dict, path: str | Path) -> None:
    """Draw the plan of a greedy choice as a PNG: the loss over the number of layers that have attention."""
    rows, window = plan["trace"], plan["stand_in"]["window"]
    figure, axes = new_picture(figsize=(max(4, 0.35 * len(rows) + 2), 3.2))
    axes.plot([row["kept"] for row in rows], [row["loss"] for row in rows], ".-", color="#2f6fa7")
    for row in rows[1:]:
        text = f"{'-' if plan['stand_in']['drop'] else '+'}{row['layer']}"
        axes.annotate(text, (row["kept"], row["loss"]), (2, 4), textcoords="offset points", fontsize=8)
    axes.set_xticks([row["kept"] for row in rows])
    axes.set_xlabel(f"layers with attention; all others read {window} tokens")
    axes.set_ylabel("loss, nats")
    axes.set_title(f"layers {', '.join(map(str, plan['keep']))} stay attention", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    write_picture(figure, path)
