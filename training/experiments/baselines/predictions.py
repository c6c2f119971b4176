"""What became of the predictions about the language models of the baselines, computed from their results.

The figures are held-out perplexities at the chosen rate, as means over seeds. A model whose best rate is the largest
or the smallest one that was tried may be better than its figure: it is marked with *, and a prediction about it is
open.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from hf_memmix.training.experiments.common.averages import percent_above
from hf_memmix.training.experiments.common.predictions import Found, Outcome, predictions_table
from hf_memmix.training.experiments.common.rates import at_edge, chosen_rows, trained_and_failed


class Perplexities:
    """The held-out perplexities of each model at its chosen rate.

    of: the mean over seeds; by_seed: the perplexity of each seed; seeds: the same as a list; rate: the chosen rate;
    edge: the models whose rate is at the edge.
    """

    def __init__(self, results: dict):
        rows, failed = trained_and_failed(results)
        self.of, self.seeds, self.by_seed, self.rate, self.edge = {}, {}, {}, {}, set()
        for name in dict.fromkeys(row["model"] for row in rows):
            if chosen := chosen_rows(rows, model=name, context=results["settings"]["contexts"][0]):
                self.by_seed[name] = {row["seed"]: row["perplexity"] for row in chosen}
                self.seeds[name] = [*self.by_seed[name].values()]
                self.of[name], self.rate[name] = statistics.fmean(self.seeds[name]), chosen[0]["lr"]
                # a rate at which the training failed was tried, too
                if at_edge([row for row in rows + failed if row["model"] == name], chosen[0]["lr"]):
                    self.edge.add(name)

    def text(self, name: str) -> str:
        return f"{name} {self.of[name]:.2f}{'*' if name in self.edge else ''}"

    def above(self, name: str, other: str) -> float:
        """By how many percent the perplexity of `name` is above that of `other`, at the seeds that both have."""
        return percent_above(self.by_seed[name], self.by_seed[other])


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


def distances(pairs: dict[str, str], low: float, high: float):
    """By how many percent each model is above the other one of its pair."""
    return lambda models, before: [compared(models, *pair, low, high) for pair in pairs.items()]


def distance(name: str, other: str, low: float, high: float):
    return distances({name: other}, low, high)


def best_rates(predicted: dict[str, float]):
    """The chosen rate of each model, from the predicted ones."""
    return lambda models, before: [
        (f"{name} {models.rate[name]:g}{'*' if name in models.edge else ''}", models.rate[name] == rate)
        for name, rate in predicted.items()
    ]


def spread(models: Perplexities, before: Perplexities) -> list[Found]:
    """The standard deviation over seeds in percent of the mean, of the models that have two seeds or more."""
    several = {name: models.seeds[name] for name in BEST_RATES if len(models.seeds[name]) > 1}
    shares = {name: 100 * statistics.stdev(seeds) / models.of[name] for name, seeds in several.items()}
    return [(f"{name} {share:.1f} % ({len(several[name])} seeds)", share < 1) for name, share in shares.items()]


def order(models: Perplexities, before: Perplexities) -> list[Found]:
    found = sorted(BEST_RATES, key=models.of.get)
    return [(" < ".join(models.text(name) for name in found), found == [*ORDER])]


def every_seed_in_order(*names: str):
    """Whether every seed of a model is below every seed of the next one."""
    return lambda models, before: [
        (f"{models.text(a)}, {models.text(b)}", max(models.seeds[a]) < min(models.seeds[b]))
        for a, b in pairwise(names)
    ]


@dataclass(frozen=True)
class Prediction:
    """names: the models that it is about; measure: what became of it; seeds: as many it needs of each model."""

    text: str
    names: tuple[str, ...]
    measure: Callable[[Perplexities, Perplexities], list[Found]]
    seeds: int = 1


BLOCK, LARGER = ("dec", "gdn", "delta"), ("mamba2", "gka")
ORDER = ("mamba2", "gka", "gla", "dec", "gdn", "linear-decay", "coffee", "delta", "transformer")
BEST_RATES = dict.fromkeys(ORDER, 4e-3) | dict.fromkeys(("gka", "gla", "dec", "gdn"), 8e-3) | {"mamba2": 16e-3}
OTHER_RATES = dict.fromkeys(("gka-equal", "dec-vconv", "gdn-vconv", "gka-no-vconv"), 8e-3)
OTHER_RATES |= dict.fromkeys(("coffee-equal", "delta-vconv"), 4e-3) | {"mamba2-equal": 16e-3}
PREDICTIONS = (
    Prediction("transformer 42 to 47", ("transformer",), between(42, 47, "transformer")),
    Prediction("DEC with a convolution of v 40 to 42", ("dec-vconv",), between(40, 42, "dec-vconv")),
    Prediction("DEC, GDN and the delta rule 42 to 45, within 3 %", BLOCK, similar),
    Prediction("Mamba-2 and GKA change by less than 2 % from a warm-up of 24 steps", LARGER, unchanged),
    Prediction(
        "a memory of equal size costs Mamba-2 and GKA less than 3 %, and they stay ahead of DEC",
        (*LARGER, "mamba2-equal", "gka-equal", "dec"),
        equal_memory,
    ),
    Prediction("a convolution of v lowers GDN by 1 to 4 %", ("gdn", "gdn-vconv"), distance("gdn", "gdn-vconv", 1, 4)),
    Prediction("and the delta rule by 1 to 4 %", ("delta", "delta-vconv"), distance("delta", "delta-vconv", 1, 4)),
    Prediction("without it GKA loses 1 to 4 %", ("gka-no-vconv", "gka"), distance("gka-no-vconv", "gka", 1, 4)),
    Prediction("GLA within 1.5 % of GKA", ("gla", "gka"), distance("gla", "gka", -1.5, 1.5)),
    Prediction(
        "best rate 0.016 for Mamba-2, 0.008 for GKA, GLA, DEC and GDN, 0.004 for the other four",
        ORDER,
        best_rates(BEST_RATES),
    ),
    Prediction("standard deviation over three seeds below 1 % for each of the nine", ORDER, spread, seeds=3),
    Prediction("order of the means: " + ", ".join(ORDER), ORDER, order, seeds=3),
    Prediction(
        "a convolution of v costs the delta rule 1 to 4 %",
        ("delta", "delta-vconv"),
        distance("delta-vconv", "delta", 1, 4),
    ),
    Prediction(
        "best rate 0.016 for mamba2-equal, 0.004 for coffee-equal and delta-vconv, 0.008 for the other four",
        tuple(OTHER_RATES),
        best_rates(OTHER_RATES),
    ),
    Prediction(
        "with equal memory every seed of Mamba-2 is below every seed of GKA, and those below every seed of DEC",
        ("mamba2-equal", "gka-equal", "dec"),
        every_seed_in_order("mamba2-equal", "gka-equal", "dec"),
        seeds=3,
    ),
    Prediction(
        "GKA with equal memory is 1 to 4 % below GLA",
        ("gka-equal", "gla"),
        distance("gka-equal", "gla", -4, -1),
        seeds=3,
    ),
    Prediction(
        "COFFEE with twice its memory within 1.5 % of COFFEE",
        ("coffee-equal", "coffee"),
        distance("coffee-equal", "coffee", -1.5, 1.5),
        seeds=3,
    ),
    Prediction(
        "a convolution of v costs DEC and GDN 1 to 4 %",
        ("dec-vconv", "dec", "gdn-vconv", "gdn"),
        distances({"dec-vconv": "dec", "gdn-vconv": "gdn"}, 1, 4),
        seeds=3,
    ),
    Prediction(
        "without it GKA changes by less than 1.5 %",
        ("gka-no-vconv", "gka"),
        distance("gka-no-vconv", "gka", -1.5, 1.5),
        seeds=3,
    ),
    Prediction(
        "without it GLA loses 8 to 16 %",
        ("gla-no-vconv", "gla"),
        distance("gla-no-vconv", "gla", 8, 16),
        seeds=3,
    ),
    Prediction(
        "it changes linear attention with decay by less than 2 %",
        ("linear-decay-vconv", "linear-decay"),
        distance("linear-decay-vconv", "linear-decay", -2, 2),
        seeds=3,
    ),
    Prediction(
        "without it Mamba-2 with equal memory loses 3 to 10 %",
        ("mamba2-no-vconv-equal", "mamba2-equal"),
        distance("mamba2-no-vconv-equal", "mamba2-equal", 3, 10),
        seeds=3,
    ),
    Prediction(
        "and is then behind DEC and GDN",
        ("mamba2-no-vconv-equal", "dec", "gdn"),
        distances({"dec": "mamba2-no-vconv-equal", "gdn": "mamba2-no-vconv-equal"}, -100, 0),
        seeds=3,
    ),
    Prediction(
        "best rate 0.004 for gla-no-vconv and linear-decay-vconv, 0.008 for mamba2-no-vconv-equal",
        ("gla-no-vconv", "linear-decay-vconv", "mamba2-no-vconv-equal"),
        best_rates({"gla-no-vconv": 4e-3, "linear-decay-vconv": 4e-3, "mamba2-no-vconv-equal": 8e-3}),
    ),
)


def table(results: dict, before: dict) -> str:
    """One line per prediction.

    Args:
        results: of `language.py` of the baselines.
        before: the language models of COFFEE's experiment, whose warm-up is 24 steps.
    """
    models, earlier, outcomes = Perplexities(results), Perplexities(before), {}
    for number, one in enumerate(PREDICTIONS, 1):
        measured = all(name in models.of for name in one.names)
        found = one.measure(models, earlier) if measured else []
        enough = measured and all(len(models.seeds[name]) >= one.seeds for name in one.names)
        outcomes[str(number)] = Outcome(one.text, found, final=enough and not models.edge & set(one.names))
    context = results["settings"]["contexts"][0]
    return (
        predictions_table(f"prediction, perplexity at {context} tokens", outcomes)
        + "\n\n*: the best rate is the largest or the smallest one that was tried."
    )
