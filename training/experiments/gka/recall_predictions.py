"""What became of the predictions about associative recall, computed from the results of `recall.py`.

The figures are accuracies in percent on test sequences: means over seeds at the rate that the development sequences
chose. A figure whose rate is the largest or the smallest one that was tried is marked with *, and a prediction about
it is open.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.common.predictions import Found, Outcome, predictions_table
from hf_memmix.training.experiments.common.rates import at_edge, chosen_rows
from hf_memmix.training.experiments.gka.report import accuracy_text


@dataclass(frozen=True)
class Cell:
    """The rows of one cell. Rows that learnt nothing count: their accuracy is that of guessing."""

    rows: list[dict]

    def at_rate(self, name: str, lr: float) -> float | None:
        """The accuracy of the first seed at one learning rate, 0 if it diverged; None if it was not trained."""
        found = [row for row in self.rows if matches(row, {"model": name, "lr": lr, "seed": 0})]
        return 100 * found[0].get("accuracy", 0.0) if found else None

    def text_at_rate(self, name: str, lr: float) -> str:
        found = [row for row in self.rows if matches(row, {"model": name, "lr": lr, "seed": 0})]
        return f"{name} at {lr:g}: {accuracy_text(found[0])}"

    def chosen(self, name: str) -> list[dict]:
        return [row for row in chosen_rows(self.rows, model=name) if "accuracy" in row]

    def accuracy(self, name: str) -> float:
        return 100 * statistics.fmean(row["accuracy"] for row in self.chosen(name))

    def rate(self, name: str) -> float:
        return self.chosen(name)[0]["lr"]

    def edge(self, name: str) -> bool:
        return at_edge([row for row in self.rows if row["model"] == name], self.rate(name))

    def mark(self, name: str) -> str:
        return "*" if self.edge(name) else ""


# the parts that were measured, and whether further rows cannot change them
Measured = tuple[list[Found], bool]


def at_rate(name: str, lr: float, low: float, high: float) -> Callable[[Cell], Measured]:
    """The accuracy of a model at one rate lies between two limits."""

    def measure(cell: Cell) -> Measured:
        found = cell.at_rate(name, lr)
        return ([], False) if found is None else ([(cell.text_at_rate(name, lr), low <= found <= high)], True)

    return measure


def near(name: str, lr: float, other: float, points: float) -> Callable[[Cell], Measured]:
    """The accuracies of a model at two rates differ by at most so many points."""

    def measure(cell: Cell) -> Measured:
        found, there = cell.at_rate(name, lr), cell.at_rate(name, other)
        if found is None or there is None:
            return [], False
        return [(f"{cell.text_at_rate(name, lr)}, at {other:g}: {there:.1f}", abs(found - there) <= points)], True

    return measure


def each(names: tuple[str, ...], found: Callable[[Cell, str], Found]) -> Callable[[Cell], Measured]:
    """What was found of each model at its best rate."""

    def measure(cell: Cell) -> Measured:
        measured = [name for name in names if cell.chosen(name)]
        final = len(measured) == len(names) and not any(map(cell.edge, measured))
        return [found(cell, name) for name in measured], final

    return measure


def recalls(low: float, high: float, *names: str) -> Callable[[Cell], Measured]:
    """The accuracy of each model at its best rate lies between two limits."""

    def found(cell: Cell, name: str) -> Found:
        return f"{name} {cell.accuracy(name):.1f}{cell.mark(name)}", low <= cell.accuracy(name) <= high

    return each(names, found)


def ahead(name: str, other: str, low: float, high: float) -> Callable[[Cell], Measured]:
    """By how many points a model recalls more than another one, each at its best rate, lies between two limits."""

    def measure(cell: Cell) -> Measured:
        if not (cell.chosen(name) and cell.chosen(other)):
            return [], False
        said = ", ".join(f"{model} {cell.accuracy(model):.1f}{cell.mark(model)}" for model in (name, other))
        by = cell.accuracy(name) - cell.accuracy(other)
        return [(said, low <= by <= high)], not (cell.edge(name) or cell.edge(other))

    return measure


def best_rate_at_most(lr: float, *names: str) -> Callable[[Cell], Measured]:
    return each(names, lambda cell, name: (f"{name} {cell.rate(name):g}{cell.mark(name)}", cell.rate(name) <= lr))


# the cell, the prediction, and what measures it
FEW, SMALL, LARGE = (256, 32), (256, 64), (512, 128)
PREDICTIONS = (
    (SMALL, "64 pairs: the delta rule at 0.0015 recalls 70 to 90 %", at_rate("delta", 0.0015, 70, 90)),
    (SMALL, "SIM at 0.02 recalls less than 10 %", at_rate("sim", 0.02, 0, 10)),
    (SMALL, "the delta rule at 0.00075 within 10 points of 0.0015", near("delta", 0.00075, 0.0015, 10)),
    (SMALL, "DEC at 0.00075 within 10 points of 0.0015", near("dec", 0.00075, 0.0015, 10)),
    (LARGE, "512 tokens, 128 pairs: the delta rule and DEC recall 30 to 60 %", recalls(30, 60, "delta", "dec")),
    (LARGE, "GKA less than 50 %", recalls(0, 50, "gka")),
    (LARGE, "SIM less than 10 %", recalls(0, 10, "sim")),
    (LARGE, "ENC 40 to 70 %", recalls(40, 70, "enc")),
    (LARGE, "Mamba-2 more than 60 %", recalls(60, 100, "mamba2")),
    (
        LARGE,
        "DEC, ENC and the delta rule are best at 0.0015 or less",
        best_rate_at_most(0.0015, "dec", "enc", "delta"),
    ),
    (SMALL, "64 pairs: SIM at 0.0015 recalls more than 60 %", at_rate("sim", 0.0015, 60, 100)),
    (FEW, "32 pairs: the delta rule at 0.00075 recalls more than 99 %", at_rate("delta", 0.00075, 99, 100)),
    (FEW, "DEC at 0.00075 more than 97.2 %, what it recalls at 0.0015", at_rate("dec", 0.00075, 97.2, 100)),
    (FEW, "SIM at 0.00075 less than 98.8 %, what it recalls at 0.0015", at_rate("sim", 0.00075, 0, 98.8)),
    (SMALL, "64 pairs: the delta rule at 0.000375 less than 94 %", at_rate("delta", 0.000375, 0, 94)),
    (SMALL, "SIM at 0.00075 recalls 30 to 60 %", at_rate("sim", 0.00075, 30, 60)),
    (SMALL, "Mamba-2 at 0.02 recalls less than 92 %", at_rate("mamba2", 0.02, 0, 92)),
    (LARGE, "128 pairs: the delta rule at 0.000375 less than 47 %", at_rate("delta", 0.000375, 0, 47)),
    (LARGE, "ENC at 0.0015 recalls 38 to 60 %", at_rate("enc", 0.0015, 38, 60)),
    (LARGE, "DEC at 0.00075 recalls more than 20 %", at_rate("dec", 0.00075, 20, 100)),
    (LARGE, "SIM at 0.00075 recalls less than 5 %", at_rate("sim", 0.00075, 0, 5)),
)

OF_BASELINES = (  # written down in the README of the baselines
    (SMALL, "transformer more than 99 %", recalls(99, 100, "transformer")),
    (SMALL, "Mamba-2 more than 90 %", recalls(90, 100, "mamba2")),
    (SMALL, "Mamba-2 with a memory of equal size less than 60 %", recalls(0, 60, "mamba2-equal")),
    (SMALL, "GDN within 5 points of the delta rule", ahead("gdn", "delta", -5, 5)),
    (SMALL, "GLA and linear attention with decay below 60 %", recalls(0, 60, "gla", "linear-decay")),
    (SMALL, "COFFEE below 10 %", recalls(0, 10, "coffee")),
    (SMALL, "GKA with a memory of equal size recalls less than GKA", ahead("gka-equal", "gka", -100, 0)),
)


def baselines_table(results: dict, further: dict) -> str:
    """The predictions about the models of the baselines.

    Args:
        results: of `recall.py`.
        further: of `recall.py` with other rates of one model.
    """
    return table(results | {"rows": results["rows"] + further["rows"]}, OF_BASELINES)


def table(results: dict, predictions: tuple = PREDICTIONS) -> str:
    """One line per prediction."""
    rows = [row for row in results["rows"] if "finite" in row]
    outcomes = {}
    for number, ((length, pairs), said, measure) in enumerate(predictions, 1):
        found, final = measure(Cell([row for row in rows if matches(row, {"length": length, "pairs": pairs})]))
        outcomes[str(number)] = Outcome(said, found, final)
    return (
        predictions_table("prediction, accuracy in percent", outcomes)
        + "\n\n*: the best rate is the largest or the smallest one that was tried."
    )
