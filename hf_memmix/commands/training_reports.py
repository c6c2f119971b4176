"""What a training tells: its line of progress, its result, and the files of trackers beside its output."""

import itertools
import os
import shutil
from pathlib import Path

from hf_memmix import launch
from hf_memmix.commands.common import err, out
from hf_memmix.commands.progress import rate_text


def keep_tensorboard(trackers: set[str], out_dir: Path) -> None:
    """Have TensorBoard write beside the output; its default folder is in that of the checkpoints, which vanishes."""
    if trackers.isdisjoint({"tensorboard", "all"}):
        return
    folder = os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(out_dir.absolute()) + ".tensorboard")
    if launch.is_first():
        err.print(f"TensorBoard's files: {folder}", markup=False, highlight=False)


def keep_codecarbon(trackers: set[str], run_dir: Path, out_dir: Path) -> None:
    """Move CodeCarbon's files beside the output; its callback writes into the folder of checkpoints, which vanishes.

    Files of an earlier run stay. Without this tracker, nothing is written.
    """
    if trackers.isdisjoint({"codecarbon", "all"}):
        return
    folder = Path(str(out_dir.absolute()) + ".codecarbon")
    for path in [path for path in run_dir.iterdir() if path.is_file()]:
        folder.mkdir(exist_ok=True)
        names = itertools.chain([path.name], (f"{path.stem}-{i}{path.suffix}" for i in itertools.count(2)))
        shutil.move(path, next(folder / name for name in names if not (folder / name).exists()))
        err.print(f"CodeCarbon's files: {folder}", markup=False, highlight=False)


def progress_callback(advance, tokens_per_step: int):
    import time

    from transformers import TrainerCallback

    class Report(TrainerCallback):
        loss = None

        def on_train_begin(self, args, state, control, **kwargs):
            self.first, self.start = state.global_step, time.monotonic()
            self.newest = self.start
            advance(state.global_step, state.max_steps, "")

        def on_step_end(self, args, state, control, **kwargs):
            self.loss, self.newest = getattr(state, "newest_loss", self.loss), time.monotonic()
            self.show(state)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in (logs or {}):
                self.loss = float(logs["loss"])
                self.show(state)

        def show(self, state):
            loss = [] if self.loss is None else [f"loss {self.loss:.4f}"]
            tokens = (state.global_step - self.first) * tokens_per_step
            notes = [*loss, rate_text(tokens, self.newest - self.start)]
            advance(state.global_step, state.max_steps, ", ".join(filter(None, notes)))

    return Report()


def print_result(stage: str, result: dict, out_dir: Path) -> None:
    from hf_memmix.training.stage_time import time_text

    out.print(
        f"{stage}: {result['steps']} steps, {result['tokens']} tokens, {time_text(result)}, "
        f"loss {result['first_loss']:.4f} -> {result['last_loss']:.4f}; written to {out_dir}"
    )


def print_cost(cost: dict) -> None:
    from hf_memmix.conversion.records import bytes_text

    memory = {"host": cost["peak_memory"]["host"], "GPU": cost["peak_memory"]["device"]}
    peaks = ", ".join(f"{bytes_text(count)} ({where})" for where, count in memory.items() if count is not None)
    out.print(
        f"{len(cost['layers'])} layers, {cost['rows']:,} rows, {cost['tokens']:,} tokens; spool"
        f" {bytes_text(cost['spool_bytes'])}; peak memory {peaks}; the teacher is read once, and each mixer trains for"
        f" {cost['passes']:.2f} passes over the tokens",
        highlight=False,
    )
