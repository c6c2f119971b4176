"""The COFFEE paper's smallest model, IH0: it has two states, so its path can be drawn in a plane (Section 6, Figure
2).

    python -m hf_memmix.training.experiments.coffee.ih0 OUT.json

A sequence has four symbols of {1, 2, 3}. The trigger 1 occurs twice, the second time at the end, so there are eight
sequences; all of them are trained on. lambda = 0 and C = w = 1, so the output is the state. Only the embeddings, six
parameters, are learned.
"""

import time
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from hf_memmix.conversion.records import environment, write_json
from hf_memmix.models.coffee_core import CoffeeCore

START = ((6.0, 6.0), (-10.0, -1.0), (-1.0, -10.0))
# the paper's learned embeddings, and the last states in its Figure 2 by sequence
PAPER = {
    "embeddings": ((5.394, 5.343), (-10.264, -1.575), (-1.539, -10.340)),
    "last_states": {"1231": (-6.92, -6.73), "3121": (-6.41, -5.11)},
}
LEARNING_RATE = 0.01
STEPS = 60  # with more steps the loss still falls and the embeddings still grow; the paper stopped early as well


def sequences() -> tuple[Tensor, Tensor]:
    """All eight sequences [8, 4] of tokens 0 to 2 (the paper's symbols less one) and their targets [8]."""
    pairs = [(target, noise) for target in (1, 2) for noise in (1, 2)]
    rows = [(0, t, n, 0) for t, n in pairs] + [(n, 0, t, 0) for t, n in pairs]
    return torch.tensor(rows), torch.tensor([t for t, _ in pairs] * 2)


def model_with(embeddings) -> CoffeeCore:
    """The model with these embeddings; only its embeddings can be learned."""
    model = CoffeeCore(symbols=3, dim=2, states=1)
    with torch.no_grad():
        model.embedding.copy_(torch.tensor(embeddings)[None])
        model.w.fill_(1)
        model.C.fill_(1)
    for parameter in (model.lam, model.w, model.C):
        parameter.requires_grad_(False)
    return model


@torch.no_grad()
def describe(model: CoffeeCore) -> dict:
    """Embeddings, number of right answers, loss, and the states after every symbol of each sequence."""
    ids, targets = sequences()
    logits, states = model(ids, last=1)[:, 0], model.outputs(ids[None])[0]
    return {
        "embeddings": model.embedding[0].tolist(),
        "right": int((logits.argmax(-1) == targets).sum()),
        "of": len(targets),
        "loss": F.cross_entropy(logits, targets).item(),
        "states": {
            "".join(str(i + 1) for i in row): path for row, path in zip(ids.tolist(), states.tolist(), strict=True)
        },
    }


def learn(embeddings=START, steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> CoffeeCore:
    """Train the model with Adam; every step uses all eight sequences."""
    model, (ids, targets) = model_with(embeddings), sequences()
    optimizer = torch.optim.Adam([model.embedding], lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(ids, last=1)[:, 0], targets).backward()
        optimizer.step()
    return model


def main(out: Annotated[Path, typer.Argument(help="the JSON file to write")]) -> None:
    """Train the model and write its description before training, after training, and with the paper's embeddings."""
    start = time.perf_counter()
    report = {
        "environment": environment("cpu"),
        "steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "start": describe(model_with(START)),
        "learned": describe(learn()),
        "with_the_papers_embeddings": describe(model_with(PAPER["embeddings"])),
        "paper": PAPER,
    }
    report["seconds"] = round(time.perf_counter() - start, 1)
    write_json(out, report, indent=None)


if __name__ == "__main__":
    typer.run(main)
