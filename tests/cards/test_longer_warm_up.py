"""What the documents say of the baselines: all mixers with a warm-up of 150 steps."""

from itertools import pairwise
from statistics import stdev

from card_text import path_of_readme, text_of
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.baselines.predictions import BEST_RATES, Perplexities
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.common.report import joined


def test_what_the_documents_say_of_the_longer_warm_up():
    """The first seed at rate 0.004, which all models have with both warm-ups, and the figures of the predictions."""
    card, readme = text_of("lattice"), " ".join(path_of_readme("baselines").read_text(encoding="utf-8").split())
    long = {(row["model"], row["lr"]): row for row in read("baselines_language")["rows"] if row["seed"] == 0}
    short = joined(read("lattice_language"), [read("coffee_language")])["rows"]
    short = {row["model"]: row for row in short if matches(row, {"context": 512, "lr": 0.004, "seed": 0})}

    def change(name):
        return long[name, 0.004]["perplexity"] / short[name]["perplexity"] - 1

    both = [name for name, lr in long if lr == 0.004 and name in short]
    assert "every model is better" in card and all(change(name) < 0 for name in both) and len(both) == 9
    block = ("dec", "dec-vconv", "gdn", "delta", "linear-decay")
    assert "the transformer by almost half" in card and -0.5 < change("transformer") < -0.45
    assert "the models with the block of Lattice by 10 to 14 %" in card
    assert {round(-100 * change(name)) for name in block} <= set(range(10, 15))
    assert "Mamba-2 and GKA by 2 to 4 %" in card and all(-0.04 < change(name) < -0.015 for name in ("mamba2", "gka"))

    def above(name, other):
        return long[name, 0.004]["perplexity"] / long[other, 0.004]["perplexity"] - 1

    assert "At rate 0.004 DEC is 3 % behind GKA here, and 2 % behind Mamba-2" in card
    assert [round(100 * above("dec", other)) for other in ("gka", "mamba2")] == [3, 2]
    gained = 1 - long["gka", 0.008]["perplexity"] / long["gka", 0.004]["perplexity"]
    assert "GKA gains another 3 % from a rate of 0.008" in card and round(100 * gained) == 3
    rates = (0.004, 0.008, 0.016)
    equal = [100 * (long["gka-equal", lr]["perplexity"] / long["gla", lr]["perplexity"] - 1) for lr in rates]
    assert (
        "it is 1.0 % worse at 0.004, 1.1 % better at 0.008, the best rate of both, and 2.5 % better at 0.016" in card
    )
    assert [f"{by:.1f}" for by in equal] == ["1.0", "-1.1", "-2.5"]
    assert above("dec-vconv", "dec") > 0 and above("gdn-vconv", "gdn") > 0
    models = Perplexities(read("baselines_language"))
    check_best_rates(models, card)
    check_equal_memory(models, card)
    check_convolutions(models, card, readme)
    shown = [(name, 0.004) for name in ("transformer", "dec-vconv", "dec", "gdn", "delta", "mamba2", "gka", "gla")]
    for row in (*shown, ("dec-vconv", 0.008)):
        assert f"{long[row]['perplexity']:.2f}" in readme
    for name in ("coffee", "transformer", "mamba2", "gka"):
        assert f"{long[name, 0.004]['perplexity']:.2f}" in text_of("coffee")


def check_best_rates(long, card):
    """What the card of Lattice says of the nine mixers at their best rates, from all seeds."""
    assert "The rates of the nine mixers with their own settings enclose the best one" in card
    assert not long.edge & set(BEST_RATES) and "they have three seeds:" in card
    assert {len(long.seeds[name]) for name in BEST_RATES} == {3}

    above = long.above
    order = ["mamba2", "gka", "dec"]
    assert "Every seed of one of them is below every seed of the next" in card
    assert all(max(long.seeds[a]) < min(long.seeds[b]) for a, b in pairwise(order))
    assert "GKA is 1.7 % behind it" in card and round(above("gka", "mamba2"), 1) == 1.7
    assert "DEC 3 % behind GKA" in card and round(above("dec", "gka")) == 3
    assert "DEC is 2 % ahead of GDN and of linear attention with decay, with every seed" in card
    for name in ("gdn", "linear-decay"):
        assert round(above(name, "dec")) == 2 and max(long.seeds["dec"]) < min(long.seeds[name])
    assert "These two are equal" in card and abs(above("gdn", "linear-decay")) < 0.5
    assert "is 4 % behind linear attention with decay" in card and round(above("delta", "linear-decay")) == 4
    assert "is 4 % behind GKA. One of its seeds is 4 % worse than the two others" in card
    best, middle, worst = sorted(long.seeds["gla"])
    assert round(above("gla", "gka")) == 4 and round(100 * (worst / middle - 1)) == 4 and middle / best < 1.005
    assert all(
        best < max(long.seeds[name]) and min(long.seeds[name]) < worst for name in ("dec", "gdn", "linear-decay")
    )
    assert "is 5 % behind DEC" in card and round(above("coffee", "dec")) == 5
    assert "The transformer is last, with seeds that differ by 4 %" in card
    assert max(long.of[name] for name in BEST_RATES) == long.of["transformer"]
    assert round(100 * (max(long.seeds["transformer"]) / min(long.seeds["transformer"]) - 1)) == 4
    short = Perplexities(joined(read("lattice_language"), [read("coffee_language")]))
    for ahead, behind, said in (("mamba2", "dec", (5, 10)), ("gka", "dec", (3, 9)), ("mamba2", "coffee", (10, 16)),
                                ("gka", "coffee", (9, 15)), ("transformer", "coffee", (-3, None))):  # fmt: skip
        assert round(above(behind, ahead)) == said[0] and (
            said[1] is None or round(short.above(behind, ahead)) == said[1]
        )


