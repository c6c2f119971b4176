"""Which part of Lattice helps: the ladder from the delta rule, the number of slots, the form of the step size.

    python training/experiments/lattice_ablation.py --text text.npy --out training/results/lattice_ablation.json

Language models of equal size and with equal data. Each rung of the ladder is trained with every learning rate
(`fit.rates`), and once more with another seed at the one of lowest dev loss; slots and step sizes take the rate that
was best for DEC, with both seeds.
The ladder is Table 4 of Karami and Mirrokni; the other two are what the paper leaves open.
"""

from pathlib import Path

from hf_memmix.training.experiments.fit import add_sizes, learn_text, rates
from hf_memmix.training.experiments.harness import execute, parser_of
from hf_memmix.training.experiments.text import text_record

# rung: options, perplexity in Table 4
LADDER = {
    "delta rule": ({"variant": "delta"}, 11.62),
    "+ orthogonal": ({"variant": "dec", "project": False}, 11.26),
    "+ projection": ({"variant": "dec"}, 10.94),
    "+ forget gate": ({"variant": "dec", "use_forget_gate": True}, 10.94),
    # not in the table: what the gate does without projection
    "delta rule + forget gate": ({"variant": "delta", "use_forget_gate": True}, None),
}
OPEN = {
    "slots 8": {"slots": 8},
    "slots 16": {"slots": 16},
    "slots 32": {"slots": 32},
    "gamma <= 0.25": {"gamma_max": 0.25},
    "gamma <= 0.5": {"gamma_max": 0.5},
    "gamma <= 2": {"gamma_max": 2.0},
    "gamma softplus": {"step_size": "softplus"},
    "gamma constant": {"step_size": "constant"},
}


SEEDS = (0, 1)


def plan(done: list[dict], args) -> list[dict]:
    rows, chosen = [], {}
    for rung in LADDER:
        lrs, chosen[rung] = rates(done, args.lrs, rung=rung, seed=0)
        rows += [(lrs.index(lr), {"rung": rung, "context": args.context, "lr": lr, "seed": 0}) for lr in lrs]
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    others = dict.fromkeys(OPEN, chosen["+ projection"])
    for seed, rungs in ((1, chosen), *((seed, others) for seed in SEEDS)):
        rows += [
            {"rung": rung, "context": args.context, "lr": lr, "seed": seed}
            for rung, lr in rungs.items()
            if lr is not None
        ]
    return rows


def run(row: dict, args) -> dict:
    options, paper = LADDER.get(row["rung"]) or (OPEN[row["rung"]], None)
    result = learn_text(row, args, "lattice", options) | {"options": options}
    return result | ({} if paper is None else {"paper_perplexity_on_pile": paper})


def main() -> None:
    parser = parser_of(__doc__)
    add_sizes(parser, hidden_size=256, layers=4, heads=4, batch_tokens=32768, tokens=16_000_000)
    parser.add_argument("--text", type=Path, required=True, help="training text, .txt or .npy of text.py")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-3, 2e-3])
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan, **text_record(args.text))
    if args.plot:
        from hf_memmix.training.experiments.plots import plot_ablation

        plot_ablation(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
