"""Figure 3a: equal models at every size, rows that run, and rows of other experiments in the table."""

import argparse
import json
import math

import pytest

from hf_memmix.training.experiments.common.fit import build, memory_of
from hf_memmix.training.experiments.common.mqar import VOCAB
from hf_memmix.training.experiments.gka.figure3a import MODELS, model_of, rows_to_run, run
from hf_memmix.training.experiments.gka.figure3a_report import cell_text, plot, section, with_rows_of_size_64

SETTINGS = {
    "hidden_sizes": [32, 64], "layers": 1, "heads": 2, "batch_tokens": 64, "tokens": 128, "cells": [[32, 4]],
    "lrs": [3e-3], "models": ["gka", "delta"], "deadline": math.inf,
}  # fmt: skip
WHERE = {"hardware": "h", "commit": "c"}


@pytest.mark.parametrize("size", [32, 64, 128])
def test_models_of_a_size_have_equal_parameters_and_the_memory_that_is_said(size):
    args = argparse.Namespace(layers=2, heads=2)
    found = {name: model_of(name, size, args) for name in MODELS}
    counts = [build(*model, vocab=VOCAB, context=8, seed=0).num_parameters() for model in found.values()]
    assert max(counts) / min(counts) < 1.001
    floats = {name: memory_of(*model)[0] for name, model in found.items()}
    assert floats == {"gka": size**2, "mamba2": size**2} | dict.fromkeys(("gdn", "gla", "delta"), size**2 // 2)


@pytest.fixture(scope="module")
def results():
    args = argparse.Namespace(**SETTINGS)
    rows = [row | run(row, args) | {"commit": "c"} for row in rows_to_run([], args)]
    return {"experiment": "gka_figure3a", "settings": SETTINGS, "environment": WHERE, "rows": rows}


def test_rows_run_and_stand_in_the_table_and_the_plot(results, tmp_path):
    rows = results["rows"]
    assert json.loads(json.dumps(rows)) == rows and all(row["finite"] for row in rows)
    assert [(row["hidden_size"], row["model"]) for row in rows] == [(n, m) for n in (32, 64) for m in ("gka", "delta")]
    assert [row["state_bytes"] for row in rows] == [4 * 32**2, 2 * 32**2, 4 * 64**2, 2 * 64**2]
    rows[0]["accuracy"] = 0.5
    table = section([results])
    assert (
        "32 tokens, 4 pairs" in table
        and "| gka | 4.0 KiB | **50.0** at 0.003 (only rate, 1 seed) | 16.0 KiB |" in table
    )
    plot([results], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_cell_names_its_seeds_its_rates_and_where_the_best_one_lies():
    def row(accuracy, lr=3e-3, seed=0):
        return {"accuracy": accuracy, "dev_loss": 1 - accuracy, "lr": lr, "seed": seed}

    rows = [row(0.9), row(0.7, seed=1), row(0.2, lr=1e-2)]
    assert cell_text(rows, rows[:2]) == "**80.0 ± 14.1** at 0.003 (smallest, 2 seeds); 20.0 at 0.01"
    assert cell_text([*rows, row(0.1, lr=1e-3)], rows[:1]).startswith(
        "**90.0** at 0.003 (inside, 1 seed); 10.0 at 0.001"
    )
    assert cell_text(rows, []) == ""


def test_rows_of_the_other_experiments_are_those_of_size_64():
    def row(accuracy, **fields):
        common = {"length": 256, "pairs": 64, "lr": 3e-3, "seed": 0, "finite": True, "dev_loss": 1 - accuracy}
        return common | {"accuracy": accuracy} | fields

    settings = SETTINGS | {"cells": [[256, 64]], "models": ["gka", "mamba2", "delta"]}
    own = [row(0.2, model="gka", hidden_size=32), row(0.3, model="delta", hidden_size=64, state_bytes=8, commit="own")]
    results = {"settings": settings, "environment": WHERE, "rows": own}
    grid = {"environment": WHERE, "rows": [row(0.9, variant="as in Figure 3a"), row(0.8, variant="s = D")]}
    recall = {"environment": WHERE, "rows": [
        row(0.1, model="gka"), row(0.7, model="delta"), row(0.6, model="delta", lr=1e-2),
        row(0.5, model="mamba2"), row(0.4, model="delta", pairs=32),
    ]}  # fmt: skip
    found = with_rows_of_size_64(results, grid, recall)["rows"][2:]
    assert [(r["model"], r["accuracy"], r["hidden_size"]) for r in found] == [("delta", 0.6, 64), ("gka", 0.9, 64)]
    assert [r.get("state_bytes") for r in found] == [8, None]
