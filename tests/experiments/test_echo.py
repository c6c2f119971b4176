"""Echo's experiments in two steps each: rows, tables, plots, and that questions are answered alike token by token."""

import argparse
import copy
import json
import math

import pytest
import torch
import typer

from hf_memmix.mixers.ska import SKAMixer
from hf_memmix.training.experiments.common.fit import fit
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.echo import ablation as echo_ablation
from hf_memmix.training.experiments.echo import mqar as echo_mqar
from hf_memmix.training.experiments.echo import scratchpad as echo_scratchpad
from hf_memmix.training.experiments.echo import suite as echo_suite
from hf_memmix.training.experiments.echo import transfer as echo_transfer
from hf_memmix.training.experiments.echo.plots import plot_ablation, plot_grid, plot_scratchpad, plot_transfer
from hf_memmix.training.experiments.echo.report import TASKS_PAPER, answers_seen, chosen, mask_table, mean_of, report
from hf_memmix.training.experiments.echo.tasks import TASKS, draw_examples

SMALL = {
    "steps": 2,
    "batch": 4,
    "batch_tokens": 512,
    "length": 64,
    "pairs": [2, 4],
    "lengths": [64],
    "sequences": 2,
    "enough": 0.0,
    "points": 20,
    "points_below": 1,
    "cells": [[4, 8]],
    "lrs": [1e-3],
    "lr": 1e-3,
    "seeds": 2,
    "models": list(echo_suite.MODELS),
    "variants": list(echo_ablation.VARIANTS),
    "deadline": math.inf,
    "further_rates": 4,
    "checkpoints": None,
    "accuracy_every": 1,
    "tiers": list(echo_scratchpad.CHAINS),
}
ENVIRONMENT = {"hardware": "CPU", "commit": "0000000"}


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setattr(echo_suite, "BATCHES_PER_DRAW", 2)
    monkeypatch.setattr(echo_suite, "PAIRS", (2, 4))
    return argparse.Namespace(**SMALL)


def whole(parts):
    """What the harness makes of the parts of a row."""
    return {key: value for part in parts for key, value in part.items()}


def results_of(name, rows):
    return {"experiment": name, "environment": ENVIRONMENT, "settings": {**SMALL, "deadline": None}, "rows": rows}


