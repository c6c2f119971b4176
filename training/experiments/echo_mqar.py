"""Echo's grid of multi-query recall: n pairs, a gap of noise, then all n questions; a model for each cell.

    python training/experiments/echo_mqar.py --workers 6 --out training/results/echo_mqar.json --plot

The paper trains models of 50M parameters with gaps of 64 to 4,096 tokens: SKA answers everything everywhere, attention
everything but for one cell, Mamba-2 nothing above chance. These are the models of `echo_suite.py`, whose keys have 24
dimensions, in fewer cells. Accuracy is that of the learning rate with the lowest mean loss on dev sequences.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from hf_memmix.training.experiments import echo_suite as suite
from hf_memmix.training.experiments.echo_tasks import TASKS, Examples, draw_examples
from hf_memmix.training.experiments.harness import attempt, execute, parser_of


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
    """All cells at every rate with a seed before any with the next."""
    return [
        {"model": name, "pairs": pairs, "gap": gap, "lr": lr, "seed": seed}
        for seed in range(args.seeds)
        for lr in args.lrs
        for pairs, gap in args.cells
        for name in reversed(args.models)
    ]


def run(row: dict, args) -> Iterator[dict]:
    pairs, gap, errors = row["pairs"], row["gap"], {}
    model, masked = suite.build(row["model"], row["seed"]), row["model"] == "ska"
    result = suite.learn(model, batches(row, args), masked, row, args, enough=args.enough)
    yield result | {"parameters": model.num_parameters()}
    if not result["finite"]:
        return
    cell = {"length": tokens(pairs, gap), "pairs": pairs, "gap": gap, "sequences": args.sequences, "masked": masked}
    for name, seed, figure in (("dev_loss", suite.DEV_SEED, "loss"), ("accuracy", suite.TEST_SEED, "accuracy")):
        found = attempt(errors, name, suite.measure, model, "mqar", seed=seed, **cell)
        yield {} if found is None else {name: found[figure]}
    if errors:
        yield {"errors": errors}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="at most; a cell whose loss is small ends before")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step, at most")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens of a step, at most")
    parser.add_argument("--enough", type=float, default=0.002, help="the loss at which training ends")
    parser.add_argument("--sequences", type=int, default=128, help="measured, at least")
    cells = [[4, 64], [16, 64], [4, 512], [16, 512], [4, 4096]]
    parser.add_argument("--cells", type=json.loads, default=cells, help="[[pairs, gap]]")
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-3, 1e-3])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=list(suite.MODELS), default=list(suite.MODELS))
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan)
    if args.plot:
        from hf_memmix.training.experiments.echo_plots import plot_grid

        plot_grid(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
