"""The comparison of mixers as replacements of attention: rows run, dev text chooses rates, tables."""

import argparse
import math

import numpy
import pytest

from hf_memmix.training.experiments.conversion import table as conversion_table
from hf_memmix.training.experiments.conversion import table_report as conversion_report


def arguments(tmp_path, **values):
    numpy.save(tmp_path / "text.npy", numpy.random.default_rng(0).integers(2, 4096, 4000).astype("uint16"))
    numbers = {"align_steps": 1, "distill_steps": 1, "batch_size": 2, "block_size": 32, "measured_tokens": 200}
    numbers |= {"samples": 1, "seeds": 2, "further_rates": 1, "deadline": math.inf, "text": tmp_path / "text.npy"}
    return argparse.Namespace(**{**numbers, "mixers": ["gla", "gka"], "scales": [1.0, 2.0], **values})


def done(mixer, kept, scale, seed, loss):
    probe = {"niah": {"exact": 0.5, "gain": loss, "choice": None}}
    return {
        "mixer": mixer,
        "kept": kept,
        "scale": scale,
        "seed": seed,
        "finite": True,
        "dev_loss": loss,
        "heldout_ppl_ratio": loss,
        "heldout_kl": loss / 10,
        "training_seconds": 1.0,
        "kept_layers": [0] * int(4 * kept),
        "trained_tokens": 10,
        "probes": probe,
    }


def test_the_rate_is_chosen_on_dev_text_where_all_layers_are_converted(tmp_path):
    args = arguments(tmp_path)
    first = conversion_table.rows_to_run([], args)
    assert [row["scale"] for row in first] == [0.0, 1.0, 1.0, 2.0, 2.0]
    rows = [done("gla", 0.0, 1.0, 0, 3.0), done("gla", 0.0, 2.0, 0, 2.0), done("gka", 0.0, 1.0, 0, 1.0)]
    further = [row for row in conversion_table.rows_to_run(rows, args) if row not in first]
    assert further == [{"mixer": "gla", "kept": 0.0, "scale": 4.0, "seed": 0}]  # the best rate was the largest
    rows.append(done("gla", 0.0, 4.0, 0, 2.5))
    first += further
    later = [row for row in conversion_table.rows_to_run(rows, args) if row not in first]
    assert {row["mixer"] for row in later} == {"gla"} and {row["scale"] for row in later} == {2.0}
    assert [(row["seed"], row["kept"]) for row in later] == [
        *((0, kept) for kept in conversion_table.KEPT[1:]),  # of seed 0, the first is done
        *((1, kept) for kept in conversion_table.KEPT),
    ]


@pytest.mark.parametrize("mixer, kept", [("attention", 1.0), ("gla", 0.5)])
def test_a_row_runs(mixer, kept, tmp_path):
    row = {"mixer": mixer, "kept": kept, "scale": 1.0, "seed": 0}
    result = conversion_table.run(row, arguments(tmp_path))
    assert set(result["probes"]) == {"niah", "mqar", "mentions"}
    if mixer != "attention":
        assert result["finite"] and len(result["kept_layers"]) == 3 and result["trained_tokens"] == 128
        assert 0.5 < result["heldout_ppl_ratio"] < 100 and result["dev_loss"] > 0


def test_table_and_plot_hold_the_chosen_rate_alone(tmp_path):
    rows = [done("gla", 0.0, 1.0, 0, 3.0), done("gla", 0.0, 2.0, 0, 2.0), done("gla", 0.0, 2.0, 1, 2.5)]
    rows += [done("gla", 0.5, 2.0, 0, 1.5), {"mixer": "attention", "kept": 1.0, "probes": rows[0]["probes"]}]
    results = {"rows": rows, "environment": {"hardware": "none", "commit": "none"}}
    text = conversion_report.table(results)
    assert "| gla | 0 (0 %) | x 2 (edge) | 2.250 ± 0.354 | 0.225 ± 0.035 |" in text and "3.000" not in text.replace(
        "the transformer", ""
    )
    conversion_report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
