"""What became of the predictions about the variants of GKA, computed from the results of `variants.py`.

Accuracies are in percent, perplexities are compared at the same seeds. All figures are means over seeds.
"""

import statistics
from dataclasses import dataclass

from hf_memmix.training.experiments.common.averages import percent_above
from hf_memmix.training.experiments.common.predictions import Found, Outcome, predictions_table
from hf_memmix.training.experiments.common.rates import chosen_rows
from hf_memmix.training.experiments.gka.variants import VARIANTS
from hf_memmix.training.experiments.gka.variants_report import largest_norm, share_at_chance

GKA = "s = D"
RATES = ("rate x 0.5", "rate x 0.75", "rate x 1.5", "rate x 2")
RIDGES = ("ridge 0.01", "ridge 0.05", "ridge 0.1")
SIZES, PEERS = (32, 64, 128), ("mamba2", "gdn", "gla", "delta")
ONE_LAYER = ("attention first", "attention second", "attention last")


@dataclass(frozen=True)
class Figures:
    """The finished rows of one task: by the name of the variant, and by seed."""

    of: dict[str, dict[int, dict]]

    @classmethod
    def from_rows(cls, rows: list[dict], **wanted) -> "Figures":
        of: dict[str, dict[int, dict]] = {}
        for row in rows:
            if row.get("finite") and all(row.get(key) == value for key, value in wanted.items()):
                of.setdefault(row["variant"], {})[row["seed"]] = row
        return cls(of)

    def accuracy(self, name: str) -> float:
        return 100 * statistics.fmean(row["accuracy"] for row in self.of[name].values())

    def start(self, name: str) -> float:
        """The share of the training, in percent, in which the loss was near that of guessing."""
        return statistics.fmean(share_at_chance(row) for row in self.of[name].values())

    def _by_seed(self, name: str, key: str) -> dict[int, float]:
        return {seed: row[key] for seed, row in self.of[name].items()}

    def above(self, name: str) -> float:
        """By how many percent the perplexity is above that of GKA."""
        return percent_above(*(self._by_seed(which, "perplexity") for which in (name, GKA)))

    def gain(self, name: str) -> float:
        """By how many points the accuracy is above that of GKA."""
        ours, plain = (self._by_seed(which, "accuracy") for which in (name, GKA))
        return statistics.fmean(100 * ours[seed] - 100 * plain[seed] for seed in ours.keys() & plain.keys())

    def norm(self, name: str) -> float:
        return statistics.fmean(largest_norm(row) for row in self.of[name].values())


def recalls(low: float, high: float):
    """The accuracy of each variant lies between two limits in percent."""
    return lambda f, names: [(f"{name}: {f.accuracy(name):.1f}", low < f.accuracy(name) < high) for name in names]


def perplexity(low: float, high: float):
    """The perplexity of each variant is above GKA's by a percentage between two limits."""
    return lambda f, names: [(f"{name}: {f.above(name):+.1f} %", low < f.above(name) < high) for name in names]


def changes(low: float, high: float):
    """The accuracy of each variant differs from GKA's by so many points."""

    def measure(f: Figures, names: list[str]) -> list[Found]:
        found = {name: f.gain(name) for name in names}
        return [(f"{name}: {by:+.1f} points", low < by < high) for name, by in found.items()]

    return measure


def behind_gka(f: Figures, names: list[str]) -> list[Found]:
    return [(f"{name.split(',')[0]}: {f.accuracy(name):.1f}", f.gain(name) < 0) for name in names]


def every_seed(low: float, high: float):
    """The accuracy of each variant lies between two limits in percent with every seed.

    A variant with one seed is left out. Then nothing is decided yet if all others are as predicted; if one is not,
    further seeds cannot help.
    """

    def measure(f: Figures, names: list[str]) -> list[Found]:
        seeds = {name: [100 * row["accuracy"] for _, row in sorted(f.of[name].items())] for name in names}
        found = [
            (f"{name}: {', '.join(f'{value:.1f}' for value in values)}", all(low < value < high for value in values))
            for name, values in seeds.items()
            if len(values) > 1
        ]
        return found if len(found) == len(names) or not all(right for _, right in found) else []

    return measure


