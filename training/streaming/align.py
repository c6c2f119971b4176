"""`align` by streaming: the walk over the layers of the teacher, and everything that lets it be interrupted.

Two folders hold what has been done. The run folder beside the output has the trained mixers, the spool the inputs of
the layers that come next. Without the spool, the inputs are computed again from the embeddings; a mixer is never
trained again.
"""

import contextlib
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hf_memmix.conversion.convert import load_tokenizer
from hf_memmix.conversion.hashes import read_sealed, teacher_hash, write_sealed
from hf_memmix.conversion.loading import check_weight_files, meta_teacher
from hf_memmix.conversion.records import bytes_text
from hf_memmix.conversion.saving import check_not_read, check_target, place_of, resolved
from hf_memmix.conversion.streaming.checkpoint import Checkpoint
from hf_memmix.conversion.teacher_forcing import check_same_shape
from hf_memmix.errors import UserError
from hf_memmix.hub import model_folder
from hf_memmix.training.data import StreamedBlocks, TokenBlocks
from hf_memmix.training.groups import check_each_is_trained
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.run_identity import config_of, deciding_fields, differences
from hf_memmix.training.run_lock import remove_empty, run_folder, run_lock
from hf_memmix.training.streaming.align_cost import streaming_cost
from hf_memmix.training.streaming.layer_training import one_process, order_of_rows, take_mixer, train_mixer
from hf_memmix.training.streaming.output import TrainedLayers, write_student
from hf_memmix.training.streaming.planned import START_AGAIN, planned_student
from hf_memmix.training.streaming.processes import Ranks
from hf_memmix.training.streaming.rows import Rows
from hf_memmix.training.streaming.spool import RECORD, HiddenStates, Spool
from hf_memmix.training.streaming.teacher import StreamedTeacher
from hf_memmix.training.streaming.walk import Walk
from hf_memmix.training.train import check_fit, recipe_of
from hf_memmix.training.trainer_arguments import training_arguments, uses_bf16

OF_A_LAYER = ("seconds", "process", "device", "peak_memory")  # what the result tells of it besides losses
FORMER = "spool.json"  # in the run folder: where the spool is
Progress = Callable[[int, int, str], None]  # steps done, all steps, what is going on


