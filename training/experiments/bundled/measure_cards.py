"""Measure the models of the cards again on the bundled texts, with the functions of the scripts that made them.

    python -m hf_memmix.training.experiments.bundled.measure_cards --sources .scratch/teacher/sources.json
    python -m hf_memmix.training.experiments.bundled.measure_cards --folder tiny_gka/metrics_pure=out/tiny_gka_pure

Writes the figures on the held-out and the development text, and the hashes of the bundled files, into
`model_cards/*/metrics*.json`. The records of how the models were made do not change. A model that is not bundled is
measured only if `--folder` gives its folder. Afterwards, `python model_cards/build.py` writes the students' cards.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.conversion.records import CHECKOUT, write_json
from hf_memmix.mixers import MIXERS
from hf_memmix.training.experiments.bundled import make_tiny_gka, pretrain_teacher
from hf_memmix.training.text_files import text_record

CARD_FOLDER = CHECKOUT / "model_cards"
SHIPPED = ("dev.txt", "heldout.txt", "train.txt", "tiny_teacher/model.safetensors", "tiny_teacher/tokenizer.json")


def measure_teacher(record: dict) -> None:
    """Renew the teacher's held-out figures and the sums of the shipped files in its record, in place."""
    folder, heldout = asset_path("tiny_teacher"), asset_path("heldout.txt")
    record["heldout"] = pretrain_teacher.measure_export(folder, heldout, record["arguments"]["context"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    record["tokens"]["heldout"] = len(pretrain_teacher.encode(tokenizer, pretrain_teacher.read_documents(heldout)))
    sums = {name: text_record(asset_path(name)) for name in SHIPPED}
    record["assets"] = {name: {key: row[key] for key in ("bytes", "sha256")} for name, row in sums.items()}


def measure_student(metrics: dict, folder: Path) -> None:
    """Update the figures of the student in `folder` on both texts, in place, and those of a new, untrained student.

    Raises:
        ValueError: the mixer options of a new conversion differ from the student's.
    """
    source, arguments = asset_path("tiny_teacher"), metrics["arguments"]
    block_size = int(arguments["block_size"])
    metrics["heldout"] = make_tiny_gka.measure_export(folder, source, asset_path("heldout.txt"), block_size)
    teacher, tokenizer = load_model(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)
    (mixer,) = metrics["mixer_options"]
    untrained = convert_model(teacher, mixer, "none", seed=int(arguments["seed"]))
    options = json.loads(json.dumps(untrained.config.mixers))
    # older records have old names of options
    if options[mixer] != MIXERS[mixer].options_class.from_dict(metrics["mixer_options"][mixer]).to_dict():
        raise ValueError(f"{folder} was converted with {metrics['mixer_options']}, today's options are {options}")
    metrics["untrained"] = make_tiny_gka.measure(
        untrained, teacher, tokenizer, asset_path("dev.txt"), block_size, make_tiny_gka.DEV_TOKENS
    )


def main(
    sources: Annotated[Path | None, typer.Option(help="sources.json of fetch_text, for the teacher's record")] = None,
    folder: Annotated[list[str], typer.Option(help="CARD/NAME=FOLDER: where that student lies; repeatable")] = (),
) -> None:
    """Measure the teacher and every student, and rewrite their metrics."""
    path = CARD_FOLDER / "tiny_teacher" / "metrics.json"
    record = json.loads(path.read_text())
    measure_teacher(record)
    if sources:
        record["text"] = json.loads(sources.read_text())
    write_json(path, record)
    print("tiny_teacher", json.dumps(record["heldout"]), flush=True)

    elsewhere = {name: Path(place) for name, place in (pair.split("=", 1) for pair in folder)}
    for path in sorted(CARD_FOLDER.glob("*/metrics*.json")):
        name = f"{path.parent.name}/{path.stem}"
        metrics = json.loads(path.read_text())
        if "mixer_options" not in metrics or (path.stem != "metrics" and name not in elsewhere):
            continue
        measure_student(metrics, elsewhere.get(name) or asset_path(path.parent.name))
        write_json(path, metrics)
        print(name, json.dumps(metrics["heldout"]), flush=True)


if __name__ == "__main__":
    typer.run(main)
