"""Measure a teacher of the bundled shape on the held-out text: perplexity, and recall by length.

    python measure_teacher.py --out teacher.json
    python measure_teacher.py --teacher .scratch/teacher/model --out candidate.json

Without `--teacher` it measures the bundled one. The result names the weights by their sha256. `--card` also renews the
held-out figures and the sums of the shipped files in `model_cards/tiny_teacher/metrics.json`.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import CHECKOUT, environment, write_json
from hf_memmix.training.experiments.bundled.pretrain_teacher import measure_export
from hf_memmix.training.experiments.bundled.recall import measure_recall
from hf_memmix.training.text_files import read_text, text_record

CARD = CHECKOUT / "model_cards" / "tiny_teacher" / "metrics.json"
SHIPPED = ("dev.txt", "heldout.txt", "train.txt", "tiny_teacher/model.safetensors", "tiny_teacher/tokenizer.json")
BUNDLED, HELDOUT_TEXT = asset_path("tiny_teacher"), asset_path("heldout.txt")


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the figures")],
    teacher: Annotated[Path, typer.Option(help="folder of the teacher")] = BUNDLED,
    heldout: Annotated[Path, typer.Option(help="text that no model was trained on")] = HELDOUT_TEXT,
    samples: Annotated[int, typer.Option(help="probes per length and depth")] = 16,
    card: Annotated[bool, typer.Option("--card", help="also renew the figures of the bundled teacher's card")] = False,
) -> None:
    """Measure the teacher and write its figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(teacher, torch.float32).to(device)
    context = model.config.max_position_embeddings
    results = {"teacher": text_record(teacher / "model.safetensors"), "environment": environment(device)}
    results |= {"samples": samples, "heldout": measure_export(teacher, heldout, context, device)}
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    results["recall"] = measure_recall({"teacher": model}, tokenizer, read_text(heldout), context, samples)
    write_json(out, results)
    print(json.dumps(results["heldout"]))
    if card:
        record = json.loads(CARD.read_text()) | {"heldout": measure_export(BUNDLED, HELDOUT_TEXT, context)}
        sums = {name: text_record(asset_path(name)) for name in SHIPPED}
        record["assets"] = {name: {key: row[key] for key in ("bytes", "sha256")} for name, row in sums.items()}
        write_json(CARD, record)


if __name__ == "__main__":
    typer.run(main)
