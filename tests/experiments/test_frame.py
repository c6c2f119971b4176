"""What all experiments share: rows that resume as the same run, the choice of a rate, statistics, and tables."""

import json
import math
import statistics
import threading
import time
from types import SimpleNamespace

import pytest

from hf_memmix.conversion.records import write_json
from hf_memmix.training.experiments.common import harness
from hf_memmix.training.experiments.common.averages import mean_and_deviation, median, spread_text
from hf_memmix.training.experiments.common.rates import (
    at_best_rate,
    at_edge,
    chosen_rows,
    lowest_dev_loss,
    plan,
    rates_to_try,
    trained_and_failed,
)
from hf_memmix.training.experiments.common.report import rows_table, spread_note
from hf_memmix.training.experiments.gka import recall

ENVIRONMENT = {"hardware": "a CPU", "commit": "abc"}


# ---- rows that run


class WorkerInThread(threading.Thread):
    """The worker of the harness without a process of its own, which would import torch again for seconds."""

    def __init__(self, module, args, gpu):
        self.pipe, there = harness.multiprocessing.Pipe()
        super().__init__(target=harness.work, args=(there, module, args, gpu), daemon=True)
        self.start()

    def terminate(self):
        self.pipe.close()


@pytest.fixture
def in_threads(monkeypatch):
    def start(*args):
        worker = WorkerInThread(*args)
        return worker.pipe, worker

    monkeypatch.setattr(harness, "_start", start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the worker sets it too; after the test it is as before


def arguments(tmp_path, **values):
    sizes = {"hidden_size": 32, "layers": 1, "heads": 2, "batch_tokens": 64, "tokens": 128, "deadline": math.inf}
    return SimpleNamespace(**{**sizes, "out": tmp_path / "out.json", "seconds": 600, "workers": 1} | values)


def rows_of_recall(done, args):
    return [
        {"model": name, "length": 16, "pairs": 2, "lr": lr, "seed": 0} for lr in (1e-2, 1e-3) for name in args.models
    ]


def run_recall(args):
    return harness.execute("recall", recall.__file__, args, rows_of_recall)


def test_a_row_runs_in_a_process_of_its_own(tmp_path):
    args = arguments(tmp_path, models=["transformer"])
    rows = harness.execute("recall", recall.__file__, args, lambda *given: rows_of_recall(*given)[:1])["rows"]
    assert len(rows) == 1 and 0 <= rows[0]["accuracy"] <= 1


def test_resumes_and_survives_a_failing_row(tmp_path, in_threads):
    results = run_recall(arguments(tmp_path, models=["transformer", "nothing"]))
    assert [row["model"] for row in results["rows"] if "error" in row] == ["nothing", "nothing"]
    assert len(results["rows"]) == 4 and json.loads((tmp_path / "out.json").read_text()) == results
    kept = [row for row in results["rows"] if "accuracy" in row]
    again = run_recall(arguments(tmp_path, models=["transformer", "nothing"]))
    assert [row for row in again["rows"] if "accuracy" in row] == kept, "finished rows are not run again"
    with pytest.raises(ValueError, match="another tokens; choose another --out"):
        run_recall(arguments(tmp_path, models=["transformer"], tokens=64))


def test_a_resumed_run_may_name_other_models(tmp_path, in_threads):
    """Only the named models run; the file keeps the rows and the names of the others."""
    run_recall(arguments(tmp_path, models=["transformer"]))
    results = run_recall(arguments(tmp_path, models=["linear"]))
    assert results["settings"]["models"] == ["transformer", "linear"]
    assert [row["model"] for row in results["rows"]] == ["transformer"] * 2 + ["linear"] * 2
    assert run_recall(arguments(tmp_path, models=["linear", "transformer"])) == results


def test_rows_of_another_machine_keep_its_name(tmp_path, in_threads, monkeypatch):
    monkeypatch.setattr(harness, "environment", lambda: ENVIRONMENT)
    run_recall(arguments(tmp_path, models=["transformer"]))
    monkeypatch.setattr(harness, "environment", lambda: {"hardware": "a GPU", "commit": "def"})
    results = run_recall(arguments(tmp_path, models=["linear"]))
    assert harness.measured_at(results) == "a CPU, commit abc; a GPU, commit def"


def test_what_was_trained_is_kept_when_measuring_fails(tmp_path, in_threads, monkeypatch):
    """The parts of a row are written at once; a measurement that fails does not make the row run again."""
    seen = []

    def run(row, args):
        errors = {}
        yield {"curve": [1]}
        while not args.out.exists():
            time.sleep(0.01)
        seen.append(json.loads(args.out.read_text())["rows"][0].get("unfinished"))
        harness.attempt(errors, "accuracy", lambda: 1 / 0)
        yield {"errors": errors}

    monkeypatch.setattr(recall, "run", run)
    args = arguments(tmp_path, models=["a"])
    one_row = lambda *given: rows_of_recall(*given)[:1]  # noqa: E731
    (row,) = harness.execute("recall", recall.__file__, args, one_row)["rows"]
    assert row["curve"] == [1] and "ZeroDivisionError" in row["errors"]["accuracy"] and "unfinished" not in row
    assert harness.execute("recall", recall.__file__, arguments(tmp_path, models=["a"]), one_row)["rows"] == [row]
    assert seen == [True], "the row ran once, and its first part was in the file"


def test_parts_of_a_row(tmp_path):
    """A later part replaces the earlier; an error stands beside what came before it; neither counts as finished."""
    args, row = arguments(tmp_path), {"model": "a", "lr": 1.0}
    results = harness.load_results(args, "recall")
    for outcome in ({"curve": [1], "unfinished": True}, {"curve": [1], "loss": 2, "unfinished": True}):
        harness._record(results, row, outcome)
    (record,) = results["rows"]
    assert record == {**row, **outcome, "commit": results["environment"]["commit"]}
    write_json(args.out, results)
    assert harness.load_results(args, "recall")["rows"] == []
    harness._record(results, row, {"error": "killed"})
    (record,) = results["rows"]
    assert record["loss"] == 2 and record["error"] == "killed" and "unfinished" not in record


def test_stops_in_time(tmp_path):
    assert run_recall(arguments(tmp_path, models=["transformer"], seconds=0))["rows"] == []


# ---- the choice of a rate, and the rows that follow from it


def finished(lr, loss, **row):
    return {**row, "lr": lr, "finite": True, "dev_loss": loss, "heldout_loss": -loss}


def test_rates_go_beyond_the_best_until_it_is_not_at_the_edge():
    """The same rule for all; the choice waits for all rates and looks at dev text alone."""
    given = [2.0, 4.0, 8.0]
    assert rates_to_try([], given, model="a") == (given, None)
    inside = [finished(lr, loss, model="a") for lr, loss in ((2.0, 3), (4.0, 1), (8.0, 2))]
    assert rates_to_try(inside, given, model="a") == (given, 4.0)
    assert rates_to_try(inside[:2], given, model="a")[1] is None
    assert rates_to_try(inside, given, model="b") == (given, None)
    edge = inside[:2] + [finished(8.0, 0.5, model="a")]
    assert rates_to_try(edge, given, model="a") == ([*given, 16.0], None)
    further = [*edge, finished(16.0, 0.4, model="a")]
    assert rates_to_try(further, given, model="a") == ([*given, 16.0, 32.0], None)
    assert rates_to_try([*further, finished(32.0, 0.6, model="a")], given, model="a")[1] == 16.0
    falling = [finished(2.0**-i, -i, model="a") for i in range(5)] + [finished(2.0, 1.0, model="a")]
    lrs, chosen = rates_to_try(falling, [2.0, 1.0], model="a")
    assert lrs == [2.0, 1.0, 0.5, 0.25, 0.125, 0.0625] and chosen == 0.0625, "four rates beyond the given, no more"
    assert rates_to_try([finished(2.0, 1, model="a")], [2.0], model="a") == ([2.0], 2.0), "one rate is not a search"
    smaller = [*inside, finished(1.0, 0.5, model="a")]
    assert rates_to_try(smaller, given, model="a") == ([*given, 1.0, 0.5], None), "not a given rate"
    assert rates_to_try(smaller, [4.0], model="a") == ([4.0], 4.0), "the only given rate is the choice"
    lost = [*edge, {"model": "a", "lr": 16.0, "finite": False}]
    assert rates_to_try(lost, given, model="a")[1] == 8.0


def test_a_plan_tries_rates_first_and_runs_the_chosen_one_with_all_budgets_and_seeds():
    arms, budgets = [{"arm": "a"}, {"arm": "b"}], [{"tokens": 1}, {"tokens": 2}]
    first = plan([], arms, [1e-3, 1e-2], (0, 1), budgets)
    assert [(row["arm"], row["lr"]) for row in first] == [("a", 1e-3), ("b", 1e-3), ("a", 1e-2), ("b", 1e-2)]
    assert {(row["tokens"], row["seed"]) for row in first} == {(1, 0)}
    of_a = {"arm": "a", "tokens": 1, "seed": 0}
    done = [finished(lr, loss, **of_a) for lr, loss in ((1e-3, 2.0), (1e-2, 3.0), (5e-4, 4.0))]
    rows = [row for row in plan(done, arms, [1e-3, 1e-2], (0, 1), budgets) if row not in first and row["lr"] != 5e-4]
    assert rows == [{"arm": "a", "lr": 1e-3, "tokens": t, "seed": s} for t, s in ((2, 0), (1, 1), (2, 1))]


def test_a_row_that_could_not_be_measured_is_never_chosen():
    unmeasured, measured = {"model": "a", "lr": 1.0, "finite": True}, finished(2.0, 3.0, model="a")
    assert lowest_dev_loss([unmeasured], model="a") is None
    assert lowest_dev_loss([unmeasured, measured], model="a") == measured
    results = {"rows": [unmeasured, measured], "settings": {"models": ["a"]}}
    assert trained_and_failed(results) == ([measured], [unmeasured])


def test_a_rate_at_the_edge_of_those_tried():
    rows = [finished(lr, lr, model="a") for lr in (1.0, 2.0)] + [{"model": "a", "lr": 4.0, "finite": False}]
    assert [at_edge(rows, lr) for lr in (1.0, 2.0, 4.0)] == [True, False, True]
    assert at_edge(rows[:1], 1.0)


def test_the_chosen_rows_are_the_seeds_of_the_first_seeds_rate():
    rows = [
        finished(lr, loss, model="a", seed=seed) for lr, loss, seed in ((1.0, 2.0, 0), (2.0, 1.0, 0), (2.0, 3.0, 1))
    ]
    lost = [finished(4.0, 9.0, model="a", seed=0), {"model": "a", "lr": 8.0, "seed": 0, "finite": False}]
    other = finished(1.0, 1.0, model="b", seed=0)
    found = [other, *rows, *lost, {"model": "a", "lr": 3.0, "seed": 0, "error": "killed"}]
    results = {"rows": found, "chance_loss": 8.0, "settings": {"models": ["a", "b"]}}
    assert trained_and_failed(results) == ([*rows, other], lost)
    assert chosen_rows(rows, model="a") == rows[1:] and chosen_rows(rows, model="b") == []


def test_the_best_rate_is_that_of_the_mean_over_the_seeds_that_all_rates_have():
    """A rate at which one training diverged is out, whatever the others say."""

    def row(lr, seed, loss):
        return {"lr": lr, "seed": seed} | ({"finite": False} if loss is None else {"finite": True, "dev_loss": loss})

    rows = [row(1e-3, 0, 2.0), row(3e-3, 0, 1.0), row(1e-3, 1, 0.1), row(3e-3, 1, 2.0), row(3e-3, 2, 0.0)]
    assert [(r["lr"], r["seed"]) for r in at_best_rate(rows)] == [(1e-3, 0), (1e-3, 1)]
    assert [r["lr"] for r in at_best_rate(rows[:2])] == [3e-3] and not at_best_rate([])
    assert [r["lr"] for r in at_best_rate([*rows, row(1e-3, 2, None)])] == [3e-3] * 3


# ---- statistics and tables


def test_the_spread_is_the_sample_standard_deviation():
    """Of two values it is their distance by the root of two, and not half of their distance."""
    assert mean_and_deviation([1.0, None, 3.0]) == (2.0, pytest.approx(2 / math.sqrt(2)))
    assert mean_and_deviation([1.0, 2.0, 6.0]) == (3.0, pytest.approx(statistics.stdev([1, 2, 6])))
    assert mean_and_deviation([5.0]) == (5.0, 0.0)
    mean, deviation = mean_and_deviation([None])
    assert math.isnan(mean) and deviation == 0
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5 and median(iter([3.0, 1.0, 2.0])) == 2.0
    with pytest.raises(ValueError, match="give at least one value"):
        median([])
    assert spread_text([0.5, 1.5], 2) == "1.00 ± 0.71" and spread_text([None, 2.0], 1, alone="!") == "2.0!"
    assert spread_text([None], 1) == spread_text([], 3) == ""


def test_captions_count_seeds():
    assert "over 2 or 3 seeds" in spread_note([[{}] * 3, [{}] * 2]) and "over seeds" in spread_note([[{}]])


def test_a_table_of_rows_has_the_seeds_at_the_best_rate_and_leaves_out_what_failed():
    rows = [finished(lr, lr, model="a", seed=s, accuracy=s / 4) for lr in (1.0, 2.0) for s in (0, 2)]
    rows += [{"model": "b", "lr": 1.0, "seed": 0, "finite": False}, {"model": "c", "error": "no memory"}]
    table = rows_table({"rows": rows, "environment": ENVIRONMENT}, "model", "accuracy:1:100", "dev_loss:2")
    assert table.splitlines()[2] == "| a | 1 (edge) | 25.0 ± 35.4 | 1.00 ± 0.00 |"
    assert len(table.splitlines()) == 5 and " 2 seeds" in table and "a CPU, commit abc" in table
