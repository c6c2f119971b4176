"""Equal parameters, equal data, and a harness that resumes, survives a row that fails, and stops in time."""

import argparse
import contextlib
import functools
import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

from hf_memmix.conversion.records import write_json
from hf_memmix.training.experiments.common import fit, harness, language
from hf_memmix.training.experiments.common.fit import (
    EQUAL_MEMORY,
    MODELS,
    build,
    memory_of,
    model_of,
    parameter_count,
)
from hf_memmix.training.experiments.common.graphs import TURN, Turn
from hf_memmix.training.experiments.common.rates import (
    at_edge,
    chosen_rows,
    lowest_dev_loss,
    rates_to_try,
    trained_and_failed,
)
from hf_memmix.training.experiments.common.report import joined
from hf_memmix.training.experiments.common.text import Windows, measured_tokens, train_tokens
from hf_memmix.training.experiments.echo import mqar as echo_mqar
from hf_memmix.training.experiments.gka import recall
from hf_memmix.training.experiments.lattice import ablation as lattice_ablation
from hf_memmix.training.experiments.lattice import language as lattice_language
from hf_memmix.training.experiments.lattice import report as lattice_report

SIZES = {"hidden_size": 64, "layers": 2, "heads": 2, "batch_tokens": 64, "tokens": 128, "deadline": math.inf}


def arguments(tmp_path, **values):
    return argparse.Namespace(
        **{**SIZES, "out": tmp_path / "out.json", "seconds": 600, "workers": 1, "streams": 1, "whole_rows": False}
        | values
    )


def model_of_experiment(name, tmp_path):
    return build(arguments(tmp_path), *MODELS[name], vocab=128, context=32, seed=0)


@pytest.fixture(scope="module")
def parameters_of_the_transformer(tmp_path_factory):
    return model_of_experiment("transformer", tmp_path_factory.mktemp("transformer")).num_parameters()


@pytest.mark.parametrize("name", MODELS)
def test_models_have_equal_parameters(name, tmp_path, parameters_of_the_transformer):
    model = model_of_experiment(name, tmp_path)
    assert abs(model.num_parameters() / parameters_of_the_transformer - 1) < 0.005
    assert parameter_count(model.config) == model.num_parameters()


@pytest.mark.parametrize("name", EQUAL_MEMORY)
@pytest.mark.parametrize("sizes", [{"hidden_size": 64, "heads": 2}, {"hidden_size": 256, "heads": 4}])
def test_models_with_the_memory_of_lattice(name, sizes, tmp_path):
    args = arguments(tmp_path, **sizes)
    floats = [memory_of(*model_of(model, args))[0] for model in ("dec", name)]
    assert floats[0] == floats[1] == args.hidden_size**2 // args.heads
    shape = {"vocab": 128, "context": 32, "seed": 0}
    parameters = [build(*model_of(model, args), **shape).num_parameters() for model in ("transformer", name)]
    assert abs(parameters[1] / parameters[0] - 1) < 0.005
    # in their usual sizes GKA and Mamba-2 have a larger memory; COFFEE's has 16 states per feature in any case
    usual = memory_of(*model_of(name.removesuffix("-equal"), args))[0]
    assert usual == 32 * args.hidden_size if name == "coffee-equal" else usual >= 2 * floats[0]