def check_equal_memory(long, card):
    """What the cards say of the models with as much memory as Lattice."""
    above, equal = long.above, ("mamba2-equal", "gka-equal", "coffee-equal")
    assert "(three seeds, and rates that enclose the best one)" in card
    assert {len(long.seeds[name]) for name in equal} == {3} and not long.edge & set(equal)
    mamba2, gka, _ = equal
    assert (
        "GKA is 3.3 % above it, DEC 5.3 %" in card
        and "every seed of Mamba-2 is below every seed of the others" in card
    )
    assert [f"{above(name, mamba2):.1f}" for name in (gka, "dec")] == ["3.3", "5.3"]
    small = [name for name in long.seeds if name not in ("mamba2", "gka", "gka-no-vconv", "transformer", mamba2)]
    assert max(long.seeds[mamba2]) < min(min(long.seeds[name]) for name in small)
    assert "It does not lose by a quarter of its own memory" in card and above(mamba2, "mamba2") < 0
    assert "GKA loses 1.2 % with half of its memory and stays 1.9 % below DEC on average" in card
    assert [f"{by:.1f}" for by in (above(gka, "gka"), above(gka, "dec"))] == ["1.2", "-1.9"]
    assert "its worst seed is as good as DEC's best one" in card
    assert abs(max(long.seeds[gka]) / min(long.seeds["dec"]) - 1) < 0.001
    assert "GKA is 2.8 % below GLA" in card and f"{above(gka, 'gla'):.1f}" == "-2.8"
    assert "it is 1.0 % worse, and 8 % behind GKA with equal memory" in card
    assert f"{above('coffee-equal', 'coffee'):.1f}" == "1.0" and round(above("coffee-equal", gka)) == 8
    text = text_of("coffee")
    assert "COFFEE is then 12 % above Mamba-2 and 8 % above GKA" in text and round(above("coffee-equal", mamba2)) == 12
    text = text_of("gka")
    for name in ("gka", "mamba2", mamba2, gka):
        assert f"{long.of[name]:.2f} ± {stdev(long.seeds[name]):.2f}" in text
    assert "ahead of Lattice (DEC) by 2 %, of GLA by 3 % and of Gated DeltaNet by 4 %" in text
    assert [round(above(name, gka)) for name in ("dec", "gla", "gdn")] == [2, 3, 4]


def check_convolutions(long, card, readme):
    """What the documents say of the models with another convolution of v."""
    above, without = long.above, ("gka-no-vconv", "gla-no-vconv", "mamba2-no-vconv-equal")
    names = ("dec-vconv", "gdn-vconv", "delta-vconv", "linear-decay-vconv", *without)
    assert "With another convolution of v (three seeds, and rates that enclose the best one)" in card
    assert "All 19 models have three seeds and rates that enclose the best one" in readme and len(long.seeds) == 19
    assert {len(long.seeds[name]) for name in names} == {3} and not long.edge & set(names)
    assert "GKA without it is 12 % worse and as good as the transformer" in card
    assert round(above("gka-no-vconv", "gka")) == 12 and abs(above("gka-no-vconv", "transformer")) < 0.5
    assert "GLA without it is 5.5 % worse, Mamba-2 with equal memory 4.1 %" in card
    assert [f"{above(name, name.replace('-no-vconv', '')):.1f}" for name in without[1:]] == ["5.5", "4.1"]
    assert "It is then 1.1 % ahead of DEC, less than their seeds differ by, and 3.0 % ahead of GDN" in card
    assert [f"{above(name, without[2]):.1f}" for name in ("dec", "gdn")] == ["1.1", "3.0"]
    assert min(long.seeds["dec"]) < max(long.seeds[without[2]])
    assert (
        "The delta rule is 4.4 % better with it, linear attention with decay 1.7 %. GDN is 1.8 % worse, and DEC 2.4 %"
        in card
    )
    assert "It lowers the delta rule's perplexity by 4.4 %" in readme and "It costs GDN 1.8 % and DEC 2.4 %" in readme
    found = [f"{above(f'{name}-vconv', name):.1f}" for name in ("delta", "linear-decay", "gdn", "dec")]
    assert found == ["-4.4", "-1.7", "1.8", "2.4"]
    assert (
        "(37.12, 37.40 and 37.13)" in readme and "(38.54, 38.28 and 38.47)" in readme and "best one (38.53)" in readme
    )
    for name, said in (("mamba2-equal", "37.12, 37.40 and 37.13"), ("gka-equal", "38.54, 38.28 and 38.47")):
        first, second, third = (f"{long.by_seed[name][seed]:.2f}" for seed in (0, 1, 2))
        assert said == f"{first}, {second} and {third}"
    assert f"{min(long.seeds['dec']):.2f}" == "38.53"
