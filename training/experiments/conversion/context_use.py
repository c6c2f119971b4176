"""How much of its context does the bundled transformer use? Measures its perplexity with the context cut.

    python training/experiments/conversion/context_use.py \\
        --out training/experiments/conversion/results/context_use.json

Each token is predicted from the last `context` tokens before it alone. The positions are spread evenly over the
held-out text and are the same for all contexts, so the ratios compare the same predictions. If a short context costs
little, a student with little memory can reach the teacher's perplexity, and perplexity says little about recall.
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.conversion import load_model
from hf_memmix.conversion.records import environment, markdown_table, write_json
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.experiments.common.harness import device, measured_at
from hf_memmix.training.experiments.common.options import Out
from hf_memmix.training.text_files import text_record

CONTEXTS = (16, 32, 64, 128, 256, 512)
BUNDLED = asset_path("tiny_teacher")


@torch.no_grad()
def losses_after(model, tokens: torch.Tensor, positions: torch.Tensor, context: int, batch: int) -> torch.Tensor:
    """The loss [N] of the token at each of the positions [N] after the `context` tokens before it, in nats."""
    found = []
    for at in positions.split(batch):
        windows = tokens[at[:, None] - context + torch.arange(context)].to(model.device)
        logits = model(input_ids=windows, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        found.append(F.cross_entropy(logits, tokens[at].to(model.device), reduction="none").cpu())
    return torch.cat(found)


def measure(model, tokens: torch.Tensor, contexts, count: int, batch: int = 16) -> list[dict]:
    """One row per context: the mean loss, and the perplexity divided by that after the longest context.

    "error" is the standard error of the mean difference of the losses, which are paired.

    Raises:
        ValueError: the text is too short for `count` positions after the longest context.
    """
    longest = max(contexts)
    if len(tokens) - longest < count:
        raise ValueError(
            f"{len(tokens)} tokens have no {count} positions after a context of {longest}; give a longer text"
        )
    positions = torch.linspace(longest, len(tokens) - 1, count).long()
    losses = {context: losses_after(model, tokens, positions, context, batch) for context in contexts}
    rows = []
    for context, values in losses.items():
        above = values - losses[longest]
        rows.append(
            {
                "context": context,
                "loss": values.mean().item(),
                "ratio": math.exp(above.mean().item()),
                "error": above.std().item() / math.sqrt(count),
            }
        )
    return rows


def section(results: dict) -> str:
    """The table of ratios, with the number of positions and the hardware."""
    rows = [
        (row["context"], f"{math.exp(row['loss']):.2f}", f"{row['ratio']:.3f}", f"{100 * row['error']:.1f} %")
        for row in results["rows"]
    ]
    longest = max(row["context"] for row in results["rows"])
    head = ("tokens of context", "perplexity", f"ratio to {longest}", "standard error")
    return (
        f"{markdown_table(head, rows, figures=True)}\n\n{results['settings']['positions']} positions of the held-out"
        f" text, the same for all lines; {measured_at(results)}."
    )


def main(
    out: Out,
    positions: Annotated[int, typer.Option(help="number of tokens whose loss is measured")] = 1200,
    contexts: Annotated[list[int], typer.Option(help="tokens before each of them; repeatable")] = CONTEXTS,
    teacher: Annotated[Path, typer.Option(help="folder of the transformer")] = BUNDLED,
) -> None:
    """Measure the bundled transformer, or another one, and write the results."""
    model = load_model(teacher, dtype=torch.float32).to(device()).eval()
    tokens = tokenize_files(asset_path("heldout.txt"), AutoTokenizer.from_pretrained(teacher))
    settings = {"positions": positions, "contexts": list(contexts)}
    experiment = "context_use" if teacher == BUNDLED else "context_use_of_another"
    results = {"experiment": experiment, "environment": environment(device()), "settings": settings}
    results["teacher"] = text_record(teacher / "model.safetensors")
    results |= {"text": text_record(asset_path("heldout.txt")), "rows": measure(model, tokens, contexts, positions)}
    write_json(out, results)
    print(section(results))


if __name__ == "__main__":
    typer.run(main)
