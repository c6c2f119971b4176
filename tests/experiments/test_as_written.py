"""ENC with and without its limits: the rows of the experiment, and what its table says of a run."""

import argparse
import math

import numpy
import pytest

from hf_memmix.training.experiments.common.text import train_tokens
from hf_memmix.training.experiments.lattice import as_written
from hf_memmix.training.experiments.lattice.report import as_written as section

SIZES = {"hidden_size": 16, "layers": 1, "heads": 2, "context": 16, "batch_size": 2, "steps": 3}


def results(norms):
    """Results with these largest norms of the gradients, by model and rate."""
    rows = [
        {"model": name, "lr": lr, "seed": 0, "curve": [[1, 9.0], [60, 6.5]], "gradient_norms": [0.5, norm]}
        for (name, lr), norm in norms.items()
    ]
    environment = {"hardware": "a processor", "commit": "abc1234"}
    return {"settings": SIZES, "environment": environment, "rows": rows}


@pytest.mark.parametrize(
    ("written", "limited", "said"),
    [
        (
            1e6,
            0.9,
            "a gradient norm passes 100 at 0.016, with the two limits at no rate. There the last loss as written",
        ),
        (1e6, 1e3, "a gradient norm passes 100 at 0.016, with the two limits at 0.016."),
        (3.0, 0.9, "All 4 trainings end with a finite loss. As written, no gradient norm passes 100"),
    ],
)
def test_the_sentence_follows_from_the_norms(written, limited, said):
    norms = {("enc", 0.004): 0.8, ("enc-as-written", 0.004): 0.9}
    text = section(results(norms | {("enc", 0.016): limited, ("enc-as-written", 0.016): written}))
    assert said in text
    assert f"| enc-as-written | 0.016 | 6.50 | {written:.1e} |" in text


def test_the_sentence_counts_losses_that_are_not_finite_and_gives_the_distance_of_the_others():
    found = results({(name, lr): 1e6 for name in ("enc", "enc-as-written") for lr in (0.004, 0.016)})
    found["rows"][0]["curve"][-1][1], found["rows"][3]["curve"][-1][1] = 6.25, math.nan
    said = section(found).splitlines()[-1]
    assert said.startswith("3 of 4 trainings end with a finite loss.") and said.endswith("is +0.25 and +nan.")


def test_both_forms_train_from_the_same_weights_and_text(tmp_path):
    numpy.save(tmp_path / "text.npy", (numpy.arange(600) % 50).astype(numpy.uint16))
    train_tokens.cache_clear()
    args = argparse.Namespace(**SIZES, text=tmp_path / "text.npy", lrs=[1e-3, 4e-3], seeds=[0, 1], deadline=math.inf)
    rows = as_written.rows_to_run([], args)
    assert [row["model"] for row in rows] == ["enc", "enc-as-written"] * 4
    assert [row["seed"] for row in rows] == [0] * 4 + [1] * 4
    limited, written = (as_written.run(row, args) for row in rows[:2])
    assert limited["steps"] == written["steps"] == 3 and limited["parameters"] == written["parameters"]
    assert abs(limited["curve"][0][1] - written["curve"][0][1]) < 0.05  # the first step is still that of the start
    assert limited["curve"] != written["curve"]
