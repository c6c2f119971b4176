"""What the card of GKA says, from the results of its experiments."""

import math
from itertools import pairwise

import pytest

from card_text import recalled, text_of
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.gka.figure3a_report import joined as joined_sizes
from hf_memmix.training.experiments.gka.predictions import Figures
from hf_memmix.training.experiments.gka.variants_report import share_at_chance, with_recall_rows


def test_what_the_card_of_gka_says():
    text, sizes = text_of("gka"), {}
    for row in read("gka_sketch"):
        sizes.setdefault(row["sketch"], {})[row["pass"], row["B"]] = row
    plain = sizes[128]
    for key, said in ((("decode_graph", 64), "0.45 and 0.23"), (("fwd+bwd", 4), "0.73 and 0.64")):
        shares = [f"{sizes[s][key]['ms'] / plain[key]['ms']:.2f}" for s in (64, 32)]
        assert said == " and ".join(shares) and said in text
    stored = [sizes[s]["fwd", 4]["state_bytes_per_head"] / plain["fwd", 4]["state_bytes_per_head"] for s in (64, 32)]
    assert "0.38 and 0.16 of the bytes" in text and [round(share, 2) for share in stored] == [0.38, 0.16]
    assert "take 0.2 ms instead of 0.05 at B = 1" in text
    assert [round(sizes[s]["decode", 1]["ms"], d) for s, d in ((32, 1), (64, 1), (128, 2))] == [0.2, 0.2, 0.05]

    solvers = read("gka_solvers")
    counts = solvers["settings"]["iterations"]

    def difference(panel, solver):
        (row,) = (
            r for r in solvers["rows"] if (r["panel"], r.get("solver"), r.get("way")) == (panel, solver, "implicit")
        )
        return row["differences"][counts.index(30)]

    assert "CG is off by 1e-6 in one layer and 9e-6 in the network" in text
    assert "CH is off by 6e-4 and 2.4e-3 after the paper's 30 iterations" in text
    assert [f"{difference(panel, 'CG'):.0e}" for panel in ("layer", "network")] == ["1e-06", "9e-06"]
    assert [f"{difference(panel, 'CH'):.1e}" for panel in ("layer", "network")] == ["6.1e-04", "2.4e-03"]
    forward = {row["solver"]: row["residuals"] for row in solvers["rows"] if row["panel"] == "forward"}
    assert all(cg < ch for cg, ch in zip(forward["CG"][4:], forward["CH"][4:], strict=True))
    rounded = {row["solver"]: row["residuals"][-1] for row in solvers["rows"] if row["panel"] == "rounded"}
    assert {f"{value:.2f}" for value in rounded.values()} == {"0.04"}
    assert "in bf16 the residuals of both solvers stop near 0.04" in text
    ridges = {(row["ridge"], row["constant"]): row for row in solvers["rows"] if row["panel"] == "ridge"}
    constant, adaptive = ridges[0.25, True], ridges[0.02, False]
    assert "385 after 1024, beside 51" in text and "which is 180 times as large" in text
    assert (round(constant["condition"]), round(adaptive["condition"])) == (385, 51)
    assert round(constant["residuals"][29] / adaptive["residuals"][29], -1) == 180
    assert "0.24 at 0.01 and 0.63 at 0.1" in text
    assert [round(ridges[a, False]["true_residual"], 2) for a in (0.01, 0.1)] == [0.24, 0.63]


def percents(figures: Figures, name: str) -> list[int]:
    """The accuracy of each seed in percent."""
    return [round(100 * row["accuracy"]) for _, row in sorted(figures.of[name].items())]


def gains(figures: Figures, name: str, other: str) -> list[int]:
    """By how many points a variant recalls more than another one, at each seed that both have."""
    ours, theirs = figures.of[name], figures.of[other]
    return [round(100 * (ours[seed]["accuracy"] - theirs[seed]["accuracy"])) for seed in sorted(ours.keys() & theirs)]


def costs(figures: Figures, name: str) -> list[float]:
    """By how many percent the perplexity of a variant is above that of "s = D", at each seed of the variant."""
    plain = figures.of["s = D"]
    return [
        100 * (row["perplexity"] / plain[seed]["perplexity"] - 1) for seed, row in sorted(figures.of[name].items())
    ]


@pytest.fixture(scope="module")
def grid():
    return Figures.from_rows(with_recall_rows(read("gka_variants_recall"), read("recall"))["rows"])