def align_by_streaming(
    student: str | Path | None,
    teacher: str | Path,
    data: TokenBlocks | StreamedBlocks,
    out: str | Path,
    *,
    recipe: str | Path | Recipe = "align",
    plan: str | Path | None = None,
    spool: str | Path | None = None,
    resume: bool = True,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    **overrides,
) -> dict:
    """Train the mixers of a student on the inputs of the teacher's layers, one layer after the other.

    One decoder layer of the teacher and one mixer are on the device at a time. The losses are those of `align` in
    memory, except that gradients are clipped by the norm of each layer and not of all layers together.

    Under `accelerate launch` every process calls this function with the same arguments, and trains a part of the
    layers. They must see the same disks.

    Args:
        student: folder or Hub id of a converted model in safetensors; None with `plan`.
        teacher: folder or Hub id of the transformer that it was made from, in safetensors.
        data: the rows to train on.
        out: folder to write the trained student to; a hidden folder beside it holds the trained mixers until then.
        recipe: name, path or `Recipe` of the stage align. `save_every` is not used: each trained layer is saved.
        plan: a plan of `memmix select`, by which the teacher is converted first, piece by piece.
        spool: folder for the hidden states, on a disk with room for two files of `rows * block_size * hidden size`
            values. Default: a folder beside `out`. It must be new, empty, or from an interrupted run.
        resume: continue an interrupted run; otherwise its files are removed first.
        overwrite: replace an existing folder `out`.
        dry_run: train nothing. Only return the cost, for which one step is computed.
        progress: called after every step.
        notify: called with one line of text about the cost, and about files that must be computed again.
        overrides: fields of `Recipe`.

    Returns:
        `{"stage", "steps", "tokens", "first_loss", "last_loss", "seconds", "resumed", "log", "layers", "cost"}`: as
        `train` ("resumed": an earlier start had been interrupted), with losses and seconds (to `load` its weights, to
        `advance` to the next layer, to `train` its mixer) of each layer by its index, with its process, its device
        and, on a GPU, the peak memory of the process until then, and the cost, see `streaming_cost`; for a dry run the
        cost alone.

    Raises:
        ValueError: as in `train`; or a folder cannot be read layer by layer, the spool belongs to another run or has
            too little room, or the interrupted run had another recipe, data, student or teacher.
    """
    recipe = recipe_of(recipe, overrides | {"stage": "align"})
    for name in ("compile", "cuda_graph"):
        if getattr(recipe, name) is True:
            raise UserError(f"{name} is true, but --stream trains a layer at a time without it; leave it out")
    if (student is None) == (plan is None):
        raise UserError("give either a student or a plan by which the teacher is converted first")
    teacher = model_folder(Path(teacher))
    student = None if student is None else model_folder(Path(student))
    out = place_of(out)
    check_not_read(out, teacher)
    run_dir = out.with_name(f".{out.name}.run")
    place = Path(spool).absolute() if spool is not None else run_dir.with_name(f".{out.name}.spool")
    if not {resolved(out), resolved(run_dir)}.isdisjoint(((inside := resolved(place)), *inside.parents)):
        raise UserError(f"the spool {str(place)!r} lies in the output or run folder; give another one with --spool")
    say = notify or (lambda line: None)
    ranks = Ranks.of_launch(say)
    if dry_run:
        check_target(out, overwrite)
        with tempfile.TemporaryDirectory(prefix="memmix-dry-run-") as name:
            student = student or planned_student(teacher, plan, Path(name))
            return _Run(student, teacher, data, recipe, Path(name), place, ranks, say).cost(measure=True)
    with (
        ranks.telling_failure(),
        run_folder(out, resume, overwrite) as folder,
        run_lock(place),
        _no_empty_folder(place),
    ):
        if student is None:
            student = folder / ranks.share("start", lambda: planned_student(teacher, plan, folder, resume).name)
        run = _Run(student, teacher, data, recipe, folder, place, ranks, say)
        start = time.perf_counter()
        walk, cost = run.prepare(resume)
        run.walk(walk, progress)
        result = ranks.share("result", lambda: run.finish(out, overwrite, cost, start))
    return result


@contextlib.contextmanager
def _no_empty_folder(folder: Path) -> Iterator[None]:
    """Remove a folder after an error if nothing was written to it."""
    try:
        yield
    except BaseException:
        remove_empty(folder)
        raise


