"""Multi-query associative recall (`mqar.py`): which memory finds n values again?

    python training/experiments/recall.py --out training/results/recall.json

Two layers, a model for each cell (length, pairs) and learning rate (`fit.rates`), fresh sequences at every step, until
the loss is below 0.01 or all tokens are used up. The rate is chosen by the loss on sequences of its own; reported is
the accuracy on others, and that of a second seed at this rate.
"""

import functools
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from hf_memmix.training.experiments.fit import MODELS, add_sizes, answer, autocast, build, fit, rates, recall_loss
from hf_memmix.training.experiments.harness import device, execute, parser_of
from hf_memmix.training.experiments.mqar import DEV_SEED, TEST_SEED, VOCAB, check_cell, draw_recall

TEST_BATCHES = 8
SOLVED = 0.01
CELLS = [[256, 32], [256, 64], [512, 128]]
SEEDS = (0, 1)
COMPARED = ("dec", "enc", "sim", "gka", "linear", "delta")


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


def plan(done: list[dict], args) -> list[dict]:
    rows, seconds = [], []
    for length, pairs in args.cells:
        tries = []
        for name in args.models:
            of = {"model": name, "length": length, "pairs": pairs}
            lrs, chosen = rates(done, args.lrs, **of, seed=0)
            tries += [(lrs.index(lr), {**of, "lr": lr, "seed": 0}) for lr in lrs]
            seconds += [{**of, "lr": chosen, "seed": seed} for seed in SEEDS if chosen is not None]
        rows += [row for _, row in sorted(tries, key=lambda pair: pair[0])]
    return rows + seconds


@torch.no_grad()
def measure(model, batch: int, length: int, pairs: int, seed: int) -> tuple[float, float]:
    """Loss and accuracy on sequences of a seed of their own."""
    draws, found = generator(seed), []
    with autocast():
        for _ in range(TEST_BATCHES):
            recall = draw_recall(batch, length, pairs, draws)
            logits = answer(model, recall.ids, recall.positions)
            loss = F.cross_entropy(logits.flatten(0, 1), recall.values.flatten())
            found.append(torch.stack([loss, (logits.argmax(-1) == recall.values).float().mean()]))
    loss, accuracy = torch.stack(found).mean(0).tolist()
    return loss, accuracy


def run(row: dict, args) -> dict:
    length, pairs, seed = row["length"], row["pairs"], row["seed"]
    model = build(args, *MODELS[row["model"]], vocab=VOCAB, context=length, seed=seed)
    batch = max(1, args.batch_tokens // length)
    steps = max(1, args.tokens // (batch * length))
    stream = generator(seed)

    def batch_of(step):
        recall = draw_recall(batch, length, pairs, stream)
        return recall.ids, recall.positions, recall.values

    loss_of = functools.partial(recall_loss, model)
    result = fit(model, loss_of, steps, row["lr"], args, batch_of, enough=SOLVED)
    result |= {"parameters": model.num_parameters(), "sequences": result["steps"] * batch}
    if not result["finite"]:
        return result
    model.eval()
    dev, test = (measure(model, batch, length, pairs, start + seed) for start in (DEV_SEED, TEST_SEED))
    return result | {"dev_loss": dev[0], "accuracy": test[1]}


def main() -> None:
    parser = parser_of(__doc__)
    add_sizes(parser, hidden_size=64, layers=2, heads=2, batch_tokens=32768, tokens=100_000_000)
    parser.add_argument("--cells", type=json.loads, default=CELLS, help="[[length, pairs]]")
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-3, 1e-2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(COMPARED))
    args = parser.parse_args()
    for cell in args.cells:
        check_cell(*cell)
    results = execute(Path(__file__).stem, args, plan, chance_loss=math.log(VOCAB // 2))
    if args.plot:
        from hf_memmix.training.experiments.plots import plot_recall

        plot_recall(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
