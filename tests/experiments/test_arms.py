"""The arms of SmolLM2: which rows are planned, and one arm from the choice of layers to its table."""

import json
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hf_memmix.assets import asset_path
from hf_memmix.swap import memory_mixers
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.experiments.common import harness
from hf_memmix.training.experiments.smollm2 import arms, arms_report, few_shot, measuring, recipe_changes
from hf_memmix.training.groups import parameter_rates
from hf_memmix.training.recipe import load_recipe

ENVIRONMENT = {"hardware": "a CPU", "commit": "abc"}


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    folder, teacher = tmp_path_factory.mktemp("arms"), asset_path("tiny_teacher")
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    for split, file in (("train", "dev.txt"), ("heldout", "heldout.txt"), ("domain", "heldout.txt")):
        text = asset_path(file).read_text(encoding="utf-8")[:40_000]
        numpy.save(folder / f"{split}.npy", numpy.asarray(tokenizer(text)["input_ids"], dtype=numpy.uint16))
        (folder / f"{'dev' if split == 'train' else split}.txt").write_text(text, encoding="utf-8")
    sizes = {
        "batch_size": 1,
        "block_size": 128,
        "length": 128,
        "lengths": [128],
        "samples": 1,
        "measured_tokens": 1024,
    }
    choice = {"choice_samples": 1, "choice_tokens": 128, "window": 4, "sinks": 1, "kept": 1, "seed": 0}
    few_shot.main(folder / "few_shot", None, 5, 2, 0, ["arithmetic"])
    probes = {
        "probes": ["fact"],
        "few_shot": folder / "few_shot",
        "free_prompts": 2,
        "free_tokens": 3,
        "text": folder / "dev.txt",
    }
    asked = {
        "arms": ["gka @ times=2 drills=.5 then=128 average=.5"],
        "given_steps": "3,4",
        "compile": False,
        "deadline": float("inf"),
    }
    options = sizes | choice | probes | asked
    return SimpleNamespace(teacher=teacher, data=folder, out=folder / "a.json", **options)


def with_options(args, **changed):
    return SimpleNamespace(**(vars(args) | changed))


@pytest.fixture
def done():
    """The finished rows after one arm."""
    trace = [{"layer": layer, "loss": 1.0, "kl": 1.0} for layer in (None, 7, 2, 5)]
    teacher = {"step": "teacher", "arm": "teacher", "choice": {"keep": [2, 5, 7], "trace": trace}}
    arm = {"step": "arm", "arm": "gka", "keep": [2, 5, 7], "seed": 0, "align": 10, "distill": 20, "seconds": 30.0}
    return [teacher, arm]


def test_arms_differ_in_kept_layers_seed_and_steps(args, done):
    asked = ["gka", "gka @ kept=2 seed=1", "gka @ times=3 kept=0"]
    rows = arms.rows_to_run(done, with_options(args, kept=3, given_steps="10,20", arms=asked))
    assert [row["keep"] for row in rows] == [[2, 5, 7], [2, 7], []] and [row["seed"] for row in rows] == [0, 1, 0]
    assert [(row["align"], row["distill"]) for row in rows] == [(10, 20), (10, 20), (30, 60)]
    assert [harness.matches(done[1], row) for row in rows] == [True, False, False]


def test_an_arm_begins_only_if_it_can_end(args, done):
    short = with_options(args, deadline=time.time() + 60, given_steps="10,20", arms=["gka @ times=3", "gka @ seed=1"])
    assert [row["seed"] for row in arms.rows_to_run(done, short)] == [1]


@pytest.mark.parametrize(
    "asked",
    [
        "nothing",
        "gka @ kept",
        "gka @ kept=few",
        "gka @ layers=1",
        "gka @ drills=2",
        "gka @ answers=1",
        "gka @ more=1",
        "gka @ own=.5",
        "gka @ drills=.5 own=.6",
        "gka @ drills=.5 answers=0 own=.2",
    ],
)
def test_arms_that_cannot_be_run_are_refused(args, asked):
    with pytest.raises(typer.BadParameter):
        arms.check(with_options(args, arms=[asked]))