def test_recall_of_the_variants(grid):
    text = text_of("gka")
    sketches = Figures.from_rows(read("gka_variants_sketches")["rows"])
    assert "s = D recalls 98 and 99 %, s = D/2 71 and 80 %, and s = D/4 nothing and 23 %" in text
    assert [percents(sketches, name) for name in ("s = D", "s = D/2", "s = D/4")] == [[98, 99], [71, 80], [0, 23]]
    of_seed = {name: percents(grid, name) for name in ("s = D", "as in Figure 3a", "no decay", "half the heads")}
    assert of_seed == {
        "s = D": [65, 79, 0], "as in Figure 3a": [97, 58, 50], "no decay": [98, 97, 68], "half the heads": [100, 0, 0]
    }  # fmt: skip
    for said in ("recalls 65 % with the first seed, 79 % with the second and nothing with the third",
                 "That recalls 97, 58 and 50 %", "GKA recalls 98, 97 and 68 %",
                 "recall 100 % with the first seed and nothing with the two others"):  # fmt: skip
        assert said in text, said
    starts = {name: [round(share_at_chance(row)) for _, row in sorted(grid.of[name].items())] for name in of_seed}
    assert "after 25 % of the training (79 %), after 40 % (65 %), and never" in text
    assert starts["s = D"] == [40, 25, 100]
    assert "after 15, 35 and 55 %; no decay after 15, 15 and 25 %" in text
    assert (starts["as in Figure 3a"], starts["no decay"]) == ([15, 35, 55], [15, 15, 25])
    assert "half the heads leaves it after 62 %" in text and int(share_at_chance(grid.of["half the heads"][0])) == 62
    for name in (*of_seed, "s = D/2", "s = D/4"):  # of the seeds of one variant the earlier one recalls more
        figures = grid if name in of_seed else sketches
        rows = sorted(figures.of[name].values(), key=lambda row: -row["accuracy"])
        assert all(share_at_chance(one) <= share_at_chance(other) for one, other in pairwise(rows)), name
    assert "by 33, 18 and 68 points" in text and gains(grid, "no decay", "s = D") == [33, 18, 68]
    assert "it gains 1, 39 and 19 points over" in text and gains(grid, "no decay", "as in Figure 3a") == [1, 39, 19]
    assert "(`no alpha`, 18 points more)" in text and gains(grid, "no alpha", "s = D") == [18]
    assert "they gain 12 to 19 points, and the three seeds of the default options lie 79 points apart" in text
    names = ("slow decay", "no alpha", "v not convolved")
    assert [gains(grid, name, "s = D")[0] for name in names] == [12, 18, 19]
    assert "47 % at 0.0015, nothing at 0.00225" in text and round(grid.accuracy("rate x 0.5")) == 47
    assert "at 0.006 GKA recalls as much as at 0.003, at 0.0045 and 0.01 nothing" in text
    assert gains(grid, "rate x 2", "s = D") == [1]
    assert "DEC falls from 77 to 41 % and the delta rule from 84 % to chance" in text
    shared = {
        row["model"]: row["accuracy"]
        for row in read("recall")["rows"]
        if matches(row, {"pairs": 64, "lr": 1.5e-3, "seed": 0})
    }
    assert [round(100 * shared[name]) for name in ("dec", "delta")] == [77, 84]
    own = [grid.accuracy(f"{name}, own projection of q, rate x 0.5") for name in ("DEC", "delta")]
    assert [round(own[0]), own[1] < 1] == [41, True]
    assert max(grid.accuracy(f"rate x {rate}") for rate in (0.75, 1.5)) < 0.1


def test_text_of_the_variants():
    text = text_of("gka")
    language = Figures.from_rows(read("gka_variants_text")["rows"])
    assert "rises by 1.9 and 2.3 %" in text
    assert [f"{language.above(f's = D/{i}'):.1f}" for i in (2, 4)] == ["1.9", "2.3"]
    half, quarter = costs(language, "s = D/2"), costs(language, "s = D/4")
    assert "it is above that of s = D with every seed" in text and min(half + quarter) > 0
    assert "which of D/2 and D/4 is lower depends on the seed" in text
    assert {one < other for one, other in zip(half, quarter, strict=True)} == {True, False}
    assert "costs the most of what changes the layer, 17 and 21 % with the two seeds" in text
    assert [round(cost) for cost in costs(language, "no decay")] == [17, 21]
    others = [language.above(name) for name in language.of if name != "s = D" and "attention" not in name]
    assert max(others) == language.above("no decay")
    assert "**No alpha (F.3)** costs 4 and 5 %" in text
    assert [round(cost) for cost in costs(language, "no alpha")] == [4, 5]
    assert "0.05 and 0.1 are 0.8 % better than 0.02, and 0.01 is 1.0 % worse, each with the same sign" in text
    ridges = {name: costs(language, f"ridge {name}") for name in ("0.05", "0.1", "0.01")}
    assert [f"{language.above(f'ridge {name}'):.1f}" for name in ridges] == ["-0.8", "-0.8", "1.0"]
    assert max(ridges["0.05"] + ridges["0.1"]) < 0 < min(ridges["0.01"])
    plain = [row["perplexity"] for row in language.of["s = D"].values()]
    assert "The seeds of s = D lie 1.4 % apart" in text and f"{100 * (max(plain) / min(plain) - 1):.1f}" == "1.4"
    assert "the last layer costs least, 1.0 and 0.9 %, the second 4.6 and 1.0 %, the first most, 33 and 22 %" in text
    places = {place: [f"{cost:.1f}" for cost in costs(language, f"attention {place}")] for place in ("last", "second")}
    assert places == {"last": ["1.0", "0.9"], "second": ["4.6", "1.0"]}
    assert [round(cost) for cost in costs(language, "attention first")] == [33, 22]
    both = costs(language, "attention second and last")
    assert "cost 4.5 and 5.5 %" in text and [f"{cost:.1f}" for cost in both] == ["4.5", "5.5"]
    ridge = Figures.from_rows(read("gka_variants_ridge")["rows"])
    assert "3.4 % less perplexity, and its largest gradient is 1.1 times" in text
    assert f"{ridge.above('constant ridge 0.25'):.1f}" == "-3.4"
    assert f"{ridge.norm('constant ridge 0.25') / ridge.norm('s = D'):.1f}" == "1.1"


