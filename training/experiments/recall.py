"""Multi-query associative recall (`mqar.py`): which memory finds n values again?

    python training/experiments/recall.py --out training/results/recall.json

Two layers, a model for each cell (length, pairs) and learning rate, fresh sequences at every step. Reported is the
accuracy of the rate that had the highest, on sequences no training draws.
"""

import json
from pathlib import Path

import torch

from hf_memmix.training.experiments.fit import MODELS, add_sizes, answer, autocast, build, fit, recall_loss
from hf_memmix.training.experiments.harness import device, execute, parser_of
from hf_memmix.training.experiments.mqar import TEST_SEED, VOCAB, check_cell, draw_recall

TEST_BATCHES = 8


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


def plan(done: list[dict], args) -> list[dict]:
    cells = [{"length": length, "pairs": pairs} for length, pairs in args.cells]
    return [{"model": name, **cell, "lr": lr, "seed": 0} for cell in cells for lr in args.lrs for name in args.models]


def run(row: dict, args) -> dict:
    length, pairs, seed = row["length"], row["pairs"], row["seed"]
    model = build(args, *MODELS[row["model"]], vocab=VOCAB, context=length, seed=seed)
    batch = max(1, args.batch_tokens // length)
    steps = max(1, args.tokens // (batch * length))
    stream = generator(seed)
    result = fit(
        model, lambda _: recall_loss(model, draw_recall(batch, length, pairs, stream)), steps, row["lr"], args
    )
    result |= {"parameters": model.num_parameters(), "sequences": steps * batch}
    model.eval()
    right, test = [], generator(TEST_SEED + seed)
    with torch.no_grad(), autocast():
        for _ in range(TEST_BATCHES):
            recall = draw_recall(batch, length, pairs, test)
            right.append((answer(model, recall).argmax(-1) == recall.values).float().mean())
    return result | {"accuracy": torch.stack(right).mean().item()}


def main() -> None:
    parser = parser_of(__doc__)
    add_sizes(parser, hidden_size=64, layers=2, heads=2, batch_tokens=65536, tokens=100_000_000)
    parser.add_argument("--cells", type=json.loads, default=[[128, 8], [256, 32], [256, 64]], help="[[length, pairs]]")
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-3, 1e-2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args()
    for cell in args.cells:
        check_cell(*cell)
    results = execute(Path(__file__).stem, args, plan)
    if args.plot:
        from hf_memmix.training.experiments.plots import plot_recall

        plot_recall(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
