"""The commands that measure: `memmix report`, student against teacher on a text; `memmix eval`, probes of recall."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.command_options import command
from hf_memmix.commands.checks import check_placement, check_texts, given_model, given_student, library
from hf_memmix.commands.common import (
    Device,
    DeviceMap,
    Json,
    Overwrite,
    Student,
    Teacher,
    TextField,
    Texts,
    load,
    out,
    print_json,
    shape_of,
    shared_tokenizer,
    tokenizer_of,
)
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.progress import progress, tell, tell_reading
from hf_memmix.errors import UserError

Text = Annotated[Path | None, typer.Option(help="Text file that the probes are made of; default: a bundled text.")]
GENERATED = 256  # tokens of a prompt of --generate, and of the text after it
BatchSize = Annotated[int, typer.Option(min=1, help="Number of sequences that are computed together.")]


@one_line_errors
def report(
    student: Student,
    teacher: Teacher,
    text: Texts,
    text_field: TextField = None,
    block_size: Annotated[int, typer.Option(min=2, help="Number of tokens per block.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of blocks that are computed together.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Largest number of tokens to read; default: the whole text.")
    ] = None,
    device: Device = None,
    device_map: DeviceMap = None,
    as_json: Json = False,
) -> None:
    """Compare a student with its teacher on a text: perplexity, agreement, and the error of each mixer.

    With --device-map auto, first the teacher is in memory and then the student. The KL divergence is then a lower
    bound, from the 64 likeliest tokens of the teacher.
    """
    check_placement(device, device_map)
    check_texts(text, text_field)
    names, student, teacher = (student, teacher), given_student(student), given_model(teacher)
    with library():
        from hf_memmix.conversion.compare import compare_models
        from hf_memmix.conversion.compare_in_turn import compare_in_turn
        from hf_memmix.training.data import tokenize_files

    tokenizer = shared_tokenizer(teacher, student)
    tell_reading(text)
    tokens = tokenize_files(text, tokenizer, text_field)
    settings = {"block_size": block_size, "batch_size": batch_size, "max_tokens": max_tokens}
    with progress("comparing") as advance:
        if device_map is None:
            models = load(student, device), load(teacher, device)
            result = compare_models(*models, tokens, tokenizer, **settings, progress=advance)
        else:
            placed = partial(load, device=None, device_map=device_map)
            result = compare_in_turn(student, teacher, placed, tokens, tokenizer, **settings, progress=advance)
            models = shape_of(student), shape_of(teacher)
    if as_json:
        ours, theirs = map(_described, names, (student, teacher), models)
        print_json(result | ours | {"teacher": theirs} | report_record(text, block_size, models[0]))
        return
    table = Table("measure", "value")
    for name in ("tokens", "teacher_ppl", "student_ppl", "ppl_ratio", "top1_agreement", "kl"):
        table.add_row(name, f"{result[name]:.4f}" if isinstance(result[name], float) else str(result[name]))
    for layer, value in result["layer_error"].items():
        table.add_row(f"relative error, layer {layer}", f"{value:.4f}")
    out.print(table)


class EvalOptions:
    """The options of `memmix eval`."""

    model: Annotated[Path, typer.Argument(help="A model, converted or not: a folder or a Hub id.")]
    out_dir: Annotated[Path, typer.Option("--out", help="Folder to write probes.json and the plots to.")]
    teacher: Annotated[Path | None, typer.Option(help="A model to measure beside it: a folder or a Hub id.")] = None
    tasks: Annotated[str, typer.Option(help='Names of probes with commas between them, or "all".')] = "all"
    lengths: Annotated[str, typer.Option(help="Lengths of the sequences in tokens, with commas between them.")] = (
        "128,256,512,1024"
    )
    samples: Annotated[
        int, typer.Option(min=1, help="Number of sequences per length and depth (0, 0.25, 0.5, 0.75, 1).")
    ] = 16
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask the probes that are questions in the tokenizer's chat template.")
    ] = False
    generate: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Also generate the answers of probes, and texts after so many prompts beside the teacher's. A prompt"
            f" and a text have {GENERATED} tokens each, or half of what both models can read.",
        ),
    ] = None
    text: Text = None
    batch_size: BatchSize = 8
    device: Device = None
    device_map: DeviceMap = None
    overwrite: Overwrite = False
    as_json: Json = False


@one_line_errors
@command(EvalOptions)
def evaluate(args) -> None:
    """Measure what a model recalls: needles, lists, chains, MQAR, common words, second mentions, copies, facts.

    With --device-map auto, one model after the other is in memory.
    """
    from hf_memmix.assets import asset_path
    from hf_memmix.conversion.saving import atomic_folder, check_not_read, check_target
    from hf_memmix.training.evaluation.probes.tasks import DEPTHS, check_grid, check_tasks

    check_placement(args.device, args.device_map)
    check_target(args.out_dir, args.overwrite)
    args.tasks = check_tasks(args.tasks, args.chat)
    if args.generate is not None and args.teacher is None:
        raise UserError("--generate compares with what a teacher generates; add --teacher")
    args.lengths = _lengths(args.lengths)
    check_grid(args.tasks, depths=DEPTHS, lengths=args.lengths, samples=args.samples)
    args.text = asset_path("heldout.txt") if args.text is None else args.text
    args.names = {"student": args.model} if args.teacher is None else {"teacher": args.teacher, "student": args.model}
    args.folders = {role: given_model(name) for role, name in args.names.items()}
    check_not_read(args.out_dir, *args.folders.values(), args.text)
    results, shortest = _probed(args)
    with library():
        from hf_memmix.conversion.records import write_json
        from hf_memmix.training.evaluation.probes import plot_probes
    with atomic_folder(args.out_dir, args.overwrite) as folder:
        write_json(folder / "probes.json", results)
        plot_probes(results, folder / "probes.png")
        plot_probes(results, folder / "probes_gain.png", "gain")
    if args.as_json:
        print_json(results | {"out": str(args.out_dir)})
    else:
        _print_probes(results, args, shortest)


def _probed(args) -> tuple[dict, int]:
    """The results of all probes and of --generate, and the number of tokens that every model can read."""
    from hf_memmix.training.text_files import read_text, text_record

    content, folders = read_text(args.text), args.folders
    with library():
        from hf_memmix.conversion.limits import check_tokens, limit_of
        from hf_memmix.training.evaluation.free_generation import compare_texts, tokens_of_text
        from hf_memmix.training.evaluation.probes import Material, counted_rows, run_probes

    tokenizer = (
        tokenizer_of(folders["student"]) if len(folders) == 1 else shared_tokenizer(*reversed(folders.values()))
    )
    material = Material(tokenizer, content, args.chat)
    if args.device_map is None:
        models = run = {role: load(folder, args.device) for role, folder in folders.items()}
    else:
        models = {role: shape_of(folder) for role, folder in folders.items()}
        run = {role: partial(load, folder, None, device_map=args.device_map) for role, folder in folders.items()}
    for network in models.values():
        check_tokens(material.filler, network, tokenizer, "the text of the probes")
    limits = [limit_of(model) for model in models.values()]
    shortest, longest = min(limits), max(limits)
    if too_long := [length for length in args.lengths if length > longest]:
        raise UserError(f"--lengths has {too_long}, but no model here was made for more than {longest} tokens")
    texts, generated = {"prompts": args.generate, "batch_size": args.batch_size}, args.generate is not None
    if generated:
        texts |= dict.fromkeys(("prompt_tokens", "new_tokens"), int(min(GENERATED, shortest / 2)))
        tokens_of_text(material, texts["prompt_tokens"])  # refuses a prompt that is too short before the probes run
    probes = {"tasks": args.tasks, "lengths": args.lengths, "samples": args.samples, "generate": generated}
    with progress("probing") as advance:
        found = run_probes(run, material, progress=advance, batch_size=args.batch_size, **probes)
    if generated:
        with progress("generating") as advance:
            found["generation"] = compare_texts(run, material, progress=advance, estimate=_tell_time, **texts)
    described = {role: _described(args.names[role], folder, models[role]) for role, folder in folders.items()}
    found = {"models": described, "text": text_record(args.text), "environment": environment_of(models)} | found
    return found | {"by_length": counted_rows(found)}, shortest


def _print_probes(results: dict, args, shortest: int) -> None:
    """The table of all tasks and that by length, with what the marks in them mean."""
    from hf_memmix.training.evaluation.free_generation import text_of
    from hf_memmix.training.evaluation.probes import gain_text
    from hf_memmix.training.evaluation.probes.counted import LEAST_OF_TEACHER, shares_text

    roles, rows = list(args.folders), results["by_length"]
    table = Table("task", "chance", *(f"{role}, {name}" for name in ("choice or exact", "gain") for role in roles))
    for row in results["summary"]:
        scored = [row[role] for role in roles]
        shares = ["-" if s is None else f"{s['exact'] if s['choice'] is None else s['choice']:.1%}" for s in scored]
        gains = [gain_text(s) or "-" for s in scored]
        table.add_row(row["task"], "" if row["chance"] is None else f"{row['chance']:.1%}", *shares, *gains)
    out.print(table)
    measures = "choice / exact" if args.generate is None else "choice / exact / generated"
    lengths = Table(f"{measures}, %", "model", *(f"{length} tokens" for length in args.lengths))
    for task in args.tasks:
        for role in roles:
            lengths.add_row(task, role, *(shares_text(row, role, True) for row in rows if row["task"] == task))
    out.print(lengths)
    out.print("in brackets: the interval of 95 %")
    if any(counts is False for row in rows for counts in row["counts"].values()):
        out.print(f"*: the teacher itself is below {LEAST_OF_TEACHER:.0%}, so this cell does not count")
    if alone := [length for length in args.lengths if length > shortest]:
        out.print(
            f"the first table does not show lengths {alone}: they are too long for one of the models; probes.json"
            " holds the results of the other model"
        )
    if args.generate is not None:
        out.print(text_of(results["generation"]["student"]))
    out.print(
        "gain: by how many nats per token the context makes the answer more likely (±: standard error over sequences);"
        f" written to {args.out_dir}"
    )


def _tell_time(seconds: float) -> None:
    tell(f"all texts take about {timedelta(seconds=max(1, round(seconds)))}, by some measured tokens")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--lengths is {text!r}; give numbers, separated by commas") from None
    if min(values) < 1:
        raise UserError(f"--lengths is {text!r}; lengths are at least 1")
    return values


def report_record(texts: list[Path], block_size: int, model) -> dict:
    """What else a report describes: the texts and the machine."""
    from hf_memmix.training.text_files import text_record

    local = [text_record(text) if text.is_file() else {"file": str(text), "sha256": ""} for text in texts]
    return {"text": local, "block_size": block_size, "environment": environment_of({"student": model})}


def _described(name: Path, folder: Path, model) -> dict:
    """A model that was measured: its size, dtype and mixers, and the hash of its weights and configuration."""
    from hf_memmix.training.card import weights_of

    kinds = getattr(model.config, "mixer_types", None)
    described = {"folder": name.name, "parameters": model.num_parameters(), "dtype": str(model.dtype).split(".")[-1]}
    return described | ({} if kinds is None else {"mixer_types": list(kinds)}) | {"weights": weights_of(folder)}


def environment_of(models: dict) -> dict:
    from hf_memmix.conversion.records import environment

    device = next(iter(models.values())).device
    return environment(None if device.type == "meta" else device)