@pytest.mark.parametrize("arm", [name for name in arms.ARMS if "first token" in name and name.endswith(arms.FAR)])
def test_the_window_beside_a_memory_reads_the_first_token(args, arm):
    """Then the state of the window has one token more."""
    student = arms.student_of({"arm": arm, "keep": []}, args)
    mixer = memory_mixers(student)[0]
    shape, _ = mixer.state_shapes(1)["window_k"]
    assert shape[1] == mixer.options.local_window + 1


def test_an_arm_is_trained_and_measured_beside_its_teacher(args):
    rows = []
    while waiting := [row for row in arms.rows_to_run(rows, args) if not any(harness.matches(r, row) for r in rows)]:
        outcome = arms.run(waiting[0], args)
        parts = [outcome] if isinstance(outcome, dict) else outcome
        rows.append({**waiting[0], **{key: value for part in parts for key, value in part.items()}})
    teacher, arm = rows
    assert (
        arm["keep"] == teacher["choice"]["keep"]
        and arm["tokens"] == (14 + recipe_changes.THEN_STEPS) * 128
        and arm["heldout_kl"] > 0
    )
    assert arm["recall"][0]["teacher"]["choice"] == teacher["fact_128_choice"]
    assert {"fact", "drilled"} == {row["task"] for row in arm["recall"]}
    results = {
        "rows": rows,
        "settings": {"lengths": [128], "probes": ["fact"], "window": args.window},
        "environment": ENVIRONMENT,
    }
    assert f"| gka, drills, average 0.5, then 128 | {arm['heldout_kl']:.3f} |" in arms_report.table(results)
    arms_report.plot([results, results], args.data / "recall.png")
    assert (args.data / "recall.png").stat().st_size > 5000


