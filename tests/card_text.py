"""The texts of model cards and of the experiments' READMEs, with every space and line end as one space."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def text_of(name):
    return " ".join((ROOT / "model_cards" / name / "README.md").read_text(encoding="utf-8").split())


def path_of_readme(experiment):
    return ROOT / "training" / "experiments" / experiment / "README.md"
