"""What the card of Lattice says, from the results of its experiments."""

import math

from card_text import recalled, text_of
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.common.rates import at_edge, chosen_rows, trained_and_failed
from hf_memmix.training.experiments.common.report import joined


def test_what_the_card_of_lattice_says():
    text, results = text_of("lattice"), joined(read("lattice_language"), [read("coffee_language")])
    rows, _ = trained_and_failed(results)

    def of_model(name, context=512):
        return [row["perplexity"] for row in chosen_rows(rows, model=name, context=context)]

    def mean(name, context=512):
        return sum(of_model(name, context)) / len(of_model(name, context))

    block = (
        "linear",
        "linear-decay",
        "delta",
        "ttt",
        "dec",
        "enc",
        "sim",
        "gdn",
        "dec-small",
        "enc-small",
        "sim-small",
    )
    measured = {context: [name for name in block if of_model(name, context)] for context in (512, 2048, 8192)}
    assert "DEC has the lowest mean at the two longer contexts" in text
    for context in (2048, 8192):
        assert min(measured[context], key=lambda name: mean(name, context)) == "dec"
        assert max(measured[context], key=lambda name: mean(name, context)) == "linear"
    seeds = max(of_model("dec")) - min(of_model("dec"))
    assert all(abs(mean(name) - mean("dec")) <= seeds for name in ("gdn", "linear-decay", "dec-small", "enc-small"))
    assert (
        "only the transformer and Mamba-2 have a lower mean at 2048 than at 512, by less than their seeds differ"
        in text
    )
    longer = [name for name in results["settings"]["models"] if of_model(name, 2048)]
    better = [name for name in longer if mean(name, 2048) < mean(name)]
    assert sorted(better) == ["mamba2", "transformer"]
    assert all(mean(name) - mean(name, 2048) < max(of_model(name)) - min(of_model(name)) for name in better)
    assert all(mean(name, 8192) > mean(name, 2048) for name in longer if of_model(name, 8192))


def test_what_the_card_of_lattice_says_of_recall():
    text = text_of("lattice")
    of_rate: dict[str, dict[float, float]] = {}
    for row in read("recall")["rows"]:
        if matches(row, {"pairs": 64, "seed": 0}):
            of_rate.setdefault(row["model"], {})[row["lr"]] = 100 * row.get("accuracy", math.nan)

    def mean(model, pairs=64):
        return sum(recalled(model, pairs)) / len(recalled(model, pairs))

    models = list(of_rate)
    assert "With 64 and 128 pairs there are three seeds, with 32 pairs one" in text
    assert {len(recalled(name)) for name in models} == {3} and len(models) == 14
    assert "There the transformer recalls all but 0.2 % with every seed" in text
    assert {f"{100 - value:.1f}" for value in recalled("transformer")} <= {"0.1", "0.2"}
    fixed = sorted((name for name in models if name != "transformer"), key=mean)
    spreads = {name: max(recalled(name)) - min(recalled(name)) for name in fixed if mean(name) > 5}
    assert "ENC has the highest mean, and it is the only one that recalls about the same with every seed" in text
    assert fixed[-1] == min(spreads, key=spreads.get) == "enc"
    assert spreads.pop("enc") < 3 and min(spreads.values()) > 15
    for said, name in (("The delta rule recalls 53 to 94 %", "delta"), ("linear attention 51 to 88 %", "linear"),
                       ("DEC 52 to 81 %", "dec")):  # fmt: skip
        found = [round(value) for value in (min(recalled(name)), max(recalled(name)))]
        assert said in text and said.endswith(f"{found[0]} to {found[1]} %")
    assert "GDN, Mamba-2, GKA and GLA each hardly learn the task with one seed of three" in text
    for name in ("gdn", "mamba2", "gka", "gla"):
        low, second, _ = sorted(recalled(name))
        assert low < 4 and second > 50, name
    assert "recalls 100, 52 and 0 %" in text and [round(value) for value in recalled("mamba2")] == [100, 52, 0]
    assert "learn next to nothing with any seed" in text and max(recalled("mamba2-equal") + recalled("coffee")) < 1
    assert "recalls 2 % with the first seed, which chose its rate, and 28 and 33 %" in text
    assert [round(value) for value in recalled("gka-equal")] == [2, 28, 33]
    assert "with these 67 and 71 %, both times that it was trained" in text
    again = {row["lr"]: row for row in read("recall_gdn")["rows"] if row["seed"] == 0}
    for rate, said in ((1.5e-3, 67), (7.5e-4, 71)):
        assert round(of_rate["gdn"][rate]) == said and 100 * again[rate]["accuracy"] == of_rate["gdn"][rate]
    sim = of_rate["sim"]
    assert "almost half of the pairs at 0.0015, less than 5 % at 0.003 and 0.01, and diverges at 0.02" in text
    assert 45 < sim[0.0015] < 50 and max(sim[0.003], sim[0.01]) < 5 and math.isnan(sim[0.02])
    assert "the delta rule and ENC recall 38 % and DEC 27 %" in text
    assert [round(mean(name, 128)) for name in ("delta", "enc", "dec")] == [38, 38, 27]
    longer = [row for row in read("recall")["rows"] if row["pairs"] == 128]
    for name in ("delta", "enc", "dec"):
        assert not at_edge([row for row in longer if row["model"] == name], chosen_rows(longer, model=name)[0]["lr"])
    assert "DEC does so at 0.00075 and learns nothing at 0.0015" in text
    assert max(row["accuracy"] for row in longer if matches(row, {"model": "dec", "lr": 1.5e-3})) < 0.001
    assert "SIM, GKA and Mamba-2 learn next to nothing at any rate that was tried" in text
    assert max(row["accuracy"] for row in longer if row["model"] in ("sim", "gka", "mamba2")) < 0.02
    assert 0.02 not in {row["lr"] for row in longer if row["model"] == "mamba2"}
