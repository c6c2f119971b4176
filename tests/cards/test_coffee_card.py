"""What the card of COFFEE says, from the results of its experiments."""

from card_text import text_of
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.common.averages import median
from hf_memmix.training.experiments.common.rates import chosen_rows


def test_what_the_card_of_coffee_says():
    text, runs = text_of("coffee"), read("coffee_glyphs")["runs"]
    accuracy = {name: median(run["last"]["accuracy"]) for name, run in runs.items()}
    assert "S6 is slightly better than COFFEE" in text and accuracy["S6 n=2"] > accuracy["coffee n=2"]
    digits = {name: median(run["last"]["accuracy"]) for name, run in read("coffee_digits")["runs"].items()}
    assert "on the digits COFFEE is better" in text and digits["coffee n=2"] > digits["S6 n=2"]
    tables = {name: run for name, run in read("coffee_table1")["runs"].items() if "fixed" in name or "coffee" in name}
    solved = {name.partition("fixed=")[2].partition(" ")[0]: run["seeds_at_0.99"] for name, run in tables.items()}
    assert "not all seeds reach 0.99" in text and solved[""] < 8 and solved["None"] == solved["8"] == 8


def test_what_the_card_of_coffee_says_of_pixels():
    runs = read("coffee_mnist_5k")["runs"]
    for name, figure in (("coffee n=2", "0.915"), ("S6 n=2", "0.333"), ("coffee with output filter n=2", "0.912")):
        accuracies = runs[name]["last"]["accuracy"]
        assert figure in text_of("coffee") and f"{sum(accuracies) / len(accuracies):.3f}" == figure
    pixels = read("coffee_pixels")["rows"]
    found = {name: [r["accuracy"] for r in chosen_rows(pixels, model=name)] for name in ("coffee", "mamba2", "s6")}
    assert "Mamba-2 is ahead of COFFEE here with every one of five seeds" in text_of("coffee")
    assert min(found["mamba2"]) > max(found["coffee"]) and {len(values) for values in found.values()} == {5}
    filtered = [row["accuracy"] for row in chosen_rows(pixels, model="coffee-filter")]
    assert "is 4 points better" in text_of("coffee") and round(20 * (sum(filtered) - sum(found["coffee"]))) == 4
    plain = {row["seed"]: row["accuracy"] for row in chosen_rows(pixels, model="coffee")}
    worse = [row["accuracy"] < plain[row["seed"]] for row in chosen_rows(pixels, model="coffee-filter")]
    assert "but worse with three of the five seeds" in text_of("coffee") and worse.count(True) == 3
    assert "S6 does not leave chance" in text_of("coffee") and max(found["s6"]) < 0.12