@pytest.mark.parametrize("name", MODELS)
def test_models_are_causal_and_learn(name, tmp_path):
    args = arguments(tmp_path)
    model = build(args, *MODELS[name], vocab=32, context=24, seed=0)
    ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 32
    with torch.no_grad():
        a, b = model(ids).logits, model(other).logits
    torch.testing.assert_close(a[:, :12], b[:, :12], rtol=1e-4, atol=1e-4)
    result = fit.fit(model, functools.partial(fit.next_token_loss, model), 60, 1e-2, args, lambda step: (ids,))
    losses = [loss for _, loss in result["curve"]]
    assert result["finite"] and losses[-1] < 0.5 * math.log(32) and result["steps"] == 60


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", [*MODELS.values(), ("ska", {})], ids=[*MODELS, "ska"])
def test_a_graph_trains_as_single_launches_do(mixer, tmp_path, monkeypatch):
    """The same batches by a CUDA graph and launch by launch: the same losses up to rounding in bf16."""
    args, losses = arguments(tmp_path), []
    batches = torch.randint(32, (20, 4, 128), generator=torch.Generator().manual_seed(0)).cuda() // 2
    for graphed in (fit.GraphedFunction, lambda function: function):
        monkeypatch.setattr(fit, "GraphedFunction", graphed)
        model = build(args, *mixer, vocab=32, context=128, seed=0)
        loss = functools.partial(fit.next_token_loss, model)
        result = fit.fit(model, loss, 20, 3e-3, args, lambda step: (batches[step],))
        losses.append([value for _, value in result["curve"]])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.02, atol=0.02)
    assert losses[0][-1] < losses[0][0] - 0.3


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_runs_without_a_graph(tmp_path):
    """It keeps the turn: threads launch kernels one at a time."""
    layer, x, kept = torch.nn.Linear(4, 1).cuda(), torch.ones(8, 4, device="cuda"), []

    def loss_of(x):
        kept.append(TURN._lock.locked())
        return (layer(x) - x.sum().item()).square().mean()  # waits for the device

    with pytest.warns(UserWarning, match="runs without a CUDA graph"), TURN.taken():
        result = fit.fit(layer, loss_of, 40, 1e-2, arguments(tmp_path), lambda step: (x,))
    assert len(kept) > 40 and all(kept)
    assert result["steps"] == 40 and not result["graphed"]
    assert result["curve"][-1][1] < result["curve"][0][1]
    graph = fit.fit(layer, lambda x: layer(x).square().mean(), 40, 1e-2, arguments(tmp_path), lambda step: (x,))
    assert graph["curve"][-1][1] < graph["curve"][0][1]  # the process trains on


@pytest.mark.gpu
def test_models_in_threads_train_as_alone(tmp_path):
    """Four models, each in a thread with its own stream: the losses of the same models one after the other."""
    args, names = arguments(tmp_path), ("transformer", "gka", "dec", "mamba2")
    batches = torch.randint(32, (100, 4, 128), generator=torch.Generator().manual_seed(0)).cuda() // 2

    def train(name):
        model = build(args, *MODELS[name], vocab=32, context=128, seed=0)
        loss = functools.partial(fit.next_token_loss, model)
        return fit.fit(model, loss, 100, 3e-3, args, lambda step: (batches[step],))["curve"]

    def train_in_turn(name):
        with torch.cuda.stream(torch.cuda.Stream()), TURN.taken():
            return train(name)

    alone = [train(name) for name in names]
    with ThreadPoolExecutor(len(names)) as threads:
        together = list(threads.map(train_in_turn, names))
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=0.02, atol=0.02)


def test_threads_take_turns_except_where_one_gives_its_turn_up():
    turn, inside, most, both = Turn(), [], [], threading.Barrier(2, timeout=20)

    def work(name):
        with turn.taken():
            inside.append(name)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(name)
            with turn.given_up():
                both.wait()  # returns only if both threads are here at the same time
            inside.append(name)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(name)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, "ab"))
    assert most == [1] * 4
    with turn.given_up():  # without a turn nothing is given up
        assert not turn._lock.locked()


