"""Which part of SKA helps: action mask, powers, spectral norm, normalisation, and how often the operator is estimated.

    python training/experiments/echo_ablation.py --lr 3e-3 --out training/results/echo_ablation.json --plot

The SKA model of `echo_transfer.py` with one option changed, trained and measured as there; every variant with a seed
before any with the next. Chunks of one token are the
paper's prefix mode for questions after all facts: every token reads all before it. "refreshed" in a row is the same
model measured with an estimate at every token (`refresh_every=1`), whatever chunks it was trained with.
"""

from collections.abc import Iterator
from pathlib import Path

from hf_memmix.training.experiments.echo_transfer import add_protocol, learn_and_measure
from hf_memmix.training.experiments.harness import execute, parser_of

# variant: options of the SKA layers, and whether they store facts only
VARIANTS = {
    "K = 2, chunks of 8": ({}, True),
    "no action mask": ({}, False),
    "K = 0": ({"power": 0}, True),
    "K = 1": ({"power": 1}, True),
    "K = 4": ({"power": 4}, True),
    "no spectral norm": ({"spectral_norm": False}, True),
    "chunks of 1": ({"chunk_size": 1}, True),
    "chunks of 16": ({"chunk_size": 16}, True),
    "sequence maximum": ({"normalization": "sequence_max"}, True),
    "chunks of 32": ({"chunk_size": 32}, True),
}


def plan(done: list[dict], args) -> list[dict]:
    return [
        {"variant": name, "model": "ska", "lr": args.lr, "seed": seed}
        for seed in range(args.seeds)
        for name in args.variants
    ]


def run(row: dict, args) -> Iterator[dict]:
    options, masked = VARIANTS[row["variant"]]
    return learn_and_measure(row, args, masked, **options)


def main() -> None:
    parser = parser_of(__doc__)
    add_protocol(parser, (64, 256, 1024, 4096))
    parser.add_argument("--lr", type=float, default=3e-3, help="the best of echo_transfer for SKA")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan)
    if args.plot:
        from hf_memmix.training.experiments.echo_plots import plot_ablation

        plot_ablation(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
