"""What the card of Echo says, from the results of its experiments."""

from card_text import text_of
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.echo.report import columns, grid_accuracies, mean_of
from hf_memmix.training.experiments.echo.suite import TRAINED


def test_what_the_card_of_echo_says():
    """The first table is without the oracle; with it the other claims hold."""
    text = text_of("echo")
    assert text.index("<!-- begin echo_mask -->") < text.index("<!-- begin results echo_transfer -->")
    without = [row for row in read("echo_ablation")["rows"] if row["variant"] == "no action mask"]
    found = columns(read("echo_transfer")["rows"])

    def at(rows, length):
        return sum(mean_of(row, tasks=TRAINED, length=length) for row in rows) / len(rows)

    assert "ahead of the two others at 4096 tokens only" in text
    others = [rows for (model, _), rows in found.items() if model != "ska"]
    for length in (64, 256, 1024, 4096):
        assert (at(without, length) > max(at(rows, length) for rows in others)) == (length == 4096)
    assert "the rate that they choose is the worse one on long sequences" in text
    (first, second) = (rows for (model, _), rows in found.items() if model == "ssm")
    assert at(first, 1024) < at(second, 1024) and max(row["dev_loss"] for row in [*first, *second]) < 0.01
    masked = next(rows for (model, _), rows in found.items() if model == "ska")
    assert min(mean_of(row, tasks=TRAINED, length=4096) for row in masked) > 80
    for figure in ("nu^2", "`sigma_floor`", "last two layers", "oracle"):
        assert figure in text
    assert "K = 1 without the mask is not better" in text
    lag_one = [row for row in read("echo_ablation")["rows"] if row["variant"] == "no action mask, K = 1"]
    by_seed = sorted(mean_of(row, tasks=TRAINED, length=1024) for row in lag_one)
    assert at(lag_one, 1024) < at(without, 1024) and by_seed[0] < 5 and by_seed[-1] > 95


def test_what_the_card_of_echo_says_of_recall():
    text, grid = text_of("echo"), read("echo_mqar_answers")

    def of(model, pairs, gap):
        return grid_accuracies(grid, model, pairs, gap)

    models = grid["settings"]["models"]
    assert "SKA without the mask as well, and five seeds" in text
    assert {len(of(name, *cell)) for name in models for cell in ((4, 512), (16, 512), (4, 4096))} == {5}
    assert "K = 2 recalls with one of five seeds at 16 pairs and with none at 4" in text
    assert "K = 1 does with two of five and three of five" in text
    assert "Mamba-2 answers 16 pairs with all seeds, and 4 pairs with four of five" in text
    recalling = {"ska-unmasked": (0, 1), "ska-unmasked-k1": (3, 2), "ssm": (4, 5)}
    for place, pairs in enumerate((4, 16)):
        for model, counts in recalling.items():
            assert sum(accuracy > 90 for accuracy in of(model, pairs, 512)) == counts[place]
    assert "At 4096 no seed of SKA without the mask recalls more than 42 %" in text
    without = sorted(of("ska-unmasked", 4, 4096) + of("ska-unmasked-k1", 4, 4096))
    assert "all but one are at the level of a guess" in text and round(without[-1]) == 42 and without[-2] < 31
    rate = read("echo_mqar_rate")
    assert "above 95 % there with three of five seeds at 0.001, and above 99 % with two of three at 0.002" in text
    assert sum(accuracy > 95 for accuracy in of("ssm", 4, 4096)) == 3
    assert sum(accuracy > 99 for accuracy in grid_accuracies(rate, "ssm", 4, 4096)) == 2
    assert "at 0.002 two of three seeds stayed on the plateau to the end" in text
    assert [accuracy > 99 for accuracy in sorted(grid_accuracies(rate, "ska", 4, 4096))] == [False, False, True]
    first = [
        round(100 * row["accuracy"])
        for found in (grid, rate)
        for row in found["rows"]
        if matches(row, {"model": "ssm", "gap": 4096, "lr": 2e-3, "seed": 0})
    ]
    assert "recalled 3 % at 0.002 in the run of the first table and 100 % in that of the second" in text
    assert first == [3, 100]
    long = [row for row in grid["rows"] if matches(row, {"model": "ska", "gap": 4096})]
    assert {row["lr"] for row in long if row["accuracy"] > 0.99} == {1e-3}
    assert all(row["steps"] < 3400 / 2 for row in long if row["accuracy"] > 0.99)
    assert "with all five seeds at the rate 0.001" in text and min(of("ska", 4, 4096)) > 99
    assert "one seed of five is near 100 %, and two are near 13 %" in text
    assert [round(accuracy) for accuracy in sorted(of("ska", 16, 512))] == [13, 13, 78, 94, 100]
    assert min(of("ssm", 16, 512)) > 99
    assert grid_accuracies(read("echo_mqar"), "ssm", 4, 4096)[0] > 60
