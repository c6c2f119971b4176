"""Echo's grid of multi-query recall: n pairs, a gap of noise, then all n questions; a model for each cell.

    python training/experiments/echo_mqar.py --workers 6 --out training/results/echo_mqar.json --plot

The paper trains models of 50M parameters with gaps of 64 to 4,096 tokens: SKA answers everything everywhere, attention
everything but for one cell, Mamba-2 nothing above chance. These are the models of `echo_suite.py`. Accuracy is that of
the learning rate with the lowest loss on dev sequences.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from hf_memmix.training.experiments import echo_suite as suite
from hf_memmix.training.experiments.echo_tasks import TASKS, Examples, draw_examples
from hf_memmix.training.experiments.harness import execute, parser_of


def tokens(pairs: int, gap: int) -> int:
    """Length of a sequence of a cell."""
    return TASKS["mqar"][1](pairs) + gap


def batches(row: dict, args) -> Iterator[Examples]:
    length, generator = tokens(row["pairs"], row["gap"]), suite.stream(row["seed"])
    batch = max(1, min(args.batch, args.batch_tokens // length))
    while True:
        drawn = draw_examples("mqar", batch * suite.AHEAD, length, row["pairs"], generator, gap=row["gap"])
        yield from (drawn[i * batch : (i + 1) * batch] for i in range(suite.AHEAD))


def plan(done: list[dict], args) -> list[dict]:
    cells = [{"pairs": pairs, "gap": gap} for pairs, gap in args.cells]
    return [{"model": name, **cell, "lr": lr, "seed": 0} for lr in args.lrs for cell in cells for name in args.models]


def run(row: dict, args) -> dict:
    pairs, gap = row["pairs"], row["gap"]
    model, masked = suite.build(row["model"], row["seed"]), row["model"] == "ska"
    result = suite.learn(model, batches(row, args), masked, row, args, enough=args.enough)
    result |= {"parameters": model.num_parameters()}
    if not result["finite"]:
        return result
    cell = {"length": tokens(pairs, gap), "pairs": pairs, "gap": gap, "sequences": args.sequences, "masked": masked}
    dev, test = (suite.measure(model, "mqar", seed=s, **cell) for s in (suite.DEV_SEED, suite.TEST_SEED))
    return result | {"dev_loss": dev["loss"], "accuracy": test["accuracy"]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="at most; a cell whose loss is small ends before")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, at most")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens of a step, at most")
    parser.add_argument("--enough", type=float, default=0.002, help="the loss at which training ends")
    parser.add_argument("--sequences", type=int, default=128, help="measured, at least")
    cells = [[pairs, gap] for gap in (64, 512, 4096) for pairs in (4, 16, 64)]
    parser.add_argument("--cells", type=json.loads, default=cells, help="[[pairs, gap]]")
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-3, 1e-3])
    parser.add_argument("--models", nargs="+", choices=list(suite.MODELS), default=list(suite.MODELS))
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan)
    if args.plot:
        from hf_memmix.training.experiments.echo_plots import plot_grid

        plot_grid(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