def test_windows_are_the_same_for_all_and_cover_the_text_once_an_epoch():
    tokens = torch.arange(1000, dtype=torch.int32)
    windows, again = (Windows(tokens, 16, 4, seed=3) for _ in range(2))
    epoch = torch.cat([windows(step) for step in range(windows.per_epoch)])
    assert len(epoch.unique()) == epoch.numel() == windows.per_epoch * 64
    assert (epoch.diff(dim=1) == 1).all()
    for step in (0, 40, 7):
        assert torch.equal(windows(step), again(step))
    assert not torch.equal(windows(0), windows(windows.per_epoch))
    with pytest.raises(ValueError, match="give more text"):
        Windows(tokens, 300, 4, seed=0)


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A stream that is short and easy, as an array; dev and held-out text are its continuation."""
    path = tmp_path / "text.npy"
    numpy.save(path, (numpy.arange(2000) % 50).astype(numpy.uint16))
    monkeypatch.setattr(fit, "measured_tokens", lambda name: torch.arange(200) % 50)
    train_tokens.cache_clear()
    return path


def test_language_row(tmp_path, text):
    args = arguments(tmp_path, text=text, tokens=64 * 60)
    row = {"model": "dec", "context": 16, "lr": 1e-2, "seed": 0}
    result = lattice_language.run(row, args)
    assert result["perplexity"] == math.exp(result["heldout_loss"]) and result["heldout_loss"] < 5
    assert result["trained_tokens"] == 64 * 60 and "paper_perplexity_on_books" not in result
    assert json.loads(json.dumps(result)) == result
    assert len(result["gamma"]) == 2 and all(0 < low <= mid <= high < 1 for low, mid, high in result["gamma"])
    with pytest.raises(harness.OutOfTime):
        lattice_language.run(row, argparse.Namespace(**{**vars(args), "deadline": time.time() - 1}))


def test_ablation_rows_differ_by_their_options(tmp_path, text):
    args = arguments(tmp_path, text=text, heads=1)  # 64 channels, more than any number of slots
    rungs = [*lattice_ablation.IN_PAPER, *lattice_ablation.NOT_IN_PAPER]
    rows = [{"rung": rung, "context": 16, "lr": 1e-2, "seed": 0} for rung in rungs]
    losses = [lattice_ablation.run(row, args)["heldout_loss"] for row in rows]
    assert len(set(losses)) == len(rungs)


def test_recall_row(tmp_path):
    args = arguments(tmp_path, tokens=16 * 32 * 2, batch_tokens=16 * 32)
    result = recall.run({"model": "delta", "length": 32, "pairs": 4, "lr": 1e-2, "seed": 0}, args)
    assert 0 <= result["accuracy"] <= 1 and result["sequences"] == 32 and 0 < result["dev_loss"] < 10


def train_line(monkeypatch, calls_before_the_deadline=math.inf, steps=40, lr=1e-2, size=4, **options):
    """A small training whose deadline passes when the clock is asked for so many times: (result, model)."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 8, size, generator=torch.Generator().manual_seed(0))
    model, calls, drawn = torch.nn.Linear(size, size), [], []

    def check_time(args):
        calls.append(args)
        if len(calls) >= calls_before_the_deadline:
            raise harness.OutOfTime

    monkeypatch.setattr(fit, "check_time", check_time)

    def batch_of(step):
        assert step == len(drawn)
        drawn.append(step)
        return (inputs[step],)

    loss_of = lambda x: (model(x) - x.flip(-1)).square().mean()  # noqa: E731
    args = argparse.Namespace()
    return fit.fit(model, loss_of, steps, lr, args, batch_of, graphed=False, **options), model


