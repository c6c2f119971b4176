"""The commands that train: `memmix align`, `distill`, `merge` and `cache-teacher`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix import launch
from hf_memmix.command_options import command
from hf_memmix.commands.checks import check_device, check_texts, given_student, given_teacher, layers_of, library
from hf_memmix.commands.common import (
    Device,
    Json,
    Loss,
    Overwrite,
    Teacher,
    TextField,
    Texts,
    err,
    load,
    out,
    print_json,
    quiet_library,
    shared_tokenizer,
    tokenizer_of,
)
from hf_memmix.commands.devices import check_processes, choose_device
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.progress import progress, tell, tell_date, tell_reading
from hf_memmix.commands.training_reports import (
    keep_codecarbon,
    keep_tensorboard,
    print_cost,
    print_result,
    progress_callback,
)
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import ATTENTION

OptionalStudent = Annotated[
    Path | None, typer.Option(help="The converted model: a folder or a Hub id.", show_default=False)
]
Plan = Annotated[
    Path | None,
    typer.Option(help="Instead of --student: convert the teacher by this plan of memmix select first."),
]
Recipe = Annotated[str | None, typer.Option(help="Name of a bundled recipe or a YAML file.")]
# options that replace fields of the recipe, by the names of the fields
RECIPE_FIELDS = (
    "steps",
    "batch_size",
    "block_size",
    "learning_rate",
    "rest_learning_rate",
    "save_every",
    "seed",
    "layers",
    "loss",
    "drills",
)


class TrainingOptions:
    """The options of `memmix align` and `memmix distill`."""

    student: OptionalStudent = None
    plan: Plan = None
    teacher: Teacher
    text: Texts
    text_field: TextField = None
    loss: Loss = None
    out_dir: Annotated[Path, typer.Option("--out", help="Folder to write the trained model to.")]
    recipe: Recipe
    steps: Annotated[int | None, typer.Option(help="Number of optimizer steps.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Number of blocks per step.")] = None
    block_size: Annotated[int | None, typer.Option(help="Number of tokens per block.")] = None
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Peak learning rate of the mixers; of windows: times the recipe's window_rate."),
    ] = None
    rest_learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate of all other parameters.")] = (
        None
    )
    save_every: Annotated[int | None, typer.Option(help="Number of steps between two checkpoints; 0 writes none.")] = (
        None
    )
    seed: Annotated[int | None, typer.Option(help="Seed of the order in which the data is read.")] = None
    drills: Annotated[
        float | None, typer.Option(help="Share of the rows that are drills of recall, in English, e.g. 0.5.")
    ] = None
    layers: Annotated[
        str | None, typer.Option(help='Train these layers only, e.g. "0-3,8"; memmix merge joins the parts.')
    ] = None
    report_to: Annotated[
        list[str] | None,
        typer.Option(help="Tracker that receives the logs, e.g. tensorboard or wandb; repeatable."),
    ] = None
    logging_steps: Annotated[int | None, typer.Option(min=1, help="Number of steps between two logged losses.")] = None
    device: Annotated[
        str | None,
        typer.Option("--device", help="Where it trains: cpu, cuda or cuda:1; default: a GPU if there is one."),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume", help="Continue a run that was interrupted, or start again from the beginning."
        ),
    ] = True
    overwrite: Overwrite = False
    as_json: Json = False


class AlignOptions(TrainingOptions):
    recipe = "align"
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Keep one decoder layer of the teacher in memory; hidden states lie in files (--spool)."
        ),
    ] = False
    spool: Annotated[
        Path | None,
        typer.Option(
            help="With --stream: a folder on a large, fast disk for hidden states.",
            show_default="a folder beside the output",
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --stream: only print what it would cost: disk, memory, passes.")
    ] = False


class DistillOptions(TrainingOptions):
    recipe = "distill"


@one_line_errors
@command(AlignOptions, without=("rest_learning_rate",))
def align(args) -> None:
    """Train only the mixers: each learns the output of the attention that it replaced."""
    if args.stream:
        if args.save_every is not None:
            raise UserError("--save-every is not for --stream, which saves each layer that is trained; leave it out")
        _align_by_streaming(args)
        return
    for name in ("spool", "dry_run"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} belongs to --stream; give --stream too, or leave it out")
    _train("align", args)


@one_line_errors
@command(DistillOptions, without=("layers",))
def distill(args) -> None:
    """Train the whole student to predict what the teacher predicts (forward KL divergence)."""
    _train("distill", args)


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
    from hf_memmix.conversion.saving import check_not_read, check_target

    check_target(out_dir, overwrite)
    student, parts = given_student(student), [given_student(part) for part in parts]
    check_not_read(out_dir, renewed=[student, *parts])
    with library():
        from hf_memmix.conversion import save_student
        from hf_memmix.training.merge import merge_students

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
    text_field: TextField = None,
    loss: Loss = None,
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
    from hf_memmix.conversion.saving import check_not_read, check_target
    from hf_memmix.training.recipe import load_recipe

    check_device(device)
    settings = load_recipe(recipe, block_size=block_size, loss=loss)
    check_target(out_dir, overwrite)
    check_texts(text, text_field)
    check_not_read(out_dir, teacher := given_teacher(teacher), *text)
    _check_top_k(top_k, teacher)
    with library():
        from hf_memmix.training.data import TokenBlocks
        from hf_memmix.training.fact_drills import of_recipe
        from hf_memmix.training.teacher_cache import teacher_hash, write_cache

    tell_reading(text)
    tell_date(tokenizer := tokenizer_of(teacher))
    how = (settings.block_size, settings.pack, settings.bos, text_field, settings.loss)
    data = of_recipe(TokenBlocks.from_files(text, tokenizer, *how), tokenizer, settings)
    options = {"teacher_id": teacher_hash(teacher), "batch_size": batch_size, "overwrite": overwrite}
    with progress("reading the teacher") as advance:
        meta = write_cache(load(teacher, device), data, out_dir, top_k, progress=advance, **options)
    if as_json:
        print_json({name: value for name, value in meta.items() if name != "config"} | {"out": str(out_dir)})
    else:
        tokens = meta["rows"] * meta["block_size"]
        out.print(f"{tokens} tokens, {top_k} probabilities each; written to {out_dir}: teacher: cache:{out_dir}")


def _check_top_k(top_k: int, teacher: Path) -> None:
    from hf_memmix.conversion.model_files import read_json

    size = read_json(teacher / "config.json").get("vocab_size")
    if type(size) is int and top_k > size:
        raise UserError(f"--top-k is {top_k}, but the teacher has {size} tokens; give at most {size}")


def _take_device(args: SimpleNamespace) -> None:
    """Choose the device before imports of libraries ask CUDA for its GPUs, which fixes the visible ones."""
    tell("loading torch and transformers")
    choose_device(args.device)
    check_processes()


def _recipe(stage: str, args: SimpleNamespace):
    """The recipe of a command, with the options that replace its fields. Checks what needs no library."""
    from hf_memmix.training.recipe import check_tracker_names, load_recipe

    check_device(args.device)
    check_tracker_names(args.report_to or [], "--report-to")
    overrides = {name: value for name, value in vars(args).items() if name in RECIPE_FIELDS}
    settings = load_recipe(args.recipe, **overrides, stage=stage)
    _refuse_two_students(args)
    check_texts(args.text, args.text_field)
    return settings


def _folders_of_models(args: SimpleNamespace, settings) -> tuple[Path | None, Path]:
    """The folders of student and teacher.

    Raises:
        UserError: the output would replace the teacher, one of them is no such model, or the recipe names layers that
            the student does not have.
    """
    from hf_memmix.conversion.layer_plan import read_plan
    from hf_memmix.conversion.model_files import read_json
    from hf_memmix.conversion.saving import check_not_read

    student, teacher = given_student(args.student), given_teacher(args.teacher)
    check_not_read(args.out_dir, teacher)
    if student is not None:
        kinds = read_json(student / "config.json")["mixer_types"]
        settings.layer_slice([layer for layer, kind in enumerate(kinds) if kind != ATTENTION], len(kinds))
    if args.plan is not None:
        read_plan(args.plan, layers_of(teacher))
    return student, teacher


def _with_options(settings, args: SimpleNamespace):
    """The recipe with the options for the Trainer, which are checked."""
    from dataclasses import replace

    from hf_memmix.training.trainer_arguments import check_packages, check_schedule, check_trackers

    given = {"logging_steps": args.logging_steps} if args.logging_steps else {}
    given |= {"report_to": list(dict.fromkeys(args.report_to))} if args.report_to else {}
    check_trackers(given.get("report_to", []), "--report-to")
    given |= {"use_cpu": True} if args.device == "cpu" else {}
    settings = replace(settings, trainer=settings.trainer | given)
    check_packages(settings)
    check_schedule(settings)
    return settings


def _refuse_two_students(args: SimpleNamespace) -> None:
    """Raise ValueError unless either --student or --plan is given."""
    if (args.student is None) == (args.plan is None):
        wrong = "neither --student nor --plan is" if args.plan is None else "--student and --plan are both"
        raise UserError(
            f"{wrong} given; give --student, the converted model, or --plan, by which the teacher is converted first"
        )


def _read_data(args: SimpleNamespace, settings, student: Path | None, teacher: Path):
    """The rows of the texts, and the tokenizer that has made them."""
    from hf_memmix.conversion.saving import check_not_read
    from hf_memmix.training.data import StreamedBlocks, TokenBlocks
    from hf_memmix.training.fact_drills import of_recipe

    check_not_read(args.out_dir, args.plan, settings.cache_dir, *args.text, renewed=[student])
    tokenizer = tokenizer_of(teacher) if student is None else shared_tokenizer(teacher, student)
    if not settings.stream:
        tell_reading(args.text)
    tell_date(tokenizer)
    read = StreamedBlocks if settings.stream else TokenBlocks.from_files
    how = (settings.block_size, settings.pack, settings.bos, args.text_field, settings.loss)
    return of_recipe(read(args.text, tokenizer, *how), tokenizer, settings), tokenizer


def _train(stage: str, args: SimpleNamespace) -> None:
    from hf_memmix.training.run_lock import run_folder

    settings = _recipe(stage, args)
    student, teacher = _folders_of_models(args, settings)
    # checkpoints lie beside the output until it is complete, so that the same command line continues a broken run
    with run_folder(args.out_dir, args.resume, args.overwrite) as run_dir:
        _take_device(args)
        with library():
            import torch

            from hf_memmix.conversion import save_student
            from hf_memmix.conversion.mixer_files import convert_by_plan
            from hf_memmix.training.train import train

        settings = _with_options(settings, args)
        trackers = _names(settings.trainer.get("report_to"))
        keep_tensorboard(trackers, args.out_dir)
        data, tokenizer = _read_data(args, settings, student, teacher)
        if args.plan is None:
            model = load(student, "cpu", "auto")
        else:
            model = convert_by_plan(load(teacher, "cpu", "auto"), args.plan)
        on_gpu = torch.cuda.is_available()
        teacher_model = teacher if settings.cache_dir else load(teacher, "cpu", "auto" if on_gpu else None)
        dtype = model.dtype
        with progress(f"{stage}: step") as advance:
            callbacks = [progress_callback(advance, settings.tokens_per_step)]
            result = train(
                model, teacher_model, data, run_dir, recipe=settings, resume=args.resume, callbacks=callbacks
            )
        if launch.is_first():
            keep_codecarbon(trackers, run_dir, args.out_dir)
            save_student(model.cpu(), args.out_dir, tokenizer, overwrite=args.overwrite, dtype=dtype)
    if args.as_json:
        print_json(result | {"out": str(args.out_dir)})
    else:
        print_result(stage, result, args.out_dir)


def _align_by_streaming(args: SimpleNamespace) -> None:
    from contextlib import nullcontext

    from hf_memmix.training.run_lock import check_run_target

    settings = _recipe("align", args)
    student, teacher = _folders_of_models(args, settings)
    check_run_target(args.out_dir, args.overwrite)
    _take_device(args)
    with library():
        from hf_memmix.training.streaming import align_by_streaming

    settings = _with_options(settings, args)
    if trackers := sorted(_names(settings.trainer.get("report_to")) - {"none"}):
        raise UserError(
            f"report_to is {trackers[0]!r}, but --stream trains one layer after the other, each with its own losses;"
            " leave it out, --json prints the losses of all layers"
        )
    quiet_library()
    data, _ = _read_data(args, settings, student, teacher)
    with nullcontext() if args.dry_run else progress("align: step") as advance:
        result = align_by_streaming(
            student,
            teacher,
            data,
            args.out_dir,
            recipe=settings,
            plan=args.plan,
            spool=args.spool,
            resume=args.resume,
            overwrite=args.overwrite,
            dry_run=args.dry_run,
            progress=advance,
            notify=lambda line: err.print(line, markup=False, highlight=False, soft_wrap=True),
        )
    if not launch.is_first():
        return  # rank 0 prints the result
    if args.as_json:
        print_json(result if args.dry_run else result | {"out": str(args.out_dir)})
    elif args.dry_run:
        print_cost(result)
    else:
        print_result("align", result, args.out_dir)


def _names(trackers: list[str] | str | None) -> set[str]:
    return {trackers} if isinstance(trackers, str) else set(trackers or [])