def test_transfer(args, tmp_path):
    planned = echo_transfer.rows_to_run([], args)
    assert [(row["model"], row["seed"]) for row in planned] == [
        (name, seed) for name in ("ska", "attention", "ssm") for seed in (0, 1)
    ]
    rows = [{**row, **whole(echo_transfer.run(row, args))} for row in planned if row["seed"] == 0]
    for row in rows:
        assert row["finite"] and {cell[0] for cell in row["cells"]} == set(TASKS) == set(TASKS_PAPER)
        assert row["decode_agreement"] == 1
    assert ["refreshed" in row for row in rows] == [True, False, False]
    assert json.loads(json.dumps(rows)) == rows
    results = results_of("echo_transfer", rows)
    assert "(82.2)" in report(results) and "mean of tasks" in report(results)
    plot_transfer(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_ablation(args, tmp_path):
    wanted = ("K = 2, chunks of 8", "no action mask", "chunks of 1", "sequence maximum")
    assert len(echo_ablation.rows_to_run([], args)) == 2 * len(echo_ablation.VARIANTS)
    rows = [
        {**row, **whole(echo_ablation.run(row, args))}
        for row in echo_ablation.rows_to_run([], args)
        if row["variant"] in wanted
    ]
    assert [row["variant"] for row in rows] == [*wanted, *wanted] and all(row["finite"] for row in rows)
    assert ["refreshed" in row for row in rows[:4]] == [True, True, False, False]
    results = results_of("echo_ablation", rows)
    assert all(name in report(results) for name in wanted)
    plot_ablation(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_grid(args, tmp_path):
    rows = []
    for seed in range(args.seeds):
        waiting = [row for row in echo_mqar.rows_to_run(rows, args) if row["seed"] == seed]
        rows += [{**row, **whole(echo_mqar.run(row, args))} for row in waiting]
    assert len(rows) == 6 and all(0 <= row["accuracy"] <= 1 for row in rows)
    results = results_of("echo_mqar", rows)
    for seeds in (1, 2):  # the accuracy by cell, and the loss by answers
        results["settings"]["seeds"] = seeds
        assert "| 4 | 8 |" in report(results)
        plot_grid(results, tmp_path / f"{seeds}.png")
    assert (tmp_path / "1.png").read_bytes() != (tmp_path / "2.png").read_bytes()


def test_the_table_of_equal_answers(args):
    """Each seed's accuracy, the answers from the fastest to the slowest, and the edge of unsolved cells."""
    args.models = ["ssm", "ska"]

    def row(model, lr, seed, accuracy, steps):
        cell = {"model": model, "pairs": 4, "gap": 8, "lr": lr, "seed": seed}
        return cell | {"finite": True, "accuracy": accuracy, "dev_loss": 1.001 - accuracy, "steps": steps}

    rows = [row("ska", 1e-3, 1, 1.0, 10_000), row("ska", 1e-3, 0, 0.99, 20_000), row("ssm", 1e-3, 0, 0.5, 20_000)]
    grid = results_of("echo_mqar", [*rows, row("ssm", 2e-3, 0, 0.4, 20_000)])
    grid["settings"] |= {"models": args.models, "batch": 4}
    lines = report(grid).splitlines()[2:]
    assert lines[0] == "| 4 | 8 | Mamba-2 | 0.001 (edge) | 50.0 | 50.0 | 0.32M | chance |"
    assert lines[1] == "| 4 | 8 | SKA, true mask | 0.001 | 99.5 ± 0.7 | 99.0, 100.0 | 0.16M to 0.32M | 100 |"


def test_a_cell_of_the_grid_can_have_its_own_tokens_and_steps(args, tmp_path):
    """Sequences of 36 tokens: two fit into 80. The other cell has those of the options."""
    args.models, args.cells, args.seeds = ["ska"], [[4, 8, 80, 3], [2, 8]], 2
    rows = [{**row, **whole(echo_mqar.run(row, args))} for row in echo_mqar.rows_to_run([], args)]
    assert [row["steps"] for row in rows] == [3, args.steps]
    grid = results_of("echo_mqar", rows) | {"settings": vars(args)}
    assert answers_seen(grid, rows[0]) == 3 * 2 * 4
    text = report(grid)
    assert "| 4 | 8 | SKA" in text and "| 2 | 8 | SKA" in text
    assert f"Steps at most: 3 with 4 pairs at 8, {args.steps} with 2 pairs at 8; CPU" in text
    plot_grid(grid, tmp_path / "plot.png")


@pytest.mark.parametrize("cells", ["4", "[4, 8]", "[[4]]", "[[4, 8.5]]", "[[4, 8]"])
def test_cells_are_lists_of_numbers(cells, tmp_path):
    with pytest.raises(typer.BadParameter, match="tokens per step"):
        echo_mqar.cells_of(cells, tmp_path / "out.json")


@pytest.mark.parametrize("cells", ["[[4, 8], [4, 8]]", "[[4, 8, 80, 3]]"])
def test_cells_that_would_mix_two_budgets_are_refused(cells, tmp_path):
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"settings": {"cells": [[4, 8]]}}))
    assert echo_mqar.cells_of("[[4, 8], [4, 16, 80, 3]]", out) == [[4, 8], [4, 16, 80, 3]]
    with pytest.raises(typer.BadParameter, match="tokens per step"):
        echo_mqar.cells_of(cells, out)


def grid_rows(args, losses):
    """The rows of the grid that run after rows with the losses {(model, rate): development loss} of the first seed."""
    done = [
        {"model": name, "pairs": 4, "gap": 8, "lr": lr, "seed": 0, "finite": True, "dev_loss": loss}
        for (name, lr), loss in losses.items()
    ]
    rows = [row for row in echo_mqar.rows_to_run(done, args) if not any(matches(known, row) for known in done)]
    return [(row["model"], row["lr"], row["seed"]) for row in rows]


def test_the_grid_tries_rates_until_a_cell_is_solved(args):
    args.models, args.lrs = ["ssm", "ska"], [1e-3, 2e-3]
    assert grid_rows(args, {}) == [("ska", 1e-3, 0), ("ssm", 1e-3, 0)]
    solved = {("ska", 1e-3): echo_suite.SOLVED / 2}
    assert grid_rows(args, solved | {("ssm", 1e-3): 1.0}) == [("ska", 1e-3, 1), ("ssm", 2e-3, 0)]
    # neither rate solves the cell, and the best one is the largest: the next is twice as large
    tried = solved | {("ssm", 1e-3): 1.0, ("ssm", 2e-3): 0.5}
    assert grid_rows(args, tried) == [("ska", 1e-3, 1), ("ssm", 4e-3, 0)]
    assert grid_rows(args, tried | {("ssm", 4e-3): 0.7}) == [("ska", 1e-3, 1), ("ssm", 2e-3, 1)]
    args.further_rates = 0
    assert grid_rows(args, tried) == [("ska", 1e-3, 1), ("ssm", 2e-3, 1)]