@pytest.mark.parametrize("stopped", [10, 11, 40])
def test_a_training_goes_on_from_its_checkpoint(stopped, tmp_path, monkeypatch):
    """In two parts as without a break, up to the rounding of AdamW's moments; the file is gone at the end.

    The points of the curve are two steps apart, so one of the deadlines is between two points.
    """
    whole, expected = train_line(monkeypatch)
    path = tmp_path / "row" / "model.pt"
    with pytest.raises(harness.OutOfTime):
        train_line(monkeypatch, stopped, checkpoint=path)
    assert torch.load(path)["steps"] == stopped
    resumed, model = train_line(monkeypatch, checkpoint=path)
    assert not path.exists() and not list(path.parent.iterdir())
    assert resumed["resumed_at"] == [stopped] and "resumed_at" not in whole and resumed["steps"] == 40
    assert [step for step, _ in resumed["curve"]] == [step for step, _ in whole["curve"]]
    assert resumed["curve"][: stopped // 2] == whole["curve"][: stopped // 2]
    assert resumed["gradient_norms"][: (stopped + 1) // 2] == whole["gradient_norms"][: (stopped + 1) // 2]
    torch.testing.assert_close(model.weight, expected.weight, atol=2e-3, rtol=0)
    assert abs(resumed["curve"][-1][1] - whole["curve"][-1][1]) < 1e-2
    if stopped == 40:
        assert resumed["curve"] == whole["curve"] and torch.equal(model.weight, expected.weight)


def test_the_largest_norm_since_the_last_point_is_saved(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    with pytest.raises(harness.OutOfTime):
        train_line(monkeypatch, 11, checkpoint=path)
    saved = torch.load(path)
    assert saved["records"]["largest"] > 0
    saved["records"]["largest"] = 77.0
    torch.save(saved, path)
    assert train_line(monkeypatch, checkpoint=path)[0]["gradient_norms"][5] == 77.0


@pytest.mark.parametrize(
    "options, difference",
    [
        ({"steps": 30}, "steps = 40, and here steps = 30"),
        ({"lr": 2e-2}, "lr = 0.01, and here lr = 0.02"),
        ({"warmup_steps": 5}, "warmup_steps = 2, and here warmup_steps = 5"),
        ({"row": {"seed": 1}}, "seed = 0, and here seed = 1"),
        ({"size": 5}, r"another weight: \[4, 4\], and here \[5, 5\]"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(options, difference, tmp_path, monkeypatch):
    path, row = tmp_path / "model.pt", {"row": {"seed": 0}}
    with pytest.raises(harness.OutOfTime):
        train_line(monkeypatch, 10, checkpoint=path, **row)
    with pytest.raises(ValueError, match=f"model.pt was saved with {difference}; .*delete it") as error:
        train_line(monkeypatch, checkpoint=path, **(row | options))
    assert "\n" not in str(error.value) and path.exists()


def test_a_checkpoint_of_other_batches_is_refused(tmp_path):
    layer, path = torch.nn.Linear(4, 1), tmp_path / "model.pt"

    def train(rows, deadline):
        args, loss_of = argparse.Namespace(deadline=deadline), lambda x: layer(x).square().mean()
        return fit.fit(
            layer, loss_of, 40, 1e-2, args, lambda _: (torch.ones(rows, 4),), graphed=False, checkpoint=path
        )

    with pytest.raises(harness.OutOfTime):
        train(8, 0)
    with pytest.raises(ValueError, match=r"batch = \[\[8, 4\]\], and here batch = \[\[6, 4\]\]"):
        train(6, math.inf)
    assert train(8, math.inf)["resumed_at"] == [1]


def finished(lr, loss, **row):
    return {**row, "lr": lr, "finite": True, "dev_loss": loss, "heldout_loss": -loss}


def test_rates_go_beyond_the_best_until_it_is_not_at_the_edge():
    """The same rule for all; the choice waits for all rates and looks at dev text alone."""
    assert rates_to_try([], [2.0, 4.0, 8.0], model="a") == ([2.0, 4.0, 8.0], None)
    inside = [finished(lr, loss, model="a") for lr, loss in ((2.0, 3), (4.0, 1), (8.0, 2))]
    assert rates_to_try(inside, [2.0, 4.0, 8.0], model="a") == ([2.0, 4.0, 8.0], 4.0)
    assert rates_to_try(inside[:2], [2.0, 4.0, 8.0], model="a")[1] is None
    assert rates_to_try(inside, [2.0, 4.0, 8.0], model="b") == ([2.0, 4.0, 8.0], None)
    edge = inside[:2] + [finished(8.0, 0.5, model="a")]
    assert rates_to_try(edge, [2.0, 4.0, 8.0], model="a") == ([2.0, 4.0, 8.0, 16.0], None)
    further = [*edge, finished(16.0, 0.4, model="a")]
    assert rates_to_try(further, [2.0, 4.0, 8.0], model="a") == ([2.0, 4.0, 8.0, 16.0, 32.0], None)
    assert rates_to_try([*further, finished(32.0, 0.6, model="a")], [2.0, 4.0, 8.0], model="a")[1] == 16.0
    falling = [finished(2.0**-i, i, model="a") for i in range(5)] + [finished(2.0, -1.0, model="a")]
    falling = [row | {"dev_loss": -row["dev_loss"]} for row in falling]
    lrs, chosen = rates_to_try(falling, [2.0, 1.0], model="a")
    assert lrs == [2.0, 1.0, 0.5, 0.25, 0.125, 0.0625] and chosen == 0.0625, "four rates beyond the given, no more"
    assert rates_to_try([finished(2.0, 1, model="a")], [2.0], model="a") == ([2.0], 2.0), "one rate is not a search"
    assert rates_to_try([*edge, finished(16.0, 0.6, model="a")], [2.0, 4.0, 8.0], model="a")[1] == 8.0
    smaller = [*inside, finished(1.0, 0.5, model="a")]
    assert rates_to_try(smaller, [2.0, 4.0, 8.0], model="a") == ([2.0, 4.0, 8.0, 1.0, 0.5], None), "not a given rate"
    assert rates_to_try(smaller, [4.0], model="a") == ([4.0], 4.0), "the only given rate is the choice"
    lost = [*edge, {"model": "a", "lr": 16.0, "finite": False}]
    assert rates_to_try(lost, [2.0, 4.0, 8.0], model="a")[1] == 8.0


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


def test_longer_contexts_take_the_rate_that_was_best_on_dev_text():
    args = argparse.Namespace(contexts=[8, 16], lrs=[1e-3, 1e-2], models=["dec", "enc"])
    first = language.rows_to_run([], args)
    assert {row["context"] for row in first} == {8} and len(first) == 4
    assert [row["lr"] for row in first] == [1e-3, 1e-3, 1e-2, 1e-2], "a rate of all models before the next"
    dec = {"model": "dec", "context": 8, "seed": 0}
    done = [finished(lr, loss, **dec) for lr, loss in ((1e-3, 2.0), (1e-2, 3.0), (5e-4, 4.0))]
    rows = [row for row in language.rows_to_run(done, args) if row not in first and row["lr"] != 5e-4]
    assert rows and all(row["model"] == "dec" and row["lr"] == 1e-3 for row in rows)
    assert {(row["context"], row["seed"]) for row in rows} == {(16, 0), (8, 1), (16, 1)}


def test_ablation_repeats_all_rows_with_a_second_seed():
    args = argparse.Namespace(context=8, lrs=[1e-2])
    assert len(lattice_ablation.rows_to_run([], args)) == len(lattice_ablation.IN_PAPER)
    dec = finished(1e-2, 1.0, rung="+ projection", context=8, seed=0)
    rows = [row for row in lattice_ablation.rows_to_run([dec], args) if row["rung"] == "+ projection" or row["seed"]]
    assert {(row["rung"], row["seed"]) for row in rows} == {
        ("+ projection", 0), ("+ projection", 1), *((rung, 1) for rung in lattice_ablation.NOT_IN_PAPER)
    }  # fmt: skip


def test_recall_tries_rates_in_each_cell():
    args = argparse.Namespace(cells=[[16, 2], [32, 4]], lrs=[1e-2], models=["dec", "gka"])
    assert len(recall.rows_to_run([], args)) == 4
    done = [finished(1e-2, 1.0, model="gka", length=32, pairs=4, seed=0)]
    (second,) = (row for row in recall.rows_to_run(done, args) if row["seed"] == 1)
    assert second == {"model": "gka", "length": 32, "pairs": 4, "lr": 1e-2, "seed": 1}


def test_what_is_drawn():
    """The seeds of the chosen rate, models in the order they are listed; what learnt nothing is named instead."""
    rows = [
        finished(lr, loss, model="a", seed=seed) for lr, loss, seed in ((1.0, 2.0, 0), (2.0, 1.0, 0), (2.0, 3.0, 1))
    ]
    lost = [finished(4.0, 9.0, model="a", seed=0), {"model": "a", "lr": 8.0, "seed": 0, "finite": False}]
    other = finished(1.0, 1.0, model="b", seed=0)
    found = [other, *rows, *lost, {"model": "a", "lr": 3.0, "seed": 0, "error": "killed"}]
    results = {"rows": found, "chance_loss": 8.0, "settings": {"models": ["a", "b"]}}
    assert trained_and_failed(results) == ([*rows, other], lost)
    assert chosen_rows(rows, model="a") == rows[1:]
    assert chosen_rows(rows, model="b") == []


def test_report_has_means_over_seeds_and_gaps_beside_the_papers():
    # distances are at the seeds that both models have: 22 to 10
    settings = {"contexts": [512, 2048], "layers": 1, "hidden_size": 32, "heads": 2, "tokens": 3_000_000}
    settings["models"] = ["delta", "dec", "enc"]
    rows = [
        finished(1e-2, 1.0, model="dec", context=512, seed=0, perplexity=10.0),
        finished(1e-2, 1.0, model="dec", context=512, seed=1, perplexity=12.0),
        finished(1e-2, 1.0, model="delta", context=512, seed=0, perplexity=22.0),
        finished(2e-2, 9.0, model="enc", context=512, seed=0, perplexity=8000.0),
        {"model": "enc", "lr": 4e-2, "context": 512, "seed": 0, "finite": True},
    ]
    results = {"experiment": "lattice_language", "settings": settings, "rows": rows, "chance_loss": 6.5}
    text = lattice_report.language([results | {"environment": {"hardware": "CPU", "commit": "abc"}}])
    assert "| dec | 512 | q, k | 0.01 (only one) | 11.00 ± 1.41 | +0.0 % | +0.0 % |" in text
    assert "| delta | 512 | q, k | 0.01 (only one) | 22.00 (1 seed) | +120.0 % | +6.4 % |" in text
    assert "Order at 512, paper: dec < delta." in text and "Learnt nothing: enc at 0.02." in text
    assert "Trained and not measured: enc at 0.04." in text and "| enc |  | **8000.00** | not measured |" in text


def test_rows_of_another_result_stand_in_the_table_if_it_was_measured_in_the_same_way():
    sizes = {
        "contexts": [512],
        "layers": 1,
        "hidden_size": 32,
        "heads": 2,
        "tokens": 10,
        "batch_tokens": 5,
        "lrs": [1],
    }

    def result(name, models, **changed):
        rows = [finished(1.0, 1.0, model=model, context=512, seed=0, perplexity=10.0) for model in models]
        about = {"text": {"sha256": "0"}, "chance_loss": 6.5, "environment": {"hardware": "CPU", "commit": name}}
        return about | {"experiment": name, "rows": rows, "settings": sizes | {"models": models} | changed}

    own, other = result("own", ["dec"]), result("other", ["dec", "gka"])
    both = joined(own, [other])
    assert both["settings"]["models"] == ["dec", "gka"] and own["settings"]["models"] == ["dec"]
    assert [(row["model"], row.get("commit")) for row in both["rows"]] == [("dec", None), ("gka", "other")]
    assert "| gka | 1,024 | q, k, v |" in lattice_report.language([own, other])
    with pytest.raises(ValueError, match="other and own differ in tokens; their rows cannot stand in one table"):
        joined(own, [result("other", ["gka"], tokens=20)])


# ---- the harness, with rows that run in processes of their own


def rows_of_recall(done, args):
    return [
        {"model": name, "length": 16, "pairs": 2, "lr": lr, "seed": 0} for lr in (1e-2, 1e-3) for name in args.models
    ]


def run_recall(args, rows_to_run):
    return harness.execute("recall", recall.__file__, args, rows_to_run)


def test_resumes_and_survives_a_failing_row(tmp_path):
    args = arguments(tmp_path, models=["transformer", "nothing"])
    results = run_recall(args, rows_of_recall)
    errors = [row["model"] for row in results["rows"] if "error" in row]
    assert errors == ["nothing", "nothing"] and len(results["rows"]) == 4
    assert json.loads(args.out.read_text()) == results
    kept = [row for row in results["rows"] if "accuracy" in row]
    again = harness.execute(
        "recall", recall.__file__, arguments(tmp_path, models=["transformer", "nothing"]), rows_of_recall
    )
    assert [row for row in again["rows"] if "accuracy" in row] == kept, "finished rows are not run again"
    with pytest.raises(ValueError, match="another tokens; choose another --out"):
        harness.execute(
            "recall",
            recall.__file__,
            arguments(tmp_path, models=["transformer", "nothing"], tokens=64),
            rows_of_recall,
        )


class WorkerInThread(threading.Thread):
    """The worker of the harness without a process of its own, which would import torch again for seconds."""

    def __init__(self, context, module, args, gpu):
        self.pipe, there = context.Pipe()
        super().__init__(target=harness.work, args=([there], module, args, gpu), daemon=True)
        self.start()

    def terminate(self):
        self.pipe.close()


def start_in_thread(*args):
    worker = WorkerInThread(*args)
    return [(worker.pipe, worker)]


def test_a_resumed_run_may_name_other_models(tmp_path, monkeypatch):
    """Only the named models run; the file keeps the rows and the names of the others."""
    monkeypatch.setattr(harness, "_start", start_in_thread)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the worker sets it too; after the test it is as before
    run_recall(arguments(tmp_path, models=["transformer"]), rows_of_recall)
    results = run_recall(arguments(tmp_path, models=["linear"]), rows_of_recall)
    assert results["settings"]["models"] == ["transformer", "linear"]
    assert [row["model"] for row in results["rows"]] == ["transformer"] * 2 + ["linear"] * 2
    assert json.loads(arguments(tmp_path).out.read_text()) == results
    again = run_recall(arguments(tmp_path, models=["linear", "transformer"]), rows_of_recall)
    assert again == results


def test_a_warm_up_is_as_long_as_asked(tmp_path):
    """A rate that grows in all of 40 steps moves the weights less than one that grows in two."""
    moved = [distance_moved(tmp_path, warmup) for warmup in (None, 40)]
    assert moved[1] < 0.8 * moved[0]


def distance_moved(tmp_path, warmup_steps):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    before, x = layer.weight.detach().clone(), torch.ones(2, 4)

    def loss_of(x):
        return layer(x).square().mean()

    fit.fit(layer, loss_of, 40, 1e-3, arguments(tmp_path), lambda step: (x,), warmup_steps=warmup_steps)
    return (layer.weight.detach() - before).abs().sum()


def test_what_was_trained_is_kept_when_measuring_fails(tmp_path):
    """No sequences to measure: the training stands in the file, with what failed; the row does not run again."""
    values = {
        "steps": 2,
        "batch": 2,
        "batch_tokens": 512,
        "sequences": 0,
        "enough": 0.0,
        "points": 20,
        "points_below": 1,
        "further_rates": 0,
        "checkpoints": None,
    }
    args = arguments(tmp_path, **values, models=["ssm"], cells=[[4, 8]], lrs=[1e-3], seeds=1)
    results = harness.execute("echo_mqar", echo_mqar.__file__, args, echo_mqar.rows_to_run)
    (row,) = results["rows"]
    assert row["finite"] and row["curve"] and row["errors"].keys() == {"dev_loss", "accuracy"}
    assert not row.keys() & {"error", "unfinished"} and json.loads(args.out.read_text()) == results
    args.deadline = None
    assert harness.execute("echo_mqar", echo_mqar.__file__, args, echo_mqar.rows_to_run)["rows"] == [row]


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
    results = harness.execute(
        "recall", recall.__file__, arguments(tmp_path, models=["transformer"], seconds=0), rows_of_recall
    )
    assert results["rows"] == []


@pytest.mark.parametrize("whole_rows", [False, True])
def test_the_last_seconds_are_left_to_rows_that_end_in_time(whole_rows, tmp_path, monkeypatch):
    """Each row takes 40 of 100 seconds, so the third one would be stopped."""
    now = [1000.0]

    def take_a_row(pipe, experiment, args, with_others):
        with contextlib.suppress(EOFError):
            while pipe.recv():
                now[0] += 40
                pipe.send({"finite": True, "seconds": 40.0} if now[0] <= args.deadline else None)

    monkeypatch.setattr(harness, "_start", start_in_thread)
    monkeypatch.setattr(harness, "_serve", take_a_row)
    monkeypatch.setattr(harness.time, "time", lambda: now[0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    args = arguments(tmp_path, models=["transformer", "linear"], seconds=100, whole_rows=whole_rows)
    assert len(run_recall(args, rows_of_recall)["rows"]) == 2
    assert now[0] == (1080 if whole_rows else 1120)


def test_bundled_text_is_what_is_measured():
    assert len(measured_tokens("dev")) > 100_000 and int(measured_tokens("heldout").max()) < 4096
    assert Path(harness.__file__).parents[1].name == "experiments"
