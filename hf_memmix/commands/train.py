"""The commands that train: `memmix align`, `distill`, `merge` and `cache-teacher`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.commands.common import (
    Device,
    Json,
    Overwrite,
    Teacher,
    Texts,
    err,
    load,
    out,
    print_json,
    shared_tokenizer,
    tokenizer_of,
)
from hf_memmix.commands.devices import check_processes, choose_device
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.hub import model_folder
from hf_memmix.commands.progress import progress

OptionalStudent = Annotated[
    Path | None, typer.Option(help="The converted model: a folder or a Hub id.", show_default=False)
]
Plan = Annotated[
    Path | None,
    typer.Option(help="Instead of --student: convert the teacher by this plan of memmix select first."),
]
Recipe = Annotated[str | None, typer.Option(help="Name of a bundled recipe or a YAML file.")]
OutDir = Annotated[Path, typer.Option("--out", help="Folder to write the trained model to.")]
Steps = Annotated[int | None, typer.Option(help="Number of optimizer steps.")]
BatchSize = Annotated[int | None, typer.Option(help="Number of blocks per step.")]
BlockSize = Annotated[int | None, typer.Option(help="Number of tokens per block.")]
LearningRate = Annotated[float | None, typer.Option(help="Peak learning rate of the mixers.")]
SaveEvery = Annotated[int | None, typer.Option(help="Number of steps between two checkpoints; 0 writes none.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the order in which the data is read.")]
ReportTo = Annotated[
    list[str] | None, typer.Option(help="Tracker that receives the logs, e.g. tensorboard or wandb; repeatable.")
]
LoggingSteps = Annotated[int | None, typer.Option(min=1, help="Number of steps between two logged losses.")]
TrainDevice = Annotated[
    str | None, typer.Option("--device", help="Where it trains: cpu, cuda or cuda:1; default: a GPU if there is one.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume", help="Continue a run that was interrupted, or start again from the beginning."
    ),
]


@one_line_errors
def align(
    teacher: Teacher,
    text: Texts,
    out_dir: OutDir,
    student: OptionalStudent = None,
    plan: Plan = None,
    recipe: Recipe = "align",
    steps: Steps = None,
    batch_size: BatchSize = None,
    block_size: BlockSize = None,
    learning_rate: LearningRate = None,
    save_every: SaveEvery = None,
    seed: Seed = None,
    layers: Annotated[
        str | None, typer.Option(help='Train these layers only, e.g. "0-3,8"; memmix merge joins the parts.')
    ] = None,
    report_to: ReportTo = None,
    logging_steps: LoggingSteps = None,
    device: TrainDevice = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train only the mixers: each learns the output of the attention that it replaced."""
    overrides = {"steps": steps, "batch_size": batch_size, "block_size": block_size, "learning_rate": learning_rate}
    overrides |= {"save_every": save_every, "seed": seed, "layers": layers}
    trainer = {"report_to": report_to, "logging_steps": logging_steps}
    _train(
        "align",
        (student, plan),
        teacher,
        text,
        out_dir,
        recipe,
        overrides,
        trainer,
        device,
        resume,
        overwrite,
        as_json,
    )


@one_line_errors
def distill(
    teacher: Teacher,
    text: Texts,
    out_dir: OutDir,
    student: OptionalStudent = None,
    plan: Plan = None,
    recipe: Recipe = "distill",
    steps: Steps = None,
    batch_size: BatchSize = None,
    block_size: BlockSize = None,
    learning_rate: LearningRate = None,
    rest_learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of all other parameters.")
    ] = None,
    save_every: SaveEvery = None,
    seed: Seed = None,
    report_to: ReportTo = None,
    logging_steps: LoggingSteps = None,
    device: TrainDevice = None,
    resume: Resume = True,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Train the whole student to predict what the teacher predicts (forward KL divergence)."""
    overrides = {"steps": steps, "batch_size": batch_size, "block_size": block_size, "learning_rate": learning_rate}
    overrides |= {"rest_learning_rate": rest_learning_rate, "save_every": save_every, "seed": seed}
    trainer = {"report_to": report_to, "logging_steps": logging_steps}
    _train(
        "distill",
        (student, plan),
        teacher,
        text,
        out_dir,
        recipe,
        overrides,
        trainer,
        device,
        resume,
        overwrite,
        as_json,
    )


@one_line_errors
def merge(
    parts: Annotated[
        list[Path], typer.Argument(help="Output folders of align, each with other layers of one student.")
    ],
    student: Annotated[Path, typer.Option(help="The student that all of them started from: a folder or a Hub id.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder to write the merged student to.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Join the layers that several runs of align have trained with --layers, on one machine or on many."""
    from hf_memmix.conversion import save_student
    from hf_memmix.conversion.saving import check_target
    from hf_memmix.training.merge import merge_students

    check_target(out_dir, overwrite)
    student = model_folder(student)
    with err.status("merging"):
        model, origin = merge_students(student, parts)
        save_student(model, out_dir, tokenizer_of(student, required=False), overwrite=overwrite)
    if as_json:
        print_json({"out": str(out_dir), "layers": origin})
    else:
        out.print(f"{len(origin)} trained layers of {len(parts)} runs; written to {out_dir}")


