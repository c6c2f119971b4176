"""Write the card of a converted model from its measurements.

python model_cards/build.py            # every folder with a metrics.json of make_tiny_gka.py
python model_cards/build.py --check    # exit code 1 if a committed card says anything else
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_memmix.conversion.records import markdown_table

CARDS = Path(__file__).parent
VARIANTS = {"metrics": "bundled", "metrics_pure": "pure"}
PROBES = {"niah": "needle", "mqar": "MQAR, full"}


def card(folder: Path) -> str:
    """The card's text; raises KeyError if the measurements lack a figure that it names."""
    runs = {VARIANTS[p.stem]: json.loads(p.read_text()) for p in sorted(folder.glob("metrics*.json"))}
    main = runs["bundled"]
    heldout, kept = main["heldout"], main["keep"]
    layers = len(heldout["layer_error"]) + len(kept)
    data = ModelCardData(
        license="apache-2.0",
        language=["en"],
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model="tiny_teacher",
        base_model_relation="finetune",
        tags=["hf_memmix", *main["mixer_options"], "linear-attention", "distillation", "tiny"],
        model_name=folder.name,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="text",
                dataset_name="heldout.txt of hf_memmix (chapters of public-domain English prose)",
                metric_type="perplexity",
                metric_value=round(heldout["student_ppl"], 2),
            )
        ],
    )
    evaluation = [["teacher", f"{layers} of {layers}", f"{heldout['teacher_ppl']:.2f}", "1", "", ""]]
    for name, run in runs.items():
        result = run["heldout"]
        evaluation.append(
            [name, f"{layers - len(result['layer_error'])} of {layers}", f"{result['student_ppl']:.2f}"]
            + [f"{result['ppl_ratio']:.4f}", f"{result['top1_agreement']:.1%}", f"{result['kl']:.4f}"]
        )
    training = [
        [name, stage["stage"], stage["steps"], f"{stage['tokens']:,}", f"{stage['last_loss']:.4f}"]
        + [f"{stage['seconds']:.0f} s"]
        for name, run in runs.items()
        for stage in run["stages"]
    ]
    lengths = sorted({row["length"] for row in main["recall"]["words"]})
    recall = [
        [task, name, *(f"{100 * row[who]:.1f}" for row in run["recall"]["words"] if row["task"] == key)]
        for key, task in PROBES.items()
        for name, run, who in (("teacher", main, "teacher"), *((name, run, "student") for name, run in runs.items()))
    ]
    content = ModelCard.from_template(
        data,
        template_path=str(CARDS / "template.md"),
        name=folder.name,
        converted=len(heldout["layer_error"]),
        layers=layers,
        kept=f" Layer {', '.join(map(str, kept))} keeps its attention and a growing cache." if kept else "",
        tokens=f"{heldout['tokens']:,}",
        block_size=main["arguments"]["block_size"],
        arithmetic=heldout["arithmetic"],
        measured_on={"cpu": "CPU", "cuda": "GPU"}[heldout["device"]],
        untrained=f"{main['untrained']['ppl_ratio']:.2f}",
        evaluation=markdown_table(
            ["model", "attention layers", "perplexity", "ratio", "same token", "KL"], evaluation
        ),
        training=markdown_table(["model", "stage", "steps", "tokens", "last loss", "time"], training),
        needle_error=f"{50 / min(row['answers'] for row in main['recall']['words']) ** 0.5:.0f}",
        recall=markdown_table(["probe", "model", *(f"{length} tokens" for length in lengths)], recall),
        layer_kl=", ".join(map(str, main["layer_kl"])),
        **{key: main[key] for key in ("device", "torch", "transformers")},
    ).content
    return content.rstrip() + "\n"


def main(check: Annotated[bool, typer.Option(help="change nothing; exit code 1 if a card is out of date")] = False):
    """Write the card of every student that has measurements."""
    stale = []
    for metrics in sorted(CARDS.glob("*/metrics.json")):
        target = metrics.parent / "README.md"
        if "mixer_options" not in json.loads(metrics.read_text()):
            continue  # a model that no conversion made: its card is written by hand
        if not check:
            target.write_text(card(metrics.parent))
        elif not target.exists() or target.read_text() != card(metrics.parent):
            stale.append(str(target))
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python model_cards/build.py")


if __name__ == "__main__":
    typer.run(main)
