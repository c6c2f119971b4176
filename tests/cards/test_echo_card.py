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

    assert "four ran at a gap of 512, and at 4096 four of SKA with the mask and three of the others" in text
    assert (
        "K = 2 recalls with one of four seeds at 16 pairs and with none at 4; K = 1 does with two of four in each"
        in text
    )
    assert "Mamba-2 answers 16 pairs with all seeds, and 4 pairs with three of four" in text
    recalling = {"ska-unmasked": (0, 1), "ska-unmasked-k1": (2, 2), "ssm": (3, 4)}
    for place, pairs in enumerate((4, 16)):
        assert {len(of(model, pairs, 512)) for model in grid["settings"]["models"]} == {4}
        for model, counts in recalling.items():
            assert sum(accuracy > 90 for accuracy in of(model, pairs, 512)) == counts[place]
    assert [len(of(model, 4, 4096)) for model in grid["settings"]["models"]] == [3, 3, 3, 4]
    assert (
        "At 4096 no seed of SKA without the mask leaves the plateau, and Mamba-2 is above 95 % with all three"
        in text.replace("*", "")
    )
    assert max(of("ska-unmasked", 4, 4096) + of("ska-unmasked-k1", 4, 4096)) < 31 and min(of("ssm", 4, 4096)) > 95
    long = [row for row in grid["rows"] if matches(row, {"model": "ska", "gap": 4096})]
    assert {row["lr"] for row in long if row["accuracy"] > 0.99} == {1e-3}
    assert all(row["steps"] < 3400 / 2 for row in long if row["accuracy"] > 0.99)
    assert [accuracy > 99 for accuracy in sorted(of("ska", 16, 512))] == [False, False, False, True]
    assert min(of("ska", 16, 512)) < 14 and min(of("ssm", 16, 512)) > 99
    assert grid_accuracies(read("echo_mqar"), "ssm", 4, 4096)[0] > 60
