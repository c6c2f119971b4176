"""The commands that make a student: `memmix convert` from a transformer, `memmix import-hmf` from a GKA release."""

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Column, Table

from hf_memmix.command_options import command
from hf_memmix.commands.checks import given_model, given_student, given_teacher, layers_of, library
from hf_memmix.commands.common import Json, Overwrite, err, out, print_json, quiet_library
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.layers import LayerChoices, LayerOptions
from hf_memmix.commands.progress import progress
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import ATTENTION, DEFAULT_MIXER


class Folders:
    """What is read and written."""

    teacher: Annotated[Path, typer.Option(help="The transformer to convert: a folder or a Hub id.")]
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder to write the student to.")] = None


class ConvertOptions(LayerOptions, Folders):
    """The options of `memmix convert`."""

    plan: Annotated[Path | None, typer.Option(help="A plan of memmix select, which names mixers and layers.")] = None
    trained: Annotated[
        list[Path] | None,
        typer.Option(help="Take the mixers, and without --mixer their name, of this aligned student; repeatable."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the parameters that are drawn at random.")] = 0
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what a conversion would do and cost: memory, bytes, time.")
    ] = False
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length of the dry run, in tokens; repeatable.")
    ] = None
    overwrite: Overwrite = False
    as_json: Json = False


@one_line_errors
@command(ConvertOptions)
def convert(args) -> None:
    """Replace the attention in layers of a transformer by recurrent mixers that start from its weights.

    The teacher is read and the student is written piece by piece: one decoder layer at a time is in memory.
    """
    from hf_memmix.conversion.saving import check_not_read, check_target, existing_folder

    out_dir = args.out_dir
    if out_dir is None and not args.dry_run:
        raise UserError("give a folder for the student with --out, or ask for a --dry-run")
    if args.context and not args.dry_run:
        raise UserError("--context belongs to --dry-run; give --dry-run too, or leave it out")
    if out_dir is not None:
        check_target(out_dir, args.overwrite)
        check_not_read(out_dir, args.plan)
    chosen = LayerChoices.of(args, args.plan)
    teacher, trained = given_teacher(args.teacher), [given_student(folder) for folder in args.trained or []]
    named = args.mixer or args.layers or args.plan or not trained
    arguments, options, aligned = chosen.arguments(layers_of(teacher), DEFAULT_MIXER if named else _mixer_of(trained))
    if trained:
        aligned = None
    with library():
        from hf_memmix.conversion.families import family_of
        from hf_memmix.conversion.loading import read_config

    family_of(read_config(teacher))  # refuse a family that cannot be converted before loading its weights
    arguments["mixers"] = _all_options(arguments, options, [read_config(folder) for folder in trained])
    if args.dry_run:
        with library():
            from hf_memmix.conversion.estimate import CONTEXTS, estimate, meta_teacher

        place = existing_folder((out_dir or Path(tempfile.gettempdir(), "student")).absolute().parent)
        lengths = tuple(args.context or CONTEXTS)
        result = estimate(meta_teacher(teacher), contexts=lengths, place=place, **arguments)
        print_json(result) if args.as_json else _print_estimate(result)
        return
    with library():
        from hf_memmix.conversion import convert_model
        from hf_memmix.conversion.convert import convert_to_folder
        from hf_memmix.conversion.layer_choice import layer_text
        from hf_memmix.conversion.mixer_files import load_aligned

    quiet_library()
    with progress("converting, in MiB:") as advance:
        student = convert_to_folder(
            teacher,
            out_dir,
            partial(convert_model, seed=args.seed, **arguments),
            seed=args.seed,
            overwrite=args.overwrite,
            trained=trained,
            fill=None if aligned is None else partial(load_aligned, folder=aligned),
            progress=lambda done, total: advance(done >> 20, total >> 20),
            notify=lambda line: err.print(line, markup=False, soft_wrap=True),
        )
    report = student.conversion_report
    if args.as_json:
        record = {"out": str(out_dir), "converted": report.converted, "kept": report.kept, "layers": report.layers}
        print_json(record | report.counts())
        return
    _print_kinds(report.kinds(), report.counts(), report.mixer is None)
    into = f" to {_layers_of_mixers(report.layers)}" if report.mixer is None else ""
    converted, kept = layer_text(report.converted), layer_text(report.kept)
    out.print(f"layers {converted} converted{into}, {kept} kept; student written to {out_dir}", highlight=False)


