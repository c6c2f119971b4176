"""COFFEE as a language model beside Mamba-2, gated linear attention, GKA and a transformer: equal size, equal data.

    python training/experiments/coffee_language.py --text text.npy --out training/results/coffee_language.json

Text, sizes and the choice of learning rates are those of `lattice_language`; the paper trains no language model.
"mamba2" is the successor of S6 with its block; all mixers stand in the same Llama, whose MLP makes sizes equal.
"""

from pathlib import Path

from hf_memmix.training.experiments.fit import MODELS, add_sizes, learn_text
from hf_memmix.training.experiments.harness import execute, parser_of
from hf_memmix.training.experiments.lattice_language import plan  # noqa: F401, the harness asks this module for it
from hf_memmix.training.experiments.text import text_record

COMPARED = ("coffee", "coffee-filter", "mamba2", "linear-decay", "gka", "transformer")


def run(row: dict, args) -> dict:
    return learn_text(row, args, *MODELS[row["model"]])


def main() -> None:
    parser = parser_of(__doc__)
    add_sizes(parser, hidden_size=256, layers=4, heads=4, batch_tokens=32768, tokens=16_000_000)
    parser.add_argument("--text", type=Path, required=True, help="training text, .txt or .npy of text.py")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-3, 2e-3])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(COMPARED))
    args = parser.parse_args()
    results = execute(Path(__file__).stem, args, plan, **text_record(args.text))
    if args.plot:
        from hf_memmix.training.experiments.plots import plot_language

        plot_language(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
