"""What became of the predictions about the language models of the baselines, computed from their results.

The figures are held-out perplexities at the chosen rate, as means over seeds. A model whose best rate is the largest
or the smallest one that was tried may be better than its figure: it is marked with *, and a prediction about it is
open.
"""

import statistics

from hf_memmix.training.experiments.common.predictions import Found, Outcome, predictions_table
from hf_memmix.training.experiments.common.rates import at_edge, chosen_rows, trained_and_failed


class Perplexities:
    """The mean held-out perplexity of each model at its chosen rate, and the models whose rate is at the edge."""

    def __init__(self, results: dict):
        rows, _ = trained_and_failed(results)
        self.of, self.edge = {}, set()
        for name in dict.fromkeys(row["model"] for row in rows):
            tried = [row for row in rows if row["model"] == name]
            if chosen := chosen_rows(tried, context=results["settings"]["contexts"][0]):
                self.of[name] = statistics.fmean(row["perplexity"] for row in chosen)
                if at_edge([row for row in tried if row["seed"] == 0], chosen[0]["lr"]):
                    self.edge.add(name)

    def text(self, name: str) -> str:
        return f"{name} {self.of[name]:.2f}{'*' if name in self.edge else ''}"

    def above(self, name: str, other: str) -> float:
        """By how many percent the perplexity of `name` is above that of `other`."""
        return 100 * (self.of[name] / self.of[other] - 1)


def compared(models: Perplexities, name: str, other: str, low: float, high: float) -> Found:
    """The distance of two models in percent, and whether it lies in the range."""
    by = models.above(name, other)
    return f"{models.text(name)}, {models.text(other)}: {by:+.1f} %", low <= by <= high


def between(low: float, high: float, *names: str):
    return lambda models, before: [(models.text(name), low <= models.of[name] <= high) for name in names]


def similar(models: Perplexities, before: Perplexities) -> list[Found]:
    """The perplexities of DEC, GDN and the delta rule, and by how much they differ."""
    by = 100 * (max(models.of[name] for name in BLOCK) / min(models.of[name] for name in BLOCK) - 1)
    return [*between(42, 45, *BLOCK)(models, before), (f"{by:.1f} % apart", by < 3)]


def unchanged(models: Perplexities, before: Perplexities) -> list[Found]:
    changes = {name: 100 * (models.of[name] / before.of[name] - 1) for name in LARGER}
    return [(f"{models.text(name)}: {by:+.1f} %", abs(by) < 2) for name, by in changes.items()]


def equal_memory(models: Perplexities, before: Perplexities) -> list[Found]:
    dearer = [compared(models, f"{name}-equal", name, -100, 3) for name in LARGER]
    return [*dearer, *(compared(models, f"{name}-equal", "dec", -100, 0) for name in LARGER)]


def distance(name: str, other: str, low: float, high: float):
    return lambda models, before: [compared(models, name, other, low, high)]


BLOCK, LARGER = ("dec", "gdn", "delta"), ("mamba2", "gka")
# the prediction, the models that it is about, and what measures it
PREDICTIONS = (
    ("transformer 42 to 47", ("transformer",), between(42, 47, "transformer")),
    ("DEC with a convolution of v 40 to 42", ("dec-vconv",), between(40, 42, "dec-vconv")),
    ("DEC, GDN and the delta rule 42 to 45, within 3 %", BLOCK, similar),
    ("Mamba-2 and GKA change by less than 2 % from a warm-up of 24 steps", LARGER, unchanged),
    (
        "a memory of equal size costs Mamba-2 and GKA less than 3 %, and they stay ahead of DEC",
        (*LARGER, "mamba2-equal", "gka-equal", "dec"),
        equal_memory,
    ),
    ("a convolution of v lowers GDN by 1 to 4 %", ("gdn", "gdn-vconv"), distance("gdn", "gdn-vconv", 1, 4)),
    ("and the delta rule by 1 to 4 %", ("delta", "delta-vconv"), distance("delta", "delta-vconv", 1, 4)),
    ("without it GKA loses 1 to 4 %", ("gka-no-vconv", "gka"), distance("gka-no-vconv", "gka", 1, 4)),
    ("GLA within 1.5 % of GKA", ("gla", "gka"), distance("gla", "gka", -1.5, 1.5)),
)


def table(results: dict, before: dict) -> str:
    """One line per prediction.

    Args:
        results: of `language.py` of the baselines.
        before: the language models of COFFEE's experiment, whose warm-up is 24 steps.
    """
    models, earlier, outcomes = Perplexities(results), Perplexities(before), {}
    for number, (text, names, measure) in enumerate(PREDICTIONS, 1):
        measured = all(name in models.of for name in names)
        found = measure(models, earlier) if measured else []
        outcomes[str(number)] = Outcome(text, found, final=not models.edge & set(names))
    context = results["settings"]["contexts"][0]
    return (
        predictions_table(f"prediction, perplexity at {context} tokens", outcomes)
        + "\n\n*: the best rate is the largest or the smallest one that was tried."
    )