def test_recall_by_model_size(grid):
    text = text_of("gka")
    found = joined_sizes([read(name) for name in ("gka_figure3a", "gka_variants_recall", "recall")])["rows"]
    models = {(row["model"], row["hidden_size"], row["lr"]): row for row in found if row["seed"] == 0}
    accuracy = {key: 100 * row["accuracy"] for key, row in models.items() if "accuracy" in row}
    wide = [accuracy[key] for key in (("gka", 128, 3e-3), ("delta", 128, 1.5e-3), ("gdn", 128, 1.5e-3),
                                      ("gla", 128, 3e-3))]  # fmt: skip
    assert "GKA, DeltaNet, GDN and GLA recall 98 to 100 %" in text and min(wide) > 97.5 and max(wide) <= 100
    assert "a fifth of the training" in text and round(models["gka", 128, 3e-3]["steps"] / 3051, 1) == 0.2
    assert "at 0.003 it recalls 47 %. Mamba-2 recalls 91 %" in text
    assert [round(accuracy[key]) for key in (("gdn", 128, 3e-3), ("mamba2", 128, 1e-2))] == [47, 91]
    assert "with 23 % at the largest of three rates; at 0.003 it recalls 0.3 %" in text
    assert sorted(lr for name, size, lr in accuracy if (name, size) == ("gka", 32)) == [3e-3, 6e-3, 1e-2]
    assert round(accuracy["gka", 32, 1e-2]) == 23
    assert "less than DeltaNet's 6.3 % and GLA's 3.0 %" in text
    assert [f"{accuracy[name, 32, 3e-3]:.1f}" for name in ("gka", "delta", "gla")] == ["0.3", "6.3", "3.0"]
    assert "No model recalls a quarter" in text and max(a for (_, size, _), a in accuracy.items() if size == 32) < 25
    assert "the first seeds of GKA, GDN and DeltaNet recall 97, 96 and 94 %, the two others at 0.00075" in text
    assert "DeltaNet recalls 90 % at half of its rate" in text
    first = {
        (row["model"], row["lr"]): 100 * row.get("accuracy", math.nan)
        for row in read("recall")["rows"]
        if matches(row, {"pairs": 64, "seed": 0})
    }
    again = {rate: first["gdn", rate] for rate in (7.5e-4, 1.5e-3)}
    for row in read("gka_figure3a")["rows"]:
        if row["hidden_size"] == 64:
            first[row["model"], row["lr"]] = 100 * row["accuracy"]
    assert [round(first[key]) for key in (("gdn", 7.5e-4), ("delta", 7.5e-4), ("delta", 3.75e-4))] == [96, 94, 90]
    assert "the same seed recalled 71 % there, 86 % at half of the rate, and 67 instead of 37 % at 0.0015" in text
    half = next(row for row in read("recall_gdn")["rows"] if row["lr"] == 3.75e-4)
    assert [round(value) for value in (*again.values(), first["gdn", 1.5e-3])] == [71, 67, 37]
    assert f"{100 * half['accuracy']:.1f}" == "86.5"

    def with_later_kernels(model):
        return [round(accuracy) for accuracy in recalled(model)]

    assert "where two other seeds recall 90 and 0 %" in text and with_later_kernels("gdn")[1:] == [90, 0]
    assert "GLA's first seed recalls 54 %, and 56, 0 and 53 % with later kernels" in text
    assert round(accuracy["gla", 64, 3e-3]) == 54 and with_later_kernels("gla") == [56, 0, 53]
    assert "Over three seeds DeltaNet's mean is 78 %, GKA's 68 % (no decay, with alpha: 88 %, above)" in text
    assert [round(grid.accuracy(name)) for name in ("as in Figure 3a", "no decay")] == [68, 88]
    assert round(sum(with_later_kernels("delta")) / 3) == 78
    assert "Mamba-2 recalls 8 % at the largest of two rates" in text and round(accuracy["mamba2", 64, 1e-2]) == 8
    assert "with four times this memory three seeds recall 100, 52 and 0 %" in text
    assert with_later_kernels("mamba2") == [100, 52, 0]