@one_line_errors
def import_hmf(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint in the format of the official GKA release.")
    ],
    out_dir: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the model to.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Load a checkpoint of the official GKA release (Hybrid Model Factory) and save it as a model of this package."""
    from hf_memmix.conversion.model_files import check_released
    from hf_memmix.conversion.saving import check_not_read, check_target

    check_target(out_dir, overwrite)
    check_not_read(out_dir, folder)
    given_model(folder, check_released)
    with library():
        from hf_memmix.conversion import hmf, save_student

    with err.status("importing"):
        model = hmf.import_hmf(folder)
        save_student(model, out_dir, overwrite=overwrite, files=hmf.tokenizer_files(folder))
    record = model.conversion_report.record()
    if as_json:
        print_json(record | {"out": str(out_dir)})
        return
    kinds = record["layers"]
    out.print(f"{record['backbone']}: {kinds.count('gka')} GKA layers, {kinds.count('attention')} of attention")
    out.print(f"{record['copied']} tensors copied, {len(record['dropped'])} dropped")
    for row in record["dropped"]:
        out.print(f"  {row['source']}: {row['reason']}", highlight=False)
    out.print(f"written to {out_dir}")


@one_line_errors
def import_gguf(
    file: Annotated[Path, typer.Argument(help="A GGUF file, or a folder with one.")],
    out_dir: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the model and its tokenizer to.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Type of the dequantized weights.")
    ] = "bfloat16",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a GGUF file as an ordinary model folder, dequantized, that all commands take as a teacher."""
    from hf_memmix.conversion.model_files import find_gguf
    from hf_memmix.conversion.saving import check_not_read, check_target

    check_target(out_dir, overwrite)
    file = find_gguf(file)
    check_not_read(out_dir, file)
    with library():
        from hf_memmix.conversion import save_student
        from hf_memmix.conversion.gguf_file import read_gguf

    quiet_library()
    with err.status(f"reading {file.name}"):
        model, tokenizer = read_gguf(file, dtype)
        save_student(model, out_dir, tokenizer, overwrite=overwrite)
    size, family = model.num_parameters(), model.config.model_type
    if as_json:
        print_json({"out": str(out_dir), "model_type": family, "parameters": size, "dtype": dtype})
    else:
        out.print(f"{family}, {size / 1e6:,.0f}M parameters in {dtype}; written to {out_dir}", highlight=False)


def _print_kinds(kinds: list[dict], counts: dict[str, int], several: bool) -> None:
    """One row per kind of tensor, then the number of tensors per fate. The common prefix of all names stands above.

    `several`: there are several mixers, so the layers of each row are named instead of counted.
    """
    from hf_memmix.conversion.layer_choice import layer_text

    prefix = os.path.commonprefix([row["source"] or row["targets"][0] for row in kinds]).rpartition(".")[0] + "."
    table = Table(*(Column(name, overflow="fold") for name in ("tensor", "fate", "goes to", "layers", "why")))
    for row in kinds:
        source, targets = (names.replace(prefix, "") for names in (row["source"], ", ".join(row["targets"])))
        table.add_row(
            source,
            row["fate"],
            targets,
            layer_text(row["layers"]) if several else str(len(row["layers"])),
            row["reason"],
        )
    table.add_row("all others", "copied", "the same name", "", "bit-equal to the teacher's")
    out.print(f"in {prefix.rstrip('.')}:", highlight=False)
    out.print(table)
    out.print(", ".join(f"{count} {fate}" for fate, count in counts.items()), highlight=False)


