"""Lattice as a language model beside other mixers of equal size and with equal data, at growing context.

    python training/experiments/lattice_language.py --text text.npy --out training/results/lattice_language.json

At the shortest context each model is trained with every learning rate (`fit.rates`); the one with the lowest dev loss
is used for the longer contexts and for a second seed. Reported is the perplexity on held-out text. Karami and
Mirrokni, Table 2, has the same comparison at 110M parameters and 2.4B tokens. "-small" is gamma of at most 0.25.
"""

from pathlib import Path

from hf_memmix.training.experiments.fit import MODELS, add_sizes, learn_text, rates
from hf_memmix.training.experiments.harness import execute, parser_of
from hf_memmix.training.experiments.text import text_record

# Karami and Mirrokni, Table 2: perplexity on Books
PAPER = {
    "transformer": {512: 20.60, 2048: 18.89, 8192: 18.85},
    "linear": {512: 21.04, 2048: 19.82, 8192: 20.34},
    "linear-decay": {512: 19.94, 2048: 18.34, 8192: 18.23},
    "delta": {512: 20.28, 2048: 18.33, 8192: 18.05},
    "ttt": {512: 20.11, 2048: 18.36, 8192: 18.05},
    "dec": {512: 19.06, 2048: 17.14, 8192: 16.62},
    "enc": {512: 19.11, 2048: 17.22, 8192: 16.66},
    "sim": {512: 19.08, 2048: 17.23, 8192: 16.73},
}
# with gamma of at most 0.25: what the ablation found of the step
SMALL_STEPS = ("dec-small", "enc-small", "sim-small")
SEEDS = (0, 1)


def plan(done: list[dict], args) -> list[dict]:
    first, rows, chosen = args.contexts[0], [], {}
    for name in args.models:
        lrs, chosen[name] = rates(done, args.lrs, model=name, context=first, seed=0)
        rows += [(lrs.index(lr), {"model": name, "context": first, "lr": lr, "seed": 0}) for lr in lrs]
    # one rate of all models before the next: what a time limit leaves out is the same for all
    rows = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    for seed in SEEDS:
        for context in args.contexts:
            rows += [
                {"model": name, "context": context, "lr": lr, "seed": seed}
                for name, lr in chosen.items()
                if lr is not None
            ]
    return rows


def run(row: dict, args) -> dict:
    result = learn_text(row, args, *MODELS[row["model"]])
    paper = PAPER.get(row["model"], {}).get(row["context"])
    return result | ({} if paper is None else {"paper_perplexity_on_books": paper})


def main() -> None:
    parser = parser_of(__doc__)
    add_sizes(parser, hidden_size=256, layers=4, heads=4, batch_tokens=32768, tokens=16_000_000)
    parser.add_argument("--text", type=Path, required=True, help="training text, .txt or .npy of text.py")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-3, 2e-3])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[*PAPER, *SMALL_STEPS])
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan, **text_record(args.text))
    if args.plot:
        from hf_memmix.training.experiments.plots import plot_language

        plot_language(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
