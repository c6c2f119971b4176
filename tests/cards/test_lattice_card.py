"""What the card of Lattice says, from the results of its experiments."""

import math
from itertools import pairwise

from card_text import text_of
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.common.rates import chosen_rows, trained_and_failed
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
    recalled = {name: max(found.values()) for name, found in of_rate.items() if name != "sim"}
    assert "the transformer and Mamba-2" in text and "nearly all of them; then come the delta rule and ENC" in text
    assert sorted(recalled, key=recalled.get)[-4:] == ["enc", "delta", "mamba2", "transformer"]
    assert recalled["mamba2"] > 99 and recalled["transformer"] > 99 and recalled["delta"] < 95
    assert "learn next to nothing at any rate that was tried" in text
    assert max(recalled[name] for name in ("mamba2-equal", "gka-equal", "coffee")) < 3
    assert (
        "the more pairs DEC recalls, down to the smallest rate that was tried, and the delta rule down to 0.00075"
        in text
    )
    for name, smallest in (("delta", 7.5e-4), ("dec", 0.0)):
        rates = sorted(rate for rate in of_rate[name] if rate >= smallest)
        assert all(of_rate[name][a] > of_rate[name][b] for a, b in pairwise(rates))
    assert of_rate["delta"][3.75e-4] < of_rate["delta"][7.5e-4]
    assert "here 67 and 71 %" in text and [round(of_rate["gdn"][rate]) for rate in (1.5e-3, 7.5e-4)] == [67, 71]
    sim = of_rate["sim"]
    assert "almost half of the pairs at 0.0015, less than 5 % at 0.003 and 0.01, and diverges at 0.02" in text
    assert 45 < sim[0.0015] < 50 and max(sim[0.003], sim[0.01]) < 5 and math.isnan(sim[0.02])
    longer = [row for row in read("recall")["rows"] if row["pairs"] == 128]
    assert "four models have one rate and one seed each" in text and len(longer) == 4
    found = {(row["model"], row["lr"]): round(100 * row["accuracy"]) for row in longer}
    assert "The delta rule recalls 48 % and ENC 38 %; DEC and SIM learn nothing at 0.0015" in text
    assert found == {("delta", 0.00075): 48, ("enc", 0.003): 38, ("dec", 0.0015): 0, ("sim", 0.0015): 0}
