"""The commands that make a student: `memmix convert` from a transformer, `memmix import-hmf` from a GKA release."""

import contextlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Column, Table

from hf_memmix.commands.checks import choice_of_layers, given_model, given_student, given_teacher, layers_of, library
from hf_memmix.commands.common import (
    Json,
    KeepCount,
    KeepLayers,
    Overwrite,
    err,
    out,
    print_json,
    quiet_library,
)
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.progress import progress
from hf_memmix.errors import UserError


@one_line_errors
def convert(
    teacher: Annotated[Path, typer.Option(help="The transformer to convert: a folder or a Hub id.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder to write the student to.")] = None,
    mixer: Annotated[
        str | None,
        typer.Option(help="Mixer that replaces the attention, e.g. gka; a wrong name lists all.", show_default="gka"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help='Layers of several mixers, e.g. "ska=3,7 attention=0 mamba2=rest", or "echo", the layout of Echo.'
        ),
    ] = None,
    keep_layers: KeepLayers = None,
    keep_count: KeepCount = None,
    keep_without_rope: Annotated[
        str | None,
        typer.Option(help='Kept layers that lose their rotary embeddings: "all" or, by index, "0-3,8".'),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan of memmix select, which names mixers and layers.")] = None,
    trained: Annotated[
        list[Path] | None,
        typer.Option(help="Take the mixers of this aligned student instead of new ones; repeatable."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the mixer, e.g. solver_phases=[21] or gka.solver_phases=[21]; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the parameters that are drawn at random.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what a conversion would do and cost: memory, bytes, time.")
    ] = False,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length of the dry run, in tokens; repeatable.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Replace the attention in layers of a transformer by recurrent mixers that start from its weights.

    The teacher is read and the student is written piece by piece: one decoder layer at a time is in memory.
    """
    from hf_memmix.conversion.saving import check_not_read, check_target, existing_folder

    if out_dir is None and not dry_run:
        raise UserError("give a folder for the student with --out, or ask for a --dry-run")
    if out_dir is not None:
        check_target(out_dir, overwrite)
        check_not_read(out_dir, plan)
    chosen = choice_of_layers(keep_layers, keep_count)
    _refuse_two_choices(mixer, layers, plan, chosen)
    plain, mixers = _parse_options(option or [])
    teacher, trained = given_teacher(teacher), [given_student(folder) for folder in trained or []]
    arguments, aligned = _choice(mixer, layers, chosen, plan, layers_of(teacher))
    if keep_without_rope is not None:
        arguments["keep_without_rope"] = _without_rope(keep_without_rope, arguments, layers_of(teacher))
    if trained:
        aligned = None
    options = _options_of_user(arguments, plain, mixers)
    with library():
        from hf_memmix.conversion.families import family_of
        from hf_memmix.conversion.loading import read_config

    family_of(read_config(teacher))  # refuse a family that cannot be converted before loading its weights
    arguments["mixers"] = _all_options(arguments, options, [read_config(folder) for folder in trained])
    if dry_run:
        with library():
            from hf_memmix.conversion.estimate import CONTEXTS, estimate, meta_teacher

        place = existing_folder((out_dir or Path(tempfile.gettempdir(), "student")).absolute().parent)
        lengths = tuple(context or CONTEXTS)
        result = estimate(meta_teacher(teacher), contexts=lengths, place=place, **arguments)
        print_json(result) if as_json else _print_estimate(result)
        return
    with library():
        from hf_memmix.conversion import convert_model
        from hf_memmix.conversion.convert import convert_to_folder
        from hf_memmix.conversion.mixer_files import load_aligned

    quiet_library()
    with progress("converting, in MiB:") as advance:
        student = convert_to_folder(
            teacher,
            out_dir,
            partial(convert_model, seed=seed, **arguments),
            seed=seed,
            overwrite=overwrite,
            trained=trained,
            fill=None if aligned is None else partial(load_aligned, folder=aligned),
            progress=lambda done, total: advance(done >> 20, total >> 20),
            notify=lambda line: err.print(line, markup=False, soft_wrap=True),
        )
    report = student.conversion_report
    if as_json:
        record = {"out": str(out_dir), "converted": report.converted, "kept": report.kept, "layers": report.layers}
        print_json(record | report.counts())
        return
    _print_kinds(report.kinds(), report.counts(), report.mixer is None)
    into = f" to {_layers_of_mixers(report.layers)}" if report.mixer is None else ""
    out.print(f"layers {report.converted} converted{into}, {report.kept or 'none'} kept; student written to {out_dir}")


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
    from hf_memmix.conversion.saving import check_not_read, check_target

    check_target(out_dir, overwrite)
    check_not_read(out_dir, folder)
    given_model(folder)
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
    from hf_memmix.conversion.records import bytes_text

    kinds = result["layers"]
    kept = [i for i, kind in enumerate(kinds) if kind == "attention"]
    _print_kinds(result["kinds"], result["counts"], result["mixer"] is None)
    become = _layers_of_mixers(kinds) if result["mixer"] is None else result["mixer"]
    out.print(
        f"{len(kinds)} layers: {len(kinds) - len(kept)} become {become}, attention stays in {kept or 'no layer'}"
    )
    options = result["options"] if result["mixer"] is None else {"": result["options"]}
    for mixer, own in options.items():
        text = ", ".join(f"{name}={value}" for name, value in own.items())
        out.print(f"{mixer}: {text}" if mixer else text, style="dim", highlight=False)
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


def _layers_of_mixers(kinds: list[str]) -> str:
    """The layers of each mixer: "ska 1,3, mamba2 0,2"."""
    from hf_memmix.conversion.layer_choice import layer_text

    mixers = [kind for kind in dict.fromkeys(kinds) if kind != "attention"]
    return ", ".join(f"{mixer} {layer_text([i for i, kind in enumerate(kinds) if kind == mixer])}" for mixer in mixers)


def _refuse_two_choices(mixer: str | None, layers: str | None, plan: Path | None, kept) -> None:
    """Raise ValueError if two options choose the mixers of the layers. `kept`: the choice of the --keep options."""
    if plan is not None and kept is not None:
        raise UserError(f"{kept.written}, but --plan also chooses the layers that stay attention; give one of them")
    if layers is not None and kept is not None:
        raise UserError(f'{kept.written}, but --layers also says which layers stay attention: write "attention=..."')
    if layers is not None and (mixer is not None or plan is not None):
        other = "--mixer" if plan is None else "--plan"
        raise UserError(f"--layers is {layers!r}, but {other} also chooses the mixers; give one of them")


def _choice(mixer: str | None, layers: str | None, chosen, plan: Path | None, num_layers: int) -> tuple:
    """What `convert_model` gets for the layers, and the folder of the aligned mixers of a plan or None."""
    from hf_memmix.conversion.layer_choice import layers_to_keep
    from hf_memmix.conversion.layer_plan import plan_arguments, read_plan, trained_folder
    from hf_memmix.conversion.mixer_layout import mixer_types_of
    from hf_memmix.mixer_names import check_mixer_name

    if mixer is not None:
        check_mixer_name(mixer)
    if plan is not None:
        planned = read_plan(plan, num_layers)
        arguments = plan_arguments(planned)
        if mixer not in (None, arguments.get("mixer")):
            raise UserError(f"--mixer is {mixer!r}, but --plan also chooses the mixers; give one of them")
        return arguments, trained_folder(planned, plan)
    if layers is not None:
        return {"layers": mixer_types_of(layers, num_layers, "--layers")}, None
    keep = "none" if chosen is None else chosen
    layers_to_keep(keep, num_layers)
    return {"mixer": "gka" if mixer is None else mixer, "keep": keep}, None


def _without_rope(choice: str, arguments: dict, num_layers: int) -> list[int]:
    """The layers of --keep-without-rope. `arguments`: what `convert_model` gets for the layers."""
    from hf_memmix.conversion.layer_choice import layers_to_keep, layers_without_rope
    from hf_memmix.mixer_names import ATTENTION

    if "layers" in arguments:
        kept = [layer for layer, kind in enumerate(arguments["layers"]) if kind == ATTENTION]
    else:
        kept = layers_to_keep(arguments["keep"], num_layers)
    return layers_without_rope(choice, kept, num_layers, "--keep-without-rope")


def _options_of_user(arguments: dict, plain: dict, mixers: dict[str, dict]) -> dict[str, dict]:
    """The user's options by mixer, each of which is checked: this needs torch and the mixers, not the whole library.

    Args:
        arguments: what `convert_model` gets for the layers.
        plain, mixers: the options, without and with the name of their mixer.

    Raises:
        UserError: no layer reads an option, it is given twice, it is unknown, or its value is out of its bounds.
    """
    from hf_memmix.conversion.mixer_layout import WINDOW, options_by_mixer
    from hf_memmix.mixer_names import ATTENTION

    if not (plain or mixers):
        return {}
    used = [kind for kind in dict.fromkeys(arguments.get("layers") or [arguments["mixer"]]) if kind != ATTENTION]
    for kind in used if len(used) == 1 else ():
        if twice := sorted(plain.keys() & mixers.get(kind, {}).keys()):
            raise UserError(f"--option gives {twice[0]} and {kind}.{twice[0]}, which are the same; give one of them")
    # a plan or a trained student may say that there are windows beside memories
    beside = {} if WINDOW in used else {kind: own for kind, own in mixers.items() if kind == WINDOW}
    options = options_by_mixer(used, {kind: own for kind, own in mixers.items() if kind not in beside}, plain) | beside
    with library(models=False):
        from hf_memmix.mixers import MIXERS

    for kind, own in options.items():
        try:
            MIXERS[kind].options_class.check_each(own)
        except UserError as error:
            raise UserError(f"mixers[{kind!r}]: {error}") from error
    return options


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
    return options | {mixer: options.get(mixer, {}) | own for mixer, own in given.items()}


def _parse_options(pairs: list[str]) -> tuple[dict, dict[str, dict]]:
    """The options NAME=VALUE, and by mixer those of the form MIXER.NAME=VALUE."""
    import yaml

    from hf_memmix.conversion.yaml_text import read_yaml

    plain, mixers = {}, {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        mixer, dot, own = name.rpartition(".")
        if (
            not (sign and own)
            or (dot and not mixer)
            or name in ("teacher", "mixer", "mixers", "keep", "layers", "seed")
        ):
            raise UserError(f"--option {pair!r} is not NAME=VALUE with an option of the mixer")
        try:
            value = read_yaml(text)
        except yaml.YAMLError:
            raise UserError(
                f"--option {pair!r}: {text!r} is not a value; give e.g. 21, 0.02, true, null or [12,10]"
            ) from None
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML reads 1e-3 as text
        place = mixers.setdefault(mixer, {}) if mixer else plain
        if own in place:
            raise UserError(f"--option gives {name} twice, as {place[own]!r} and as {value!r}; give it once")
        place[own] = value
    return plain, mixers