def test_the_mask_of_the_grid_is_given_to_one_model_only(args, monkeypatch):
    given = {}

    def learn(model, batches, masked, row, *args, **options):
        given[row["model"]] = masked
        return {"finite": False}

    monkeypatch.setattr(echo_suite, "learn", learn)
    for name in echo_mqar.MODELS:
        whole(echo_mqar.run({"model": name, "pairs": 4, "gap": 8, "lr": 1e-3, "seed": 0}, args))
    assert [name for name, masked in given.items() if masked] == ["ska"] and len(given) == len(echo_mqar.MODELS)


def test_scratchpad(args, tmp_path):
    args.variants, args.tiers = list(echo_scratchpad.VARIANTS), list(echo_scratchpad.TIERS)
    planned = [row for row in echo_scratchpad.rows_to_run([], args) if row["tier"] != "tools, hard"]
    assert len(planned) == 3 * len(args.variants)
    rows = [{**row, **whole(echo_scratchpad.run(row, args))} for row in planned]
    assert all(0 <= row["accuracy"] <= 1 and not row.get("errors") for row in rows)
    assert all([step for step, _ in row["accuracies"]] == [1, 2] for row in rows)
    rows[0]["accuracies"] = [[1, 0.2], [2, 0.96]]
    results = results_of("echo_scratchpad", rows)
    results["settings"]["variants"] = args.variants
    text = report(results)
    assert "| easy | ssm | 0.001 (only one) |" in text and "| 1 | no | 10 to 20 (Mamba-3) |" in text
    assert "| 1 | 2 | 100 after 500 |" in text
    plot_scratchpad(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_accuracy_of_the_training_is_that_of_the_last_batches(args, monkeypatch):
    """It is averaged over the last `ACCURACY_STEPS` batches before the step, also where the training ends."""
    monkeypatch.setattr(echo_suite, "ACCURACY_STEPS", 2)
    answers = iter([0.9, 0.1, 0.3, 0.9, 0.9, 0.5, 0.7])
    monkeypatch.setattr(echo_suite, "accuracy_of", lambda logits, examples: torch.tensor(next(answers)))
    model, args.steps = echo_suite.build("ssm", 0), 7
    batches = echo_suite.training_batches(0, 2, 32, [2])
    found = echo_suite.learn(model, batches, False, {"lr": 1e-3}, args, accuracy_every=3)
    assert found["accuracies"] == [[3, 0.2], [6, 0.7]]


def test_accuracies_with_a_checkpoint_are_refused(args, tmp_path):
    options = {"accuracy_every": 1, "checkpoint": tmp_path / "model.pt"}
    with pytest.raises(ValueError, match="give accuracy_every or checkpoint, not both"):
        echo_suite.learn(None, [], False, {"lr": 1e-3}, args, **options)


def test_a_solved_model_gets_its_seeds_before_another_gets_further_rates(args):
    args.variants, args.tiers, args.lrs = ["ska, eta 1.5", "ssm"], ["easy"], [2e-3, 1e-3]
    done = [
        {"variant": name, "tier": "easy", "lr": 2e-3, "seed": 0, "finite": True, "dev_loss": loss}
        for name, loss in (("ska, eta 1.5", 0.01), ("ssm", 1.0))
    ]
    rows = [row for row in echo_scratchpad.rows_to_run(done, args) if not any(matches(d, row) for d in done)]
    assert [(row["variant"], row["lr"], row["seed"]) for row in rows] == [("ska, eta 1.5", 2e-3, 1), ("ssm", 1e-3, 0)]


def test_the_scale_of_the_output_is_set():
    model = echo_suite.build("ska", 0)
    echo_scratchpad.set_eta(model, 3.0)
    scales = [layer.eta for layer in model.modules() if isinstance(layer, SKAMixer)]
    assert len(scales) == 2 and all((eta == 3.0).all() for eta in scales)


def test_variants_change_what_the_model_computes():
    """Every variant of the ablation gives other answers with the same weights."""
    examples = draw_examples("system_prompt", 2, 96, 8, torch.Generator().manual_seed(0))
    found = []
    for variant in echo_ablation.VARIANTS.values():
        model = echo_suite.build("ska", 0, variant.layers, **variant.ska)
        open_outputs(model)
        with torch.no_grad():
            found.append(echo_suite.value_logits(model, examples, variant.masked))
    for i, a in enumerate(found):
        assert all((a - b).abs().max() > 1e-5 for b in found[:i])


def open_outputs(model):
    """SKA layers start with a zero output; the last token of noise before the question is all they would need."""
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.weight") and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)


def test_refreshing_changes_a_model_and_decoding_does_not():
    model = echo_suite.build("ska", 0)
    open_outputs(model)
    assert echo_suite.decode_agreement(model, True, 48, 4, 4) == 1
    examples = draw_examples("system_prompt", 2, 64, 4, torch.Generator().manual_seed(0))
    refreshed = copy.deepcopy(model)
    echo_suite.set_ska(refreshed, refresh_every=1)
    with torch.no_grad():
        a, b = (echo_suite.value_logits(m, examples, True) for m in (model, refreshed))
    assert (a - b).abs().max() > 1e-4


def test_a_failed_measurement_does_not_affect_others(args, monkeypatch):
    """What was trained comes first; a cell that fails is named, and leaves the others and the report as they are."""
    measure = echo_suite.measure

    def fragile(model, task, *args):
        if task == "niah":
            raise RuntimeError("grid dimension > 65535")
        return measure(model, task, *args)

    monkeypatch.setattr(echo_suite, "measure", fragile)
    row = {"model": "ssm", "lr": 1e-3, "seed": 0}
    first, *rest = list(echo_transfer.run(row, args))
    assert first["finite"] and first["curve"] and "cells" not in first
    result = whole(rest)
    assert result["errors"] == {"niah 64 1": "RuntimeError: grid dimension > 65535"}
    assert {cell[0] for cell in result["cells"]} == set(TASKS) - {"niah"} and result["decode_agreement"] == 1
    text = report(results_of("echo_transfer", [row | first | result]))
    assert "| niah |  |" in text and "1 measurements failed." in text
    failed = whole(echo_mqar.run({**row, "pairs": 4, "gap": 8}, args))
    assert failed["errors"].keys() == {"dev_loss", "accuracy"} and "curve" in failed


NOT_MEASURED = {"seed": 0, "lr": 1e-3, "finite": True, "steps": 2, "parameters": 5, "curve": [[1, 2.0], [2, 1.5]]}


@pytest.mark.parametrize(
    "name, plot, row",
    [
        ("echo_transfer", plot_transfer, {"model": "ska"}),
        ("echo_ablation", plot_ablation, {"model": "ska", "variant": "K = 1"}),
        ("echo_mqar", plot_grid, {"model": "ska", "pairs": 4, "gap": 8}),
        ("echo_scratchpad", plot_scratchpad, {"variant": "ssm", "tier": "easy"}),
    ],
)
@pytest.mark.parametrize("measured", [{}, {"cells": []}, {"accuracy": 0.5}])
def test_tables_and_plots_leave_out_rows_whose_measuring_failed(name, plot, row, measured, tmp_path):
    row = NOT_MEASURED | row | measured | {"errors": {"dev_loss": "RuntimeError: out of memory"}}
    results = results_of(name, [row])
    assert "1 measurements failed." in report(results)
    plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_tiers_stand_in_the_order_of_the_settings():
    row = NOT_MEASURED | {"variant": "ssm", "accuracy": 0.5, "dev_loss": 2.0, "commit": "abc"}
    results = results_of("echo_scratchpad", [row | {"tier": tier} for tier in ("hard", "easy")])
    results["settings"]["variants"] = ["ssm"]
    lines = report(results).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| easy", "| hard"]


def test_means():
    row = {"cells": [["niah", 64, 1, 0.5], ["niah", 128, 1, 1.0], ["mqar", 64, 2, 0.0]]}
    assert mean_of(row) == 50 and mean_of(row, tasks="niah") == 75 and mean_of(row, tasks="niah", length=128) == 100
    assert mean_of(row, tasks="multi_hop") is None


def measured(model, lr, seed, accuracy, **values):
    row = {"model": model, "lr": lr, "seed": seed, "finite": True, "dev_loss": 1 - accuracy, "parameters": 10**6}
    return row | {"cells": [["niah", 64, 1, accuracy], ["tool_trace", 64, 2, accuracy]], "commit": "abc"} | values


def test_both_rates_stand_in_the_table_and_the_papers_figure_at_the_chosen_one():
    rows = [measured("ssm", lr, seed, a) for lr, seed, a in ((1e-3, 0, 0.5), (1e-3, 1, 0.7), (3e-3, 0, 0.4))]
    rows += [measured("ska", 3e-3, 0, 0.9)]
    text = report(results_of("echo_transfer", rows))
    assert "| task | Mamba-2, 0.001 | Mamba-2, 0.003 | SKA, true mask, 0.003 |" in text
    assert "| niah | 60.0 ± 14.1 (52.0) | 40.0 | 90.0 (84.2) |" in text
    assert "Mamba-2 1.00M, 16,384 floats" in text and "standard deviation over seeds" in text


def test_the_table_of_masks_begins_with_what_gets_no_mask():
    """A variant that was not trained has no column."""
    transfer = results_of("echo_transfer", [measured("ssm", 1e-3, 0, 0.5), measured("ska", 3e-3, 0, 0.9)])
    rows = [measured("ska", 3e-3, 0, 0.9, variant="K = 2, chunks of 8")]
    rows += [measured("ska", 3e-3, seed, 0.6, variant="no action mask") for seed in (0, 1)]
    ablation = results_of("echo_ablation", rows)
    for results in (transfer, ablation):
        results["settings"] |= {"lengths": [64], "lr": 3e-3}
    lines = mask_table(transfer, ablation).splitlines()
    assert lines[0].endswith("| SKA, no mask, 0.003 | Mamba-2, 0.001 | SKA, true mask, 0.003 |")
    assert lines[2] == "| trained tasks, 64 | 60.0 ± 0.0 | 50.0 | 90.0 |" and lines[4] == "| seeds | 2 | 1 | 1 |"


def test_the_learning_rate_is_chosen_by_the_mean_over_seeds():
    """Over those that every rate has; a rate at which one diverged is out, whatever the others say."""

    def row(lr, seed, loss):
        found = {"finite": False} if loss is None else {"finite": True, "dev_loss": loss, "cells": []}
        return {"model": "ska", "lr": lr, "seed": seed, **found}

    rows = [row(1e-3, 0, 2.0), row(3e-3, 0, 1.0), row(1e-3, 1, 0.1), row(3e-3, 1, 2.0), row(3e-3, 2, 0.0)]
    assert [(r["lr"], r["seed"]) for r in chosen(rows)["ska"]] == [(1e-3, 0), (1e-3, 1)]
    assert [r["lr"] for r in chosen([rows[0], rows[1]])["ska"]] == [3e-3]
    assert [r["lr"] for r in chosen([*rows, row(1e-3, 2, None)])["ska"]] == [3e-3] * 3
    assert [r["lr"] for r in chosen(rows[:1])["ska"]] == [1e-3] and not chosen([])


def test_the_rate_is_held_and_then_falls():
    """Warm-up over a twentieth, the full rate up to `hold`, at the end a tenth: by the steps of a parameter."""
    args, x = argparse.Namespace(deadline=math.inf), torch.nn.Parameter(torch.zeros(1))
    model = torch.nn.ParameterList([x])
    seen = []

    def loss():
        seen.append(x.item())
        return x.sum() + 1

    fit(model, loss, 200, 1e-3, args, lambda step: (), constant_rate_share=0.6)
    steps = -torch.tensor(seen).diff() / 1e-3
    torch.testing.assert_close(steps[10:119], torch.ones(109), rtol=1e-2, atol=0)
    assert steps[0] < 0.2 and steps[-1] < 0.11 and (steps[121:].diff() < 0).all()


def test_training_ends_when_the_loss_is_small():
    args = argparse.Namespace(deadline=math.inf)
    model = torch.nn.Linear(4, 1)
    x = torch.ones(2, 4)
    result = fit(model, lambda x: model(x).square().mean(), 400, 1e-1, args, lambda step: (x,), stop_below_loss=1e-3)
    assert result["steps"] < 400 and result["curve"][-1][1] < 1e-3 and result["steps"] == result["curve"][-1][0]


def test_one_small_loss_can_be_too_few_to_end_a_training():
    """Losses 5, 0.5, 5, 0.5, 0.5, ...: two points in a row are small for the first time after the fifth step."""
    args, weight = argparse.Namespace(deadline=math.inf), torch.nn.Linear(1, 1)

    def steps(**options):
        losses = iter([5.0, 0.5, 5.0, *[0.5] * 7])
        loss_of = lambda loss: weight.weight.sum() * 0 + loss  # noqa: E731
        batch_of = lambda step: (torch.tensor(next(losses)),)  # noqa: E731
        return fit(weight, loss_of, 10, 1e-3, args, batch_of, stop_below_loss=1.0, points=10, **options)["steps"]

    assert [steps(points_below=n) for n in (1, 2, 3, 8)] == [2, 5, 6, 10]