class _Run:
    """One process of a run: models without weights, folders and data. It reads no weights of decoder layers yet."""

    def __init__(self, student: Path, teacher: Path, data, recipe: Recipe, folder: Path, spool: Path, ranks, say):
        if check_weight_files(student):
            raise UserError(f"{str(student)!r} holds pickled weights; save the student as safetensors")
        self.recipe, self.folder, self.ranks, self.say = recipe, folder, ranks, say
        self.student_folder, self.teacher_folder, self.data = student, teacher, data
        self.student = meta_teacher(student).float()
        with one_process():
            self.device = training_arguments(recipe, folder).device
        dtype = None if self.device.type == "cuda" else torch.float32  # bf16 is slow on a CPU
        self.teacher = StreamedTeacher(teacher, self.device, dtype)
        check_same_shape(self.teacher.model, self.student)
        check_fit(self.student, self.teacher.model, data, recipe)
        self.layers = recipe.layer_slice(self.student.config.memory_layers, self.student.config.num_hidden_layers)
        check_each_is_trained(self.student, self.layers, recipe)
        streamed = isinstance(data, StreamedBlocks)
        order = [] if streamed else order_of_rows(self.student, len(data), recipe, folder)
        self.rows = Rows(data, recipe, order)
        self.spool = Spool(spool, len(self.rows), (data.block_size, self.teacher.model.config.hidden_size))
        self.trained = TrainedLayers(folder / "layers")

    def cost(self, measure: bool = False, walk: Walk | None = None) -> dict:
        """What the run costs; see `streaming_cost`."""
        walk = walk or Walk.plan(self.layers, [])
        models = self.student, self.teacher, self.student_folder
        return streaming_cost(*models, self.rows, self.spool, self.recipe, walk, self.ranks.count, measure)

    # ---- what is there already

    def prepare(self, resume: bool) -> tuple[Walk, dict]:
        """Rank 0 looks at both folders, removes what cannot be used, and plans the walk. All ranks get its plan."""
        plan = self.ranks.share("plan", lambda: self._plan(resume))
        return Walk(**plan["walk"]), plan["cost"]

    def _plan(self, resume: bool) -> dict:
        if not resume:
            shutil.rmtree(self.trained.folder, ignore_errors=True)
            (self.folder / RECORD).unlink(missing_ok=True)
            if (self.spool.folder / RECORD).is_file():
                self.spool.clear()
        self.spool.check_folder()
        identity = self._identity()
        self.resumed = (self.folder / RECORD).is_file()
        for folder in (self.folder, self.spool.folder):
            _check_identity(folder, identity)
        self._leave_former_spool(identity)
        train = [layer for layer in self.layers if not self.trained.check(layer)]
        present = self.spool.layers()
        ready = [layer for layer in present if self.spool.is_sound(layer)]
        for layer in sorted({*present} - {*ready}):
            self.say(f"the inputs of layer {layer} in the spool are incomplete or damaged; they are computed again")
            self.spool.remove(layer)
        walk = Walk.plan(train, ready)
        for layer in ready:
            if layer not in walk.steps():
                self.spool.remove(layer)
        cost = self.cost(walk=walk)
        if len(train) < len(self.layers):
            self.say(f"{len(self.layers) - len(train)} of {len(self.layers)} layers are trained already")
        if train:
            self.say(_announcement(cost, self.spool.folder))
            self.spool.check_space(cost["buffers"], self.teacher.model.dtype)
        write_sealed(self.folder / FORMER, {"folder": str(self.spool.folder)})
        for folder in (self.folder, self.spool.folder):
            write_sealed(folder / RECORD, identity)
        return {"walk": walk.record(), "cost": cost}

    def _leave_former_spool(self, identity: dict) -> None:
        """Remove the files in the spool that an earlier start of this run used, if it was another folder."""
        former = self.folder / FORMER
        if former.is_file():
            place = Path(read_sealed(former, START_AGAIN)["folder"])
            record = place / RECORD
            if place != self.spool.folder and record.is_file() and read_sealed(record, START_AGAIN) == identity:
                Spool(place, self.spool.rows, self.spool.shape).clear()

    def _identity(self) -> dict:
        """What decides the result. An interrupted run is continued only by a run with the same."""
        return {
            "recipe": deciding_fields(self.recipe),
            "data": self.data.fingerprint(),
            "student": {"config": config_of(self.student.config), "weights": teacher_hash(self.student_folder)},
            "teacher": {"config": config_of(self.teacher.model.config), "weights": teacher_hash(self.teacher_folder)},
            "dtype": str(self.teacher.model.dtype).removeprefix("torch."),
            "bf16": uses_bf16(self.recipe),
        }

    # ---- the walk

    def walk(self, walk: Walk, progress: Progress | None) -> None:
        """Compute the inputs of layers, and train the mixers that belong to this process."""
        if 0 in walk.produce and self.ranks.rank == 0:
            with self.teacher.embeddings():
                self.spool.write(0, (self._embedded(ids, positions) for _, ids, positions in self._batches()))
            self._release()
        mine = [layer for layer in walk.steps() if walk.owner(layer, self.ranks.count) == self.ranks.rank]
        total, before = self.recipe.steps * sum(layer in walk.train for layer in mine), 0
        for layer in mine:
            self.ranks.wait(partial(self.spool.is_ready, layer), f"the inputs of layer {layer}")
            clock = _Clock()
            with self.teacher.layer(layer), self.spool.read(layer) as hidden:
                clock.stop("load")
                if layer + 1 in walk.produce:
                    self.spool.write(layer + 1, self._advanced(layer, hidden))
                    clock.stop("advance")
                if layer in walk.train:
                    self._train(layer, hidden, clock, partial(_report, progress, layer, before, total))
                    before += self.recipe.steps
            self._release()
            self.spool.remove(layer)

    def _batches(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        return self.rows.batches(self.recipe.batch_size, self.device)

    def _embedded(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=uses_bf16(self.recipe)):
            return self.teacher.embed(ids, positions)

    def _advanced(self, layer: int, hidden: HiddenStates) -> Iterator[Tensor]:
        """The outputs of a layer, batch by batch."""
        for places, ids, positions in self._batches():
            inputs = hidden.read(range(places.start, places.stop), self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=uses_bf16(self.recipe)):
                outputs = self.teacher.advance(layer, inputs, ids, positions)
            yield outputs

    def _train(self, layer: int, hidden: HiddenStates, clock: "_Clock", report: Callable) -> None:
        mixer = take_mixer(self.student, layer, Checkpoint(self.student_folder))
        log = train_mixer(
            self.student,
            self.teacher,
            layer,
            self.rows,
            hidden,
            self.recipe,
            len(self.layers),
            self.folder,
            report,
        )
        clock.stop("train")
        record = {"log": log, "seconds": clock.seconds, "process": self.ranks.rank, "device": str(self.device)}
        if self.device.type == "cuda":  # of this process until now
            allocated, reserved = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            record["peak_memory"] = {"allocated": allocated(self.device), "reserved": reserved(self.device)}
        self.trained.write(layer, mixer, record)
        mixer.to("meta")

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- the end

    def finish(self, out: Path, overwrite: bool, cost: dict, start: float) -> dict:
        """Rank 0 waits for all layers, writes the student and removes the spool. Returns the result of the run."""
        for layer in self.layers:
            self.ranks.wait(partial(self.trained.record, layer), f"the mixer of layer {layer}")
        seconds = time.perf_counter() - start
        records = {layer: self.trained.record(layer) for layer in self.layers}
        tokenizer = load_tokenizer(self.teacher_folder) or load_tokenizer(self.student_folder)
        write_student(self.student_folder, self.trained, self.layers, out, tokenizer, overwrite)
        self.spool.clear()
        log = _mean_log([record["log"] for record in records.values()])
        return {
            "stage": "align",
            "steps": self.recipe.steps,
            "tokens": self.recipe.steps * self.recipe.tokens_per_step,
            "first_loss": log[0]["loss"],
            "last_loss": log[-1]["loss"],
            "seconds": round(seconds, 2),
            "resumed": self.resumed,
            "log": log,
            "layers": {
                str(layer): {
                    "first_loss": record["log"][0]["loss"],
                    "last_loss": record["log"][-1]["loss"],
                }
                | {name: record[name] for name in OF_A_LAYER if name in record}
                for layer, record in records.items()
            },
            "cost": cost,
        }


def _mean_log(logs: list[list[dict]]) -> list[dict]:
    """The log of a run from those of its layers. Only steps that all have: an interrupted run may log other steps."""
    by_step = [{row["step"]: row for row in log} for log in logs]
    steps = [row["step"] for row in logs[0] if all(row["step"] in rows for rows in by_step)]
    return [by_step[0][step] | {"loss": sum(rows[step]["loss"] for rows in by_step) / len(by_step)} for step in steps]


class _Clock:
    """Seconds of the parts of a layer's work, by name."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, name: str) -> None:
        """The time since the last call belongs to `name`."""
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 3), now


def _report(progress: Progress | None, layer: int, before: int, total: int, step: int, loss: float | None) -> None:
    """Tell the progress of a process after `step` steps of a layer; `before`: steps of its earlier layers."""
    if progress is not None:
        told = "" if loss is None else f", loss {loss:.4f}"
        progress(before + step, total, f"layer {layer}{told}")


def _check_identity(folder: Path, identity: dict) -> None:
    """Raise ValueError if a folder has files of a run with another identity."""
    if not (folder / RECORD).is_file():
        return
    different = "; ".join(differences(read_sealed(folder / RECORD, START_AGAIN), identity))
    if different:
        raise UserError(
            f"{str(folder)!r} belongs to another run ({different}); give the recipe, data and models of that run,"
            " start again with --no-resume, or give other folders"
        )


def _announcement(cost: dict, place: Path) -> str:
    """The cost in one line."""
    return (
        f"{cost['rows']:,} rows, {cost['tokens']:,} tokens: the spool {str(place)!r} needs"
        f" {bytes_text(cost['spool_bytes'])} ({cost['buffers']} x {bytes_text(cost['buffer_bytes'])}); the teacher"
        f" is read once, and each of {len(cost['layers'])} mixers trains {cost['passes']:.2f} passes over them"
    )
