"""The commands that make a student: `memmix convert` from a transformer, `memmix import-hmf` from a GKA release."""

import contextlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from hf_memmix.commands.common import (
    Json,
    KeepCount,
    KeepLayers,
    OldKeep,
    Overwrite,
    choice_of_layers,
    err,
    out,
    print_json,
    quiet_library,
)
from hf_memmix.commands.errors import one_line_errors
from hf_memmix.commands.hub import model_folder
from hf_memmix.commands.progress import progress


@one_line_errors
def convert(
    teacher: Annotated[Path, typer.Option(help="The transformer to convert: a folder or a Hub id.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder to write the student to.")] = None,
    mixer: Annotated[str, typer.Option(help="Mixer that replaces the attention.")] = "gka",
    keep_layers: KeepLayers = None,
    keep_count: KeepCount = None,
    plan: Annotated[Path | None, typer.Option(help="A plan of memmix select, which names mixer and layers.")] = None,
    trained: Annotated[
        Path | None, typer.Option(help="Take the mixers of this aligned student instead of new ones.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the mixer, e.g. solver_phases=[21]; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the parameters that are drawn at random.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what a conversion would do and cost: memory, bytes, time.")
    ] = False,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length of the dry run, in tokens; repeatable.")
    ] = None,
    keep: OldKeep = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Replace the attention in layers of a transformer by a recurrent mixer that starts from its weights.

    The teacher is read and the student is written piece by piece: one decoder layer at a time is in memory.
    """
    from hf_memmix.conversion import convert_model
    from hf_memmix.conversion.convert import convert_to_folder
    from hf_memmix.conversion.estimate import CONTEXTS, estimate, meta_teacher
    from hf_memmix.conversion.families import family_of
    from hf_memmix.conversion.loading import read_config
    from hf_memmix.conversion.plan import read_plan
    from hf_memmix.conversion.saving import check_target, existing_folder
    from hf_memmix.mixers import MIXERS

    if out_dir is None and not dry_run:
        raise ValueError("give a folder for the student with --out, or ask for a --dry-run")
    if out_dir is not None:
        check_target(out_dir, overwrite)
    teacher, trained = model_folder(teacher), model_folder(trained)
    family_of(read_config(teacher))  # refuse a family that cannot be converted before loading its weights
    chosen = choice_of_layers(keep_layers, keep_count, keep, keep_counts=False)
    if plan is not None:
        if chosen is not None:
            raise ValueError(
                f"{chosen.written}, but --plan also chooses the layers that stay attention; give one of them"
            )
        planned = read_plan(plan, read_config(teacher).num_hidden_layers)
        mixer, chosen = planned["mixer"], planned["keep"]
    chosen = "none" if chosen is None else chosen
    options = _parse_options(option or [])
    if trained is not None:
        same = (getattr(read_config(trained), "mixers", None) or {}).get(mixer, {})
        options = {**same, **(MIXERS[mixer].options_class.upgrade(options) if mixer in MIXERS else options)}
    if dry_run:
        place = existing_folder((out_dir or Path(tempfile.gettempdir(), "student")).absolute().parent)
        lengths = tuple(context or CONTEXTS)
        result = estimate(meta_teacher(teacher), mixer, chosen, lengths, place=place, **options)
        print_json(result) if as_json else _print_estimate(result)
        return
    quiet_library()
    with progress("converting") as advance:
        student = convert_to_folder(
            teacher,
            out_dir,
            partial(convert_model, mixer=mixer, keep=chosen, seed=seed, **options),
            seed=seed,
            overwrite=overwrite,
            trained=[] if trained is None else [trained],
            progress=lambda done, total: advance(done >> 20, total >> 20, "MiB"),
            notify=lambda line: err.print(line, markup=False, soft_wrap=True),
        )
    report = student.conversion_report
    if as_json:
        print_json({"out": str(out_dir), "converted": report.converted, "kept": report.kept} | report.counts())
        return
    _print_kinds(report.kinds(), report.counts())
    out.print(f"layers {report.converted} converted, {report.kept} kept; student written to {out_dir}")


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
    from hf_memmix.conversion import hmf, save_student
    from hf_memmix.conversion.saving import check_target

    check_target(out_dir, overwrite)
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


def _print_kinds(kinds: list[dict], counts: dict[str, int]) -> None:
    """One row per kind of tensor, then the number of tensors per fate. The common prefix of all names stands above."""
    prefix = os.path.commonprefix([row["source"] or row["targets"][0] for row in kinds]).rpartition(".")[0] + "."
    table = Table(*(Column(name, overflow="fold") for name in ("tensor", "fate", "goes to", "layers", "why")))
    for row in kinds:
        source, targets = (names.replace(prefix, "") for names in (row["source"], ", ".join(row["targets"])))
        table.add_row(source, row["fate"], targets, str(len(row["layers"])), row["reason"])
    table.add_row("all others", "copied", "the same name", "", "bit-equal to the teacher's")
    out.print(f"in {prefix.rstrip('.')}:", highlight=False)
    out.print(table)
    out.print(", ".join(f"{count} {fate}" for fate, count in counts.items()), highlight=False)


def _print_estimate(result: dict) -> None:
    from hf_memmix.conversion.records import bytes_text

    kinds = result["layers"]
    kept = [i for i, kind in enumerate(kinds) if kind == "attention"]
    _print_kinds(result["kinds"], result["counts"])
    out.print(f"{len(kinds)} layers: {len(kinds) - len(kept)} become {result['mixer']}, attention stays in {kept}")
    out.print(", ".join(f"{name}={value}" for name, value in result["options"].items()), style="dim", highlight=False)
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


def _parse_options(pairs: list[str]) -> dict:
    import yaml

    options = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or name in ("teacher", "mixer", "keep", "seed"):
            raise ValueError(f"--option {pair!r} is not NAME=VALUE with an option of the mixer")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(
                f"--option {pair!r}: {text!r} is not a value; give e.g. 21, 0.02, true, null or [12,10]"
            ) from None
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML reads 1e-3 as text
        options[name] = value
    return options