def spread(below: float):
    """The deviation of the perplexity over seeds is below so many percent of its mean; one seed says nothing."""

    def measure(f: Figures, names: list[str]) -> list[Found]:
        found = {name: [row["perplexity"] for row in f.of[name].values()] for name in names}
        if min(map(len, found.values())) < 2:
            return []
        shares = {name: 100 * statistics.stdev(values) / statistics.fmean(values) for name, values in found.items()}
        return [(f"{name}: {share:.2f} %", share < below) for name, share in shares.items()]

    return measure


def with_seeds(count: int, measure):
    """`measure` if every variant has at least `count` seeds; else nothing is known."""
    return lambda f, names: measure(f, names) if min(len(f.of[name]) for name in names) >= count else []


def of_size(model: str, hidden_size: int, lr: float | None = None) -> str:
    """The name of a model of `figure3a.py`, at one rate or at the chosen one."""
    return f"{model} of {hidden_size}" + (f" at {lr:g}" if lr else "")


def figures_by_size(results: dict | None) -> Figures:
    """The models of `figure3a.py` by `of_size`, each at every rate and at the one that was chosen."""
    rows = [row for row in results["rows"] if "accuracy" in row] if results else []
    named = [row | {"variant": of_size(row["model"], row["hidden_size"], row["lr"])} for row in rows]
    for model, size in dict.fromkeys((row["model"], row["hidden_size"]) for row in rows):
        chosen = chosen_rows(rows, model=model, hidden_size=size)
        named += [row | {"variant": of_size(model, size)} for row in chosen]
    return Figures.from_rows(named)


def gka_first(f: Figures, names: list[str]) -> list[Found]:
    """Whether GKA is ahead of all other models at every size."""
    found = []
    for size in SIZES:
        ours, others = of_size("gka", size), [name for name in names if name.endswith(f" {size}")]
        if ours in others and len(others) > 1:
            best = max((name for name in others if name != ours), key=f.accuracy)
            said = f"size {size}: {f.accuracy(ours):.1f}, best of the others {best.split()[0]} {f.accuracy(best):.1f}"
            found.append((said, f.accuracy(ours) > f.accuracy(best)))
    return found


def early(f: Figures, names: list[str]) -> list[Found]:
    return [(f"at chance for {f.start(name):.0f} % of the training", f.start(name) <= 10) for name in names]


def spikes(f: Figures, names: list[str]) -> list[Found]:
    found = [f.norm(name) / f.norm(GKA) for name in names]
    return [(f"largest gradient {by:.1f} times as large", by > 2) for by in found]


def places(f: Figures, names: list[str]) -> list[Found]:
    best = min(names, key=f.above)
    return [(f"lowest: {best}", best != "attention first")]


def more_attention(f: Figures, names: list[str]) -> list[Found]:
    return [(f"{f.above(name):+.1f} %", f.above(name) > 0) for name in names]


