"""`memmix eval`: probes of recall, a teacher beside its student, as JSON and heat maps."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_memmix.shell import Device, Json, Overwrite, bar, friendly, load, out, print_json, tokenizer_of

Seed = Annotated[int, typer.Option(help="Seed of what is drawn.")]
Text = Annotated[Path | None, typer.Option(help="Text that fillers and words come from; default: a bundled one.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences at a time.")]


@friendly
def evaluate(
    model: Annotated[Path, typer.Argument(help="Model folder, converted or not.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for probes.json and the plots.")],
    teacher: Annotated[Path | None, typer.Option(help="Folder of a model to measure beside it.")] = None,
    tasks: Annotated[str, typer.Option(help='Names with commas between, or "all".')] = "all",
    lengths: Annotated[str, typer.Option(help="Tokens of a sequence, with commas between.")] = "128,256,512,1024",
    depths: Annotated[str, typer.Option(help="Where answers stand, 0 to 1.")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(min=1, help="Sequences for each length and depth.")] = 16,
    text: Text = None,
    seed: Seed = 0,
    batch_size: BatchSize = 8,
    device: Device = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Measure what a model recalls: needles, dictionaries, variables, MQAR, common words, second mentions."""
    from hf_memmix.assets import asset_path
    from hf_memmix.conversion.saving import atomic_folder, check_target
    from hf_memmix.training.documents import read_text, text_record
    from hf_memmix.training.probes import TASKS, Material, plot_probes, run_probes

    check_target(out_dir, overwrite)
    chosen = tuple(TASKS) if tasks == "all" else tuple(part.strip() for part in tasks.split(","))
    grid = {"lengths": _numbers("--lengths", lengths, int), "depths": _numbers("--depths", depths, float)}
    text = asset_path("heldout.txt") if text is None else text
    tokenizer = tokenizer_of(model)
    folders = {"student": model} if teacher is None else {"teacher": teacher, "student": model}
    if teacher is not None:
        _check_tokenizers(tokenizer, tokenizer_of(teacher, required=False), teacher)
    material = Material(tokenizer, read_text(text))
    models = {role: load(folder, device) for role, folder in folders.items()}
    with bar("probing") as advance:
        results = run_probes(
            models, material, tasks=chosen, samples=samples, seed=seed, batch_size=batch_size, progress=advance, **grid
        )
    record = {"models": {role: _described(folder, models[role]) for role, folder in folders.items()}}
    results = record | {"text": text_record(text), "environment": _environment(models)} | results
    with atomic_folder(out_dir, overwrite) as folder:
        (folder / "probes.json").write_text(json.dumps(results, indent=1) + "\n")
        plot_probes(results, folder / "probes.png")
        plot_probes(results, folder / "probes_gain.png", "gain")
    if as_json:
        print_json(results | {"out": str(out_dir)})
        return
    table = Table("task", "chance", *(f"{role}, {name}" for name in ("choice or exact", "gain") for role in folders))
    for row in results["summary"]:
        scored = [row[role] for role in folders]
        shares = ["-" if s is None else f"{s['exact'] if s['choice'] is None else s['choice']:.1%}" for s in scored]
        gains = ["-" if s is None else f"{s['gain']:.2f} ± {s['gain_error']:.2f}" for s in scored]
        table.add_row(row["task"], "" if row["chance"] is None else f"{row['chance']:.1%}", *shares, *gains)
    out.print(table)
    out.print(f"gain: nats an answer token owes to what the context says of it; written to {out_dir}")


def _numbers(option: str, text: str, kind) -> tuple:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} is {text!r}; give numbers with commas between") from None
    if kind is int and min(values) < 1:
        raise ValueError(f"{option} is {text!r}; lengths are at least 1")
    return values


def _check_tokenizers(ours, theirs, teacher: Path) -> None:
    if theirs is not None and theirs.get_vocab() != ours.get_vocab():
        raise ValueError(f"{teacher} has another vocabulary than the model, so both cannot read the same tokens")


def _described(folder: Path, model) -> dict:
    kinds = getattr(model.config, "mixer_types", None)
    described = {"folder": folder.name, "parameters": model.num_parameters(), "dtype": str(model.dtype).split(".")[-1]}
    return described | ({} if kinds is None else {"mixer_types": list(kinds)})


def _environment(models: dict) -> dict:
    import torch
    import transformers

    device = next(iter(models.values())).device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    return {"hardware": hardware, "torch": torch.__version__, "transformers": transformers.__version__}
