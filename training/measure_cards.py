"""Measure the models of the cards anew on the bundled texts, by the functions of the scripts that made the models.

    python training/measure_cards.py --sources .scratch/teacher/sources.json
    python training/measure_cards.py --folder tiny_gka/metrics_pure=out/tiny_gka_pure

Rewrites what `model_cards/*/metrics*.json` say of the held-out and the development text and of the shipped files;
nothing of how the models were made. A variant that is not bundled is measured where `--folder` says it lies, else left
as it is. `python model_cards/build.py` then writes the cards of the students.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.mixers import MIXERS
from hf_memmix.training import make_tiny_gka, pretrain_teacher
from hf_memmix.training.data import text_record

CARDS = Path(__file__).resolve().parents[1] / "model_cards"
SHIPPED = ("dev.txt", "heldout.txt", "train.txt", "tiny_teacher/model.safetensors", "tiny_teacher/tokenizer.json")


def measure_teacher(record: dict) -> None:
    """Renew the teacher's held-out figures and the sums of the shipped files in its record, in place."""
    folder, heldout = asset_path("tiny_teacher"), asset_path("heldout.txt")
    record["heldout"] = pretrain_teacher.measure_export(folder, heldout, record["arguments"]["context"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    record["tokens"]["heldout"] = len(pretrain_teacher.encode(tokenizer, pretrain_teacher.read_text(heldout)))
    sums = {name: text_record(asset_path(name)) for name in SHIPPED}
    record["assets"] = {name: {key: row[key] for key in ("bytes", "sha256")} for name, row in sums.items()}


def measure_student(metrics: dict, folder: Path) -> None:
    """Renew the figures of the student in `folder` on both texts, in place; its untrained form is converted anew.

    Raises:
        ValueError: a conversion of today has other mixer options than the student.
    """
    source, arguments = asset_path("tiny_teacher"), metrics["arguments"]
    block_size = int(arguments["block_size"])
    metrics["heldout"] = make_tiny_gka.measure_export(folder, source, asset_path("heldout.txt"), block_size)
    teacher, tokenizer = load_model(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)
    (mixer,) = metrics["mixer_options"]
    untrained = convert_model(teacher, mixer, "none", seed=int(arguments["seed"]))
    options = json.loads(json.dumps(untrained.config.mixers))
    # figures of older versions have older names
    if options[mixer] != MIXERS[mixer].options_class.from_dict(metrics["mixer_options"][mixer]).to_dict():
        raise ValueError(f"{folder} was converted with {metrics['mixer_options']}, today's options are {options}")
    metrics["untrained"] = make_tiny_gka.measure(
        untrained, teacher, tokenizer, asset_path("dev.txt"), block_size, make_tiny_gka.DEV_TOKENS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sources", type=Path, help="sources.json of training/fetch_text.py, for the teacher's record"
    )
    parser.add_argument("--folder", nargs="*", default=[], help="CARD/NAME=FOLDER: where that student lies")
    args = parser.parse_args()

    path = CARDS / "tiny_teacher" / "metrics.json"
    record = json.loads(path.read_text())
    measure_teacher(record)
    if args.sources:
        record["text"] = json.loads(args.sources.read_text())
    path.write_text(json.dumps(record, indent=1) + "\n")
    print("tiny_teacher", json.dumps(record["heldout"]), flush=True)

    elsewhere = {name: Path(folder) for name, folder in (pair.split("=", 1) for pair in args.folder)}
    for path in sorted(CARDS.glob("*/metrics*.json")):
        name = f"{path.parent.name}/{path.stem}"
        metrics = json.loads(path.read_text())
        if "mixer_options" not in metrics or (path.stem != "metrics" and name not in elsewhere):
            continue
        measure_student(metrics, elsewhere.get(name) or asset_path(path.parent.name))
        path.write_text(json.dumps(metrics, indent=1) + "\n")
        print(name, json.dumps(metrics["heldout"]), flush=True)


if __name__ == "__main__":
    main()