ANY = 1e9
# the task, the prediction, the variants that it is about, and what measures it
PREDICTIONS = (
    ("sketches", "32 pairs: s = D recalls more than 95 %", (GKA,), recalls(95, 101)),
    ("sketches", "s = D/2 recalls 60 to 90 %", ("s = D/2",), recalls(60, 90)),
    ("sketches", "s = D/4 recalls less than 40 %", ("s = D/4",), recalls(-1, 40)),
    ("text", "D/2 raises the perplexity by less than 2 %", ("s = D/2",), perplexity(-ANY, 2)),
    ("text", "D/4 by less than 5 %", ("s = D/4",), perplexity(-ANY, 5)),
    ("text", "no decay raises it by more than 3 %", ("no decay",), perplexity(3, ANY)),
    ("text", "no alpha changes it by less than 1 %", ("no alpha",), perplexity(-1, 1)),
    ("text", "other ridges change it by less than 1 %", RIDGES, perplexity(-1, 1)),
    ("ridge", "a constant ridge: largest gradient more than twice as large", ("constant ridge 0.25",), spikes),
    ("ridge", "a constant ridge raises the perplexity by less than 3 %", ("constant ridge 0.25",),
     perplexity(-ANY, 3)),
    ("text", "one layer of attention lowers it by less than 2 %", ONE_LAYER, perplexity(-2, 0)),
    ("text", "most at the second or the last layer", ONE_LAYER, places),
    ("text", "attention in all layers is worse than GKA", ("attention in all layers",), more_attention),
    ("grid", "64 pairs: with q equal to k at the start, GKA leaves chance in the first tenth", ("q starts as k",),
     early),
    ("grid", "and recalls more than 85 %", ("q starts as k",), recalls(85, 101)),
    ("grid", "DEC and the delta rule with projections of their own for q fall behind GKA",
     tuple(name for name in VARIANTS if "own projection" in name), behind_gka),
    ("grid", "a slow decay helps by more than 10 points", ("slow decay",), changes(10, ANY)),
    ("grid", "other rates change less than 10 points", RATES, changes(-10, 10)),
    ("grid", "without the convolution of v nothing changes (3 points)", ("v not convolved",),
     changes(-3, 3)),
    ("grid", "half the heads, with states twice as large, recall more than 90 %", ("half the heads",),
     recalls(90, 101)),
    ("grid", "without decay and alpha, as in Figure 3a, more than 85 %", ("as in Figure 3a",),
     recalls(85, 101)),
    # written after the rows above that are not open, before those of the lines below
    ("grid", "without the decay alone more than 85 %", ("no decay",), recalls(85, 101)),
    ("grid", "without alpha alone less than 80 %", ("no alpha",), recalls(-1, 80)),
    ("grid", "further seeds: without decay and alpha more than 90 % with each", ("as in Figure 3a",),
     every_seed(90, 101)),
    ("grid", "further seeds: GKA as it is recalls 45 to 80 % with each", (GKA,), every_seed(45, 80)),
    ("sketches", "further seeds: s = D/2 stays between 55 and 90 % with each", ("s = D/2",), every_seed(55, 90)),
    ("text", "further seeds: the perplexities of s = D, D/2 and D/4 deviate by less than 1 %",
     ("s = D", "s = D/2", "s = D/4"), spread(1)),
    ("text", "attention first raises the perplexity by more than attention second: more than 4.6 %",
     ("attention first",), perplexity(4.6, ANY)),
    # written before the run of the model sizes and of further seeds of text
    ("sizes", "Figure 3a: GKA is ahead of the other models at every size",
     tuple(of_size(name, size) for size in SIZES for name in ("gka", *PEERS)), gka_first),
    ("sizes", "at size 32 GKA recalls 25 to 60 %", (of_size("gka", 32),), recalls(25, 60)),
    ("sizes", "at size 32 every other model less than 35 %", tuple(of_size(name, 32) for name in PEERS),
     recalls(-1, 35)),
    ("sizes", "at size 64 Mamba-2 with as large a memory recalls 30 to 85 %", (of_size("mamba2", 64),),
     recalls(30, 85)),
    ("sizes", "at size 64 GLA recalls less than 60 %", (of_size("gla", 64),), recalls(-1, 60)),
    ("sizes", "at size 64 GDN at the rate 0.0015 recalls more than 40 %", (of_size("gdn", 64, 1.5e-3),),
     recalls(40, 101)),
    ("sizes", "at size 128 GKA, DeltaNet and GDN recall more than 95 %",
     tuple(of_size(name, 128) for name in ("gka", "delta", "gdn")), recalls(95, 101)),
    ("grid", "further seeds: no decay, and half the heads, more than 90 % with each", ("no decay", "half the heads"),
     every_seed(90, 101)),
    ("text", "with a second seed: no decay costs 12 to 22 %", ("no decay",), with_seeds(2, perplexity(12, 22))),
    ("text", "attention first more than 20 %", ("attention first",), with_seeds(2, perplexity(20, ANY))),
    ("text", "and the ridges stay within 2 %", RIDGES, with_seeds(2, perplexity(-2, 2))),
)  # fmt: skip


def table(sketches: dict, text: dict, grid: dict, ridge: dict | None, sizes: dict | None = None) -> str:
    """One line per prediction, from the results of `variants.py` and `figure3a.py` that the README's commands write.

    Args:
        ridge: the results of the constant ridge; None if there are none.
        sizes: the results of the model sizes; None if there are none.
    """
    figures = {
        "sketches": Figures.from_rows(sketches["rows"], pairs=32),
        "text": Figures.from_rows(text["rows"]),
        "grid": Figures.from_rows(grid["rows"], pairs=64),
        "ridge": Figures.from_rows(ridge["rows"] if ridge else []),
        "sizes": figures_by_size(sizes),
    }
    outcomes = {}
    for number, (task, said, names, measure) in enumerate(PREDICTIONS, 1):
        found = figures[task]
        measured = [name for name in names if name in found.of]
        complete = len(measured) == len(names)
        outcomes[str(number)] = Outcome(said, measure(found, measured) if measured else [], final=complete)
    return predictions_table("prediction", outcomes)