@pytest.mark.parametrize("asked", ["gka @ drills=.5", "gka @ drills=.5 answers=0", "gka @ drills=.5 more=1", "gka"])
def test_the_rows_of_an_arm_have_its_share_of_drills_and_its_weight_of_answers(args, asked, done):
    (row,) = arms.rows_to_run(done[:1], with_options(args, arms=[asked]))
    data = arms.data_of(row, args.block_size, args)
    text = measuring.tokens_of(args.data, "train")[: data.blocks.numel()].view_as(data.blocks)
    drilled = (data.blocks != text).any(1)
    assert int(drilled.sum()) == (len(data) // 2 if row["drills"] else 0)
    if row["drills"]:
        weights = data.loss_mask.sum(1) / args.block_size
        assert torch.allclose(weights, 1 + drilled.float() * (row["answers"] is None))


def test_changes_of_the_conversion_reach_the_student(args):
    row = {"arm": "gka + window 64, first token", "keep": [2], "rope": 0, "unshare": 1}
    student = arms.student_of(row, args)
    assert student.config.attention_without_rope == [2] and memory_mixers(student)[0].options.unshare_kv_heads


@pytest.mark.parametrize(("changes", "rates"), [({"frozen": 1}, (0.0, 0.0)), ({"slope": 0.5}, (0.0625, 0.5))])
def test_the_rates_of_mlps_are_changed_alone(args, changes, rates):
    student = arms.student_of({"arm": "gka", "keep": [2]}, args)
    row, depth = {"frozen": None, "slope": None} | changes, len(student.config.mixer_types)
    recipe = load_recipe("distill", rest_learning_rate=0.5, groups=recipe_changes.groups(row, depth, 0.5))
    found = parameter_rates(student, recipe)
    assert [found[f"model.layers.{i}.mlp.up_proj.weight"][0] for i in (depth - 4, depth - 1)] == list(rates)
    assert {rate for name, (rate, _) in found.items() if ".mlp." not in name} == {0.5, recipe.learning_rate}


@pytest.mark.parametrize(("stage", "window_rate"), [("align", 1.0), ("distill", 0.5)])
def test_the_rate_of_mixers_has_factors_of_its_own(stage, window_rate):
    recipe = load_recipe(stage, learning_rate=0.4, rest_learning_rate=0.2)
    found = recipe_changes.rates(recipe, {"rate": 0.5, "mixers": 0.25, "window_rate": 0.5})
    assert found == {"learning_rate": 0.05, "rest_learning_rate": 0.1, "window_rate": window_rate}


def test_own_texts_take_the_place_of_text_and_of_no_drill(args, done):
    (row,) = arms.rows_to_run(done[:1], with_options(args, arms=["gka @ drills=.5"]))
    data = arms.data_of(row, 128, args)
    own = TokenBlocks(torch.full((256,), 7), 128, None, loss_mask=torch.arange(256).view(2, 128) % 2 == 0)
    mixed = recipe_changes.with_own(data, own, 0.25)
    taken, drilled = (mixed.blocks == 7).all(1), (data.loss_mask != 1).any(1)
    assert int(taken.sum()) == round(len(data) / 4) and not (taken & drilled).any()
    assert (mixed.loss_mask[taken].sum(1) == 64).all() and (mixed.blocks[~taken] == data.blocks[~taken]).all()


def test_the_average_of_the_weights_is_that_of_the_last_steps():
    model, average = torch.nn.Linear(1, 1, bias=False), recipe_changes.Average(0.5)
    for value in (1.0, 2.0, 4.0):
        model.weight.data.fill_(value)
        average.on_step_end(None, None, None, model)
    average.on_train_end(None, None, None, model)
    assert model.weight.item() == 0.25 * 1 + 0.25 * 2 + 0.5 * 4


def test_what_lies_outside_every_window_has_a_table(args):
    rows = [{"fact_1024_far": 0.9, "fact_2048_far": 0.7}, {"fact_1024_far": 0.25, "fact_2048_far": 0.5}]
    groups = {"teacher": rows[:1], "gka": rows[1:], "window 384": rows[1:]}
    (table,) = arms_report._far("no kept layers", {1024, 2048}, groups)
    assert table.splitlines()[2:] == ["| teacher | 90 |", "| gka | 25 |", "| window 384 | 25 |"]
    assert arms_report._far("no kept layers", {96}, groups | {"teacher": [{"fact_96_choice": 1.0}]}) == []
    assert arms_report._far("no kept layers", {1024}, {"teacher": rows[:1], "gka": rows[1:]}) == []


def test_the_command_trains_on_drills_and_goes_on_where_it_stopped(args, tmp_path):
    names = ("teacher", "data", "kept", "window", "sinks", "given_steps", "batch_size", "block_size", "length")
    names += ("choice_samples", "choice_tokens", "samples", "measured_tokens", "free_prompts", "free_tokens")
    given = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    given += ["--lengths", "128", "--out", str(tmp_path / "drills.json")]
    asked = ["window 64, first token @ kept=0 drills=.5", "gka + window 64, first token @ kept=0 drills=.5 rate=2"]
    app, found = typer.Typer(), []
    app.command()(arms.main)
    for count in (1, 2):
        names = [part for arm in asked[:count] for part in ("--arms", arm)]
        result = CliRunner().invoke(app, [*given, *names])
        assert result.exit_code == 0, result.output
        found.append(json.loads((tmp_path / "drills.json").read_text())["rows"])
    assert [row["arm"] for row in found[1]] == ["teacher", *(arm.partition(" @ ")[0] for arm in asked)]
    assert found[1][:2] == found[0] and found[1][2]["rate"] == 2 and found[1][2]["same_texts"] >= 0


def test_seeds_of_an_arm_share_a_line_and_lengths_that_the_teacher_fails_are_left_out(args):
    teacher = {"choice": {"trace": [{"layer": None, "loss": 2.0, "kl": 1.0}]}}
    common = {
        "same_texts": 1.0,
        "generated_answers": 0.5,
        "fact_96_choice": 0.9,
        "fact_99_choice": 0.7,
        "tokens": 32,
        "align": 1,
        "distill": 1,
    }
    common |= {"generation": {"median": 3.0, "prompts": 2, "new_tokens": 4}}
    common |= {"recall": [{"answers": 5}], "state_bytes": 10, "arm": "gka", "heldout_kl": 0.1, "domain_kl": 0.1}
    rows = [common | teacher | {"arm": "teacher"}]
    for keep, ratio in (([0], 1.5), ([], 1.1), ([], 1.3)):
        rows.append(common | {"keep": keep, "domain_ppl_ratio": ratio})
    settings = {"lengths": [48, 96, 99], "probes": ["fact"], "window": 4}
    results = {"rows": rows, "settings": settings, "environment": ENVIRONMENT}
    table = arms_report.table(results)
    assert "| 1.100 to 1.300 | 3 | 50 | 90 |\n" in table and "| 1.500 | 3 | 50 | 90 |\n" in table