def _print_estimate(result: dict) -> None:
    from hf_memmix.conversion.layer_choice import layer_text
    from hf_memmix.conversion.records import bytes_text

    kinds = result["layers"]
    kept = [i for i, kind in enumerate(kinds) if kind == "attention"]
    _print_kinds(result["kinds"], result["counts"], result["mixer"] is None)
    become = _layers_of_mixers(kinds) if result["mixer"] is None else result["mixer"]
    out.print(
        f"{len(kinds)} layers: {len(kinds) - len(kept)} become {become}, attention stays in {kept or 'no layer'}"
    )
    options = result["options"] if result["mixer"] is None else {"": result["options"]}
    # what windows beside memories read stands in no option of the memories
    by_layer = result["windows"] if len(result["windows"]) > 1 or result["mixer"] != "window" else []
    told = {"window", "sinks"} if by_layer else set()
    for mixer, own in options.items():
        text = ", ".join(f"{name}={value}" for name, value in own.items() if name not in told)
        out.print(f"{mixer}: {text}" if mixer else text, style="dim", highlight=False)
    for row in by_layer:
        text = f"layers {layer_text(row['layers'])}: window={row['window']}, sinks={row['sinks']}"
        out.print(text, style="dim", highlight=False)
    sizes = Table("", "teacher", "student")
    sizes.add_row("parameters", *(f"{result['parameters'][name]:,}" for name in ("teacher", "student")))
    for row in result["state"]:
        name = f"memory of one sequence of {row['context']:,} tokens"
        sizes.add_row(name, *(bytes_text(row[model]) for model in ("teacher", "student")))
    out.print(sizes)
    cost = result["streaming"]
    memory, reads, writes = (bytes_text(cost[name]) for name in ("peak_memory", "reads", "writes"))
    minutes = f"{cost['seconds']:.0f} s" if cost["seconds"] < 120 else f"{cost['seconds'] / 60:.0f} min"
    out.print(
        f"the conversion reads {reads}, writes {writes}, needs {memory} of memory and about {minutes} on this machine",
        highlight=False,
    )
    weights = ", ".join(f"{stage} {bytes_text(count)}" for stage, count in result["weights"].items())
    out.print(f"weights, gradients and optimizer states (without activations): {weights}", highlight=False)


def _mixer_of(trained: list[Path]) -> str:
    """The mixer of these students, folders of converted models. Raises UserError if they have several."""
    from hf_memmix.conversion.model_files import read_json

    written = [read_json(folder / "config.json").get("mixer_types") for folder in trained]
    # what else stands there is refused when the students are loaded
    kinds = {kind for types in written if isinstance(types, list) for kind in types if isinstance(kind, str)}
    if len(kinds := sorted(kinds - {ATTENTION})) > 1:
        raise UserError(
            f"--trained has the mixers {', '.join(kinds)}; name one with --mixer, or the layers of each with --layers"
        )
    return kinds[0] if kinds else DEFAULT_MIXER


def _layers_of_mixers(kinds: list[str]) -> str:
    """The layers of each mixer: "ska 1,3, mamba2 0,2"."""
    from hf_memmix.conversion.layer_choice import layer_text

    mixers = [kind for kind in dict.fromkeys(kinds) if kind != "attention"]
    return ", ".join(f"{mixer} {layer_text([i for i, kind in enumerate(kinds) if kind == mixer])}" for mixer in mixers)


def _all_options(arguments: dict, given: dict[str, dict], trained: list) -> dict[str, dict]:
    """The options by mixer: those of the plan, then those of the trained students, then the user's.

    Args:
        arguments: what `convert_model` gets for the layers.
        given: the user's options.
        trained: configurations of trained students; of several with the same mixer the first one counts.
    """
    used = set(arguments.get("layers") or [arguments.get("mixer")])
    options = {mixer: dict(own) for mixer, own in arguments.get("mixers", {}).items()}
    for config in reversed(trained):
        known = getattr(config, "mixers", None) or {}
        options |= {mixer: dict(own) for mixer, own in known.items() if mixer in used}
        if "window" not in used and any(known.get(mixer, {}).get("local_window") for mixer in used):
            options["window"] = known["window"] | {"window": None}  # beside memories, whose option is its size
    return options | {mixer: options.get(mixer, {}) | own for mixer, own in given.items()}