@one_line_errors
def cache_teacher(
    teacher: Teacher,
    text: Texts,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder to write the cache to.")],
    top_k: Annotated[
        int, typer.Option(min=1, help="Number of probabilities to keep per token; each takes 6 bytes.")
    ] = 32,
    recipe: Recipe = "distill",
    block_size: Annotated[
        int | None, typer.Option(help="Number of tokens per block; the run that reads the cache needs the same.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of blocks that are computed together.")] = 8,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write the probabilities of the teacher's likeliest tokens to disk, for recipes with `teacher: cache:DIR`."""
    from hf_memmix.conversion.saving import check_target
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.recipe import load_recipe
    from hf_memmix.training.teacher_cache import teacher_hash, write_cache

    check_target(out_dir, overwrite)
    teacher = model_folder(teacher)
    settings = load_recipe(recipe, block_size=block_size)
    data = TokenBlocks.from_files(text, tokenizer_of(teacher), settings.block_size, settings.pack)
    options = {"teacher_id": teacher_hash(teacher), "batch_size": batch_size, "overwrite": overwrite}
    with progress("reading the teacher") as advance:
        meta = write_cache(load(teacher, device), data, out_dir, top_k, progress=advance, **options)
    if as_json:
        print_json(meta | {"out": str(out_dir)})
    else:
        tokens = meta["rows"] * meta["block_size"]
        out.print(f"{tokens} tokens, {top_k} probabilities each; written to {out_dir}: teacher: cache:{out_dir}")


def _train(
    stage, start, teacher, text, out_dir, recipe, overrides, trainer, device, resume, overwrite, as_json
) -> None:
    from dataclasses import replace

    import torch

    from hf_memmix.conversion import save_student
    from hf_memmix.conversion.mixer_files import convert_by_plan
    from hf_memmix.training.data import StreamedBlocks, TokenBlocks
    from hf_memmix.training.run_lock import run_folder
    from hf_memmix.training.train import load_recipe, train
    from hf_memmix.training.trainer_arguments import check_trackers

    choose_device(device)
    check_processes()
    settings = load_recipe(recipe, **overrides, stage=stage)
    given = {name: value for name, value in trainer.items() if value}
    given |= {"report_to": list(dict.fromkeys(given["report_to"]))} if "report_to" in given else {}
    check_trackers(given.get("report_to", []), "--report-to")
    settings = replace(settings, trainer=settings.trainer | given | ({"use_cpu": True} if device == "cpu" else {}))
    _keep_tensorboard(settings.trainer.get("report_to") or [], out_dir)
    given, plan = start
    if (given is None) == (plan is None):
        raise ValueError(
            f"{'neither --student nor --plan is' if plan is None else '--student and --plan are both'} given; give"
            " --student, the converted model, or --plan, by which the teacher is converted first"
        )
    student, teacher = model_folder(given), model_folder(teacher)
    # checkpoints lie beside the output until it is complete, so that the same command line continues a broken run
    with run_folder(out_dir, resume, overwrite) as run_dir:
        tokenizer = tokenizer_of(teacher) if student is None else shared_tokenizer(teacher, student)
        read = StreamedBlocks if settings.stream else TokenBlocks.from_files
        data = read(text, tokenizer, settings.block_size, settings.pack)
        model = load(student, "cpu", "auto") if plan is None else convert_by_plan(load(teacher, "cpu", "auto"), plan)
        on_gpu = torch.cuda.is_available()
        teacher_model = teacher if settings.cache_dir else load(teacher, "cpu", "auto" if on_gpu else None)
        dtype = model.dtype
        with progress(f"{stage}: step") as advance:
            callbacks = [_progress_callback(advance, settings.tokens_per_step)]
            result = train(model, teacher_model, data, run_dir, recipe=settings, resume=resume, callbacks=callbacks)
        if not int(os.environ.get("RANK", "0")):
            save_student(model.cpu(), out_dir, tokenizer, overwrite=overwrite, dtype=dtype)
    if as_json:
        print_json(result | {"out": str(out_dir)})
    else:
        out.print(
            f"{stage}: {result['steps']} steps, {result['tokens']} tokens, {result['seconds']:.0f} s, "
            f"loss {result['first_loss']:.4f} -> {result['last_loss']:.4f}; written to {out_dir}"
        )


def _keep_tensorboard(trackers: list[str] | str, out_dir: Path) -> None:
    """Have TensorBoard write beside the output; its default folder is in that of the checkpoints, which vanishes."""
    if {"tensorboard", "all"}.isdisjoint([trackers] if isinstance(trackers, str) else trackers):
        return
    folder = os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(out_dir.absolute()) + ".tensorboard")
    if not int(os.environ.get("RANK", "0")):
        err.print(f"TensorBoard's files: {folder}", markup=False, highlight=False)


def _progress_callback(advance, tokens_per_step: int):
    import time

    from transformers import TrainerCallback

    class Report(TrainerCallback):
        loss = None

        def on_train_begin(self, args, state, control, **kwargs):
            self.first, self.start = state.global_step, time.monotonic()
            advance(state.global_step, state.max_steps, "")

        def on_step_end(self, args, state, control, **kwargs):
            self.loss = getattr(state, "newest_loss", self.loss)
            self.show(state)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in (logs or {}):
                self.loss = float(logs["loss"])
                self.show(state)

        def show(self, state):
            loss = [] if self.loss is None else [f"loss {self.loss:.4f}"]
            speed = (state.global_step - self.first) * tokens_per_step / (time.monotonic() - self.start)
            advance(state.global_step, state.max_steps, ", ".join([*loss, f"{speed:,.0f} tokens/s"]))

    return Report()
