"""What the tests of several cards need: the texts of cards and READMEs, and the accuracies of associative recall."""

from pathlib import Path

from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.common.rates import chosen_rows

ROOT = Path(__file__).parents[1]


def text_of(name):
    """A card, with every space and line end as one space."""
    return " ".join((ROOT / "model_cards" / name / "README.md").read_text(encoding="utf-8").split())


def path_of_readme(experiment):
    return ROOT / "training" / "experiments" / experiment / "README.md"


def recalled(model, pairs=64):
    """The accuracy in percent of each seed of `recall.json`, at the chosen rate; seeds that learnt nothing count."""
    rows = [row for row in read("recall")["rows"] if row["pairs"] == pairs and "accuracy" in row]
    return [100 * row["accuracy"] for row in chosen_rows(rows, model=model)]
