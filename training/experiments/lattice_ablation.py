"""Which part of Lattice helps: the ladder from the delta rule, the number of slots, the form of the step size.

    python training/experiments/lattice_ablation.py --text text.npy --out training/results/lattice_ablation.json

Language models of equal size and with equal data. Each rung of the ladder is trained with every learning rate, and
once more with another seed at the one of lowest dev loss; slots and step sizes take the rate that was best for DEC.
The ladder is Table 4 of Karami and Mirrokni; the other two are what the paper leaves open.
"""

from pathlib import Path

from hf_memmix.training.experiments.fit import add_sizes, best, learn_text
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


def plan(done: list[dict], args) -> list[dict]:
    context = {"context": args.context}
    rows = [{"rung": rung, **context, "lr": lr, "seed": 0} for lr in args.lrs for rung in LADDER]
    dec = [row for row in done if row["rung"] == "+ projection" and row["seed"] == 0]
    if len(dec) >= len(args.lrs) and (row := best(dec)) is not None:
        rows += [{"rung": name, **context, "lr": row["lr"], "seed": 0} for name in OPEN]
    for rung in LADDER:
        tried = [row for row in done if row["rung"] == rung and row["seed"] == 0]
        if len(tried) >= len(args.lrs) and (row := best(tried)) is not None:
            rows.append({"rung": rung, **context, "lr": row["lr"], "seed": 1})
    return rows


def run(row: dict, args) -> dict:
    options, paper = LADDER.get(row["rung"]) or (OPEN[row["rung"]], None)
    result = learn_text(row, args, "lattice", options) | {"options": options}
    return result | ({} if paper is None else {"paper_perplexity_on_pile": paper})


def main() -> None:
    parser = parser_of(__doc__)
    add_sizes(parser, hidden_size=256, layers=4, heads=4, batch_tokens=32768, tokens=8_000_000)
    parser.add_argument("--text", type=Path, required=True, help="training text, .txt or .npy of text.py")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-3, 2e-3, 8e-3])
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan, text=text_record(args.text))
    if args.plot:
        from hf_memmix.training.experiments.plots import plot_ablation

        plot_ablation(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
