"""The choice of a mixer per layer: exact under budgets, from measurements that an interrupted run continues."""

import itertools
import json
import random
from functools import partial

import pytest
import torch

from cli_runner import memmix, result_of
from hf_memmix.conversion import convert_model, load_model, save_student
from hf_memmix.conversion import layer_cost as layer_times
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.layer_cost import LayerCost, coefficients, layer_cost, measured_kinds
from hf_memmix.conversion.mixer_files import mixer_file, read_metadata
from hf_memmix.conversion.records import bytes_of, bytes_text
from hf_memmix.serving.footprint import Footprint
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.evaluation import mixer_search
from hf_memmix.training.evaluation.layer_selection import cost_of_swaps
from hf_memmix.training.evaluation.mixer_choice import best_choice
from hf_memmix.training.evaluation.mixer_search import Budget, aligned_student, choose_mixers
from hf_memmix.training.recipe import Recipe
from hf_memmix.training.train import align
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

# ---- the optimisation


def brute_force(scores, costs, limits):
    """The lowest sum of scores of all choices within the limits, None if there is none."""
    sums = []
    for picks in itertools.product(*(range(len(row)) for row in scores)):
        spent = [sum(costs[layer][pick][d] for layer, pick in enumerate(picks)) for d in range(len(limits))]
        if all(used <= limit for used, limit in zip(spent, limits, strict=True)):
            sums.append(sum(scores[layer][pick] for layer, pick in enumerate(picks)))
    return min(sums, default=None)


@pytest.mark.parametrize("kinds", [0, 1, 2, 3])
def test_the_choice_equals_brute_force(kinds):
    draw = random.Random(kinds)
    solved = 0
    for _ in range(60):
        layers = draw.randint(1, 4)
        sizes = [draw.randint(1, 4) for _ in range(layers)]
        # continuous scores, scores with many ties, and negative ones
        scores = [
            [draw.choice([draw.random(), round(draw.random(), 1), -draw.random()]) for _ in range(n)] for n in sizes
        ]
        costs = [[[draw.randint(0, 9) for _ in range(kinds)] for _ in range(n)] for n in sizes]
        limits = [draw.randint(2 * layers, 8 * layers) for _ in range(kinds)]
        expected, picks = brute_force(scores, costs, limits), best_choice(scores, costs, limits)
        assert (picks is None) == (expected is None)
        if picks is not None:
            solved += 1
            assert sum(scores[i][pick] for i, pick in enumerate(picks)) == pytest.approx(expected, abs=1e-12)
            for d, limit in enumerate(limits):
                assert sum(costs[i][pick][d] for i, pick in enumerate(picks)) <= limit
    assert solved > 24


def test_many_layers_under_three_budgets():
    """80 layers with six candidates: the choice meets every budget, and no exchange of two layers makes it better."""
    draw = random.Random(0)
    unit, us = [32, 2, 1, 4, 1, 1], [9, 7, 11, 8, 5, 4]
    scores = [[0.0] + [abs(draw.gauss(0.05, 0.04)) for _ in range(5)] for _ in range(80)]
    costs = [[[4_000_000 * unit[k], 1000 * us[k], int(k == 0)] for k in range(6)] for _ in range(80)]
    limits = [80 * 12_000_000, 80 * 7200, 10]
    picks = best_choice(scores, costs, limits)
    spent = [sum(row[pick][d] for row, pick in zip(costs, picks, strict=True)) for d in range(3)]
    assert all(used <= limit for used, limit in zip(spent, limits, strict=True))
    for pair in itertools.combinations(range(80), 2):
        ours = sum(scores[layer][picks[layer]] for layer in pair)
        for other in itertools.product(range(6), repeat=2):
            change = list(zip(pair, other, strict=True))
            if sum(scores[layer][pick] for layer, pick in change) < ours - 1e-9:
                more = [sum(costs[i][pick][d] - costs[i][picks[i]][d] for i, pick in change) for d in range(3)]
                assert any(used + extra > limit for used, extra, limit in zip(spent, more, limits, strict=True))


def cells(*rows):
    return [{kind: LayerCost(*cost) for kind, cost in row.items()} for row in rows]


SCORES = [{"attention": 0.0, "gka": 0.1, "lattice": 0.5}, {"attention": 0.0, "gka": 0.6, "lattice": 0.2}]
COSTS = cells(*2 * [{"attention": (1000, 1.0, 1.0), "gka": (100, 3.0, 1.0), "lattice": (10, 2.0, 1.0)}])


@pytest.mark.parametrize(
    ("budget", "types"),
    [
        (Budget(), ["gka", "lattice"]),
        (Budget(keep_count=1), ["gka", "attention"]),
        (Budget(keep_count=2), ["attention", "attention"]),
        (Budget(keep_layers=(0,)), ["attention", "lattice"]),
        (Budget(keep_count=1, keep_layers=(0,)), ["attention", "lattice"]),
        (Budget(keep_count=1, state_bytes=1010), ["attention", "lattice"]),
        (Budget(keep_count=1, state_bytes=1009), ["gka", "lattice"]),
        (Budget(state_bytes=110), ["gka", "lattice"]),
        (Budget(state_bytes=109), ["lattice", "lattice"]),
        (Budget(decode_ms=0.0045), ["lattice", "lattice"]),
        (Budget(keep_count=1, decode_ms=0.003), ["attention", "lattice"]),
    ],
)
def test_budgets(budget, types):
    assert choose_mixers(SCORES, COSTS, budget) == types


def test_impossible_budgets_are_one_clear_line():
    both = cells(*2 * [{"attention": (9, 9.0, 1.0), "gka": (100, 1.0, 1.0), "lattice": (10, 3.0, 1.0)}])
    unknown, untimed = [{"new": 0.1}, {"new": 0.1}], cells(*2 * [{"new": (1, None, None)}])
    for scores, costs, budget, message in (
        (SCORES, COSTS, Budget(state_bytes=19), "state_bytes is 19 B, .* 20 B"),
        (SCORES, COSTS, Budget(decode_ms=float("inf")), "decode_ms is inf"),
        (SCORES, COSTS, Budget(decode_ms=0.0039), "decode_ms is 0.004 ms, .* 0.004 ms"),
        (SCORES, COSTS, Budget(keep_layers=(0,), state_bytes=900), "state_bytes is 900 B, .* 1010 B"),
        (SCORES, both, Budget(state_bytes=100, decode_ms=0.003), "keep_count and state_bytes and decode_ms together"),
        (unknown, untimed, Budget(decode_ms=1.0), "the time of new was not measured"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_mixers(scores, costs, budget)
    assert choose_mixers(unknown, untimed, Budget(state_bytes=2)) == ["new", "new"]


@pytest.mark.parametrize(
    ("text", "count"), [("65536", 65536), ("1.5MiB", 3 * 2**19), (" 2 GB ", 2 * 10**9), ("8KiB", 8192), ("7B", 7)]
)
def test_numbers_of_bytes(text, count):
    assert bytes_of(text, "--state-bytes") == count
    assert bytes_of(bytes_text(count).replace(" ", ""), "x") == pytest.approx(count, rel=0.1)
    for wrong in (text + "x", "-" + text.strip(), "", "1e3"):
        with pytest.raises(ValueError, match="--state-bytes is .*; give a number of bytes"):
            bytes_of(wrong, "--state-bytes")


# ---- costs


def test_times_of_layers_come_from_measurements():
    """A fit has no negative part, follows the measurements, and larger layers and contexts never take less time."""
    assert "attention" in measured_kinds() and {"gka", "lattice", "mamba2"} <= set(measured_kinds())
    for kind in measured_kinds():
        for phase in ("decode", "prefill"):
            assert min(coefficients(kind, phase)) >= 0 < max(coefficients(kind, phase))
    teacher, student = tiny_teacher(layers=2), convert_model(tiny_teacher(layers=2), "gka")
    near, far = (
        layer_cost("attention", attention_module(teacher, 0), teacher.config, 0, context, torch.bfloat16)
        for context in (1024, 65536)
    )
    assert far.state_bytes == 64 * near.state_bytes and far.decode_us > near.decode_us > 0
    mixer = layer_cost("gka", attention_module(student, 0), student.config, 0, 65536, torch.float32)
    assert 2 * mixer.state_bytes == Footprint.of(student.config, torch.float32).state_bytes()
    assert layer_cost("new", attention_module(student, 0), student.config, 0, 1, torch.float32).decode_us is None


def test_the_time_of_a_window_beside_a_memory_is_added(monkeypatch):
    """Also its bytes. Without a measured window there is no time, and a budget of time is refused."""
    memories = [row for row in layer_times._measured()["rows"] if row["kind"] != "window"]
    windows = [row | {"kind": "window", "us": 2 * row["us"]} for row in memories if row["kind"] == "attention"]
    monkeypatch.setattr(layer_times, "coefficients", coefficients.__wrapped__)  # which keeps nothing
    beside = convert_model(tiny_teacher(layers=2), "gka", local_window=8)
    mixer = attention_module(beside, 0)
    for rows, known in ((memories, False), (memories + windows, True)):
        monkeypatch.setattr(layer_times, "_measured", lambda rows=rows: {"rows": rows})
        whole, memory, window = (
            layer_cost(kind, part, beside.config, 0, 64, torch.float32)
            for kind, part in (("gka", mixer), ("gka", mixer.memory), ("window", mixer.window))
        )
        assert 2 * whole.state_bytes == Footprint.of(beside.config, torch.float32).state_bytes()
        choose = partial(choose_mixers, [{"gka": 0.1}] * 2, [{"gka": whole}] * 2, Budget(decode_ms=1e3))
        if known:
            assert whole.decode_us == memory.decode_us + window.decode_us and choose() == ["gka", "gka"]
            continue
        assert whole.decode_us is None
        with pytest.raises(ValueError, match="the window beside gka was not measured"):
            choose()


# ---- measurement


@pytest.fixture(scope="module")
def teacher():
    return tiny_teacher(layers=3)


@pytest.fixture(scope="module")
def tokens():
    return torch.tensor(tiny_tokenizer()(tiny_text(1500), add_special_tokens=False)["input_ids"])


def recipe(**fields):
    return Recipe(**{"steps": 6, "batch_size": 2, "block_size": 72, "trainer": {"disable_tqdm": True}} | fields)


@pytest.mark.product  # its parts have tests
def test_a_candidate_is_the_aligned_student_and_is_kept(teacher, tokens, tmp_path, monkeypatch):
    data = TokenBlocks(tokens, 72)
    expected = convert_model(teacher, "ska")
    align(expected, teacher, data, tmp_path / "alone", recipe=recipe(save_every=0))
    first = aligned_student(teacher, "ska", data, tmp_path / "kept", recipe())
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(first.state_dict()[name], tensor, rtol=0, atol=0)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["ska.safetensors"]

    def refuse(*args, **kwargs):
        raise AssertionError("it trains again")

    monkeypatch.setattr(mixer_search, "train", refuse)
    again = aligned_student(teacher, "ska", data, tmp_path / "kept", recipe())
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in first.state_dict().items())
    for other in ({"steps": 7}, {"seed": 1}):
        with pytest.raises(AssertionError, match="trains again"):
            aligned_student(teacher, "ska", data, tmp_path / "kept", recipe(**other))
        assert not (tmp_path / "kept" / "ska.safetensors").exists()
        monkeypatch.undo()
        aligned_student(teacher, "ska", data, tmp_path / "kept", recipe())
        monkeypatch.setattr(mixer_search, "train", refuse)


@pytest.mark.product  # a whole command; its parts have tests
def test_an_interrupted_candidate_continues(teacher, tokens, tmp_path, monkeypatch):
    """A killed run leaves a checkpoint; the same call continues from it and ends with the same weights."""
    data = TokenBlocks(tokens, 72)
    whole = aligned_student(teacher, "gka", data, tmp_path / "whole", recipe(save_every=2))

    class Killed(Exception):
        pass

    class Kill(mixer_search._Steps):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise Killed

    with pytest.raises(Killed):
        aligned_student(
            teacher, "gka", data, tmp_path / "kept", recipe(save_every=2), callbacks=[Kill(lambda *at: None)]
        )
    assert read_metadata(mixer_file(tmp_path / "kept", "gka")) is None
    seen = []
    steps = mixer_search._Steps(lambda done, total: seen.append(done))
    again = aligned_student(teacher, "gka", data, tmp_path / "kept", recipe(save_every=2), callbacks=[steps])
    assert seen[0] == 4 and seen[-1] == 6
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["gka.safetensors"]


# ---- the command


@pytest.fixture
def workspace(tmp_path, teacher):
    teacher.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(tiny_text(600))
    (tmp_path / "recipe.yaml").write_text("stage: align\nsteps: 3\nbatch_size: 2\nblock_size: 72\nsave_every: 1\n")
    return tmp_path


def arguments(workspace, *more):
    start = ["select", "--teacher", workspace / "teacher", "--out", workspace / "plan.json"]
    start += ["--text", workspace / "text.txt", "--length", "48", "--samples", "2", "--max-tokens", "96"]
    return [*start, "--tasks", "niah", *more]


def training(workspace, mixers):
    return ["--mixers", mixers, "--train-text", workspace / "text.txt", "--recipe", workspace / "recipe.yaml"]


def test_the_drills_of_the_recipe_are_in_the_rows(workspace):
    recipe = "stage: align\nsteps: 1\nbatch_size: 1\nblock_size: 128\ndrills: 0.5\n"
    (workspace / "recipe.yaml").write_text(recipe)
    refused = memmix(*arguments(workspace, *training(workspace, "gka,ska")), "--keep-count", "1")
    # the tokenizer of these tests does not know the words of the drills
    assert refused.exit_code == 1 and "names or things of the drills" in refused.output.splitlines()[-1]


@pytest.mark.product  # a whole command; its parts have tests
def test_a_mixture_is_selected_converted_aligned_and_distilled(workspace, teacher, monkeypatch):
    select = arguments(workspace, *training(workspace, "gka,ska"))
    plan = result_of(memmix(*select, "--keep-count", "1", "--json"))
    saved = json.loads((workspace / "plan.json").read_text())
    assert saved == {name: value for name, value in plan.items() if name != "out"}
    names = sorted(path.name for path in workspace.iterdir())
    assert names == ["plan.json", "plan.mixers", "plan.png", "recipe.yaml", "teacher", "text.txt"]
    kept = sorted(path.name for path in (workspace / "plan.mixers").iterdir())
    assert kept == ["gka.json", "gka.safetensors", "ska.json", "ska.safetensors"]
    # exact, from the table that the plan holds
    scores = [{kind: cell["score"] for kind, cell in row["mixers"].items()} for row in saved["scores"]]
    best = min(
        (sum(row[kind] for row, kind in zip(scores, types, strict=True)), types)
        for types in itertools.product(("attention", "gka", "ska"), repeat=3)
        if types.count("attention") <= 1
    )
    assert saved["totals"]["score"] == pytest.approx(best[0]) and tuple(saved["mixer_types"]) == best[1]
    assert saved["keep"] == [i for i, kind in enumerate(saved["mixer_types"]) if kind == "attention"]
    # a score is the loss of the teacher with this mixer in this layer
    student = convert_model(teacher, "ska")
    mixer_search.load_mixers(student, workspace / "plan.mixers")
    blocks = torch.tensor(tiny_tokenizer()(tiny_text(600), add_special_tokens=False)["input_ids"][:96]).view(-1, 48)
    _, (cost,) = cost_of_swaps(teacher, student, [[1]], blocks, {})
    assert saved["scores"][1]["mixers"]["ska"]["kl"] == pytest.approx(cost["kl"], rel=1e-4)

    # another budget is chosen from the same measurements, without training
    def refuse(*args, **kwargs):
        raise AssertionError("it trains again")

    monkeypatch.setattr(mixer_search, "train", refuse)
    monkeypatch.setattr(mixer_search, "rank_layers", refuse)
    size = saved["single"]["ska"]["state_bytes"]
    small = result_of(memmix(*select, "--state-bytes", str(size), "--overwrite", "--json"))
    assert small["mixer_types"] == ["ska"] * 3 and small["totals"]["state_bytes"] == size
    refused = memmix(*select, "--state-bytes", str(size - 1), "--overwrite")
    assert refused.exit_code == 1 and "state_bytes is" in refused.output.splitlines()[-1]
    assert json.loads((workspace / "plan.json").read_text())["mixer_types"] == ["ska"] * 3  # the old plan stays

    shown = memmix(*select, "--keep-layers", "0", "--overwrite")
    assert shown.exit_code == 0 and "\x1b" not in shown.stdout and "gka alone" in shown.stdout
    plan = json.loads((workspace / "plan.json").read_text())
    assert plan["mixer_types"][0] == "attention" and plan["mixer_types"].count("attention") == 1
    monkeypatch.undo()

    # the plan's student has the aligned mixers; align and distill make the same student
    pair = ["--teacher", workspace / "teacher", "--plan", workspace / "plan.json"]
    result_of(memmix("convert", *pair, "--out", workspace / "s", "--json"))
    converted = load_model(workspace / "s")
    assert converted.config.mixer_types == plan["mixer_types"]
    files = convert_model(teacher, layers=plan["mixer_types"])
    mixer_search.load_mixers(files, workspace / "plan.mixers")
    assert all(torch.equal(tensor, files.state_dict()[name]) for name, tensor in converted.state_dict().items())
    for stage in ("align", "distill"):
        run = [stage, "--text", workspace / "text.txt", "--json"]
        run += ["--steps", "2", "--batch-size", "2", "--block-size", "72"]
        by_plan = result_of(memmix(*run, *pair, "--out", workspace / f"{stage}1"))
        start = ["--teacher", workspace / "teacher", "--student", workspace / "s"]
        alone = result_of(memmix(*run, *start, "--out", workspace / f"{stage}2"))
        assert by_plan["log"] == alone["log"]
    measured = ["--text", workspace / "text.txt", "--block-size", "32", "--json"]
    report = memmix("report", "--student", workspace / "distill1", *pair[:2], *measured)
    (workspace / "report.json").write_text(report.stdout)
    card = ["card", workspace / "distill1", "--report", workspace / "report.json", "--base-model", "tiny/teacher"]
    written = memmix(*card, "--license", "mit", "--plan", workspace / "plan.json")
    assert written.exit_code == 0, written.output
    assert "the chosen mixer is bold" in (workspace / "distill1" / "README.md").read_text()


@pytest.mark.product  # a whole command; its parts have tests
def test_candidates_that_users_have_aligned(workspace, teacher, monkeypatch):
    for kind in ("gka", "lattice"):
        save_student(convert_model(teacher, kind), workspace / kind, tiny_tokenizer())
    students = ["--student", workspace / "gka", "--student", workspace / "lattice"]
    plan = result_of(memmix(*arguments(workspace, *students), "--json"))
    assert set(plan["mixer_types"]) <= {"gka", "lattice"} and plan["candidates"] == ["gka", "lattice"]
    ours = convert_model(teacher, layers=plan["mixer_types"], mixers=plan["mixers"])
    mixer_search.load_mixers(ours, workspace / "plan.mixers")
    for student in (convert_model(teacher, kind) for kind in ("gka", "lattice")):
        for layer, kind in enumerate(plan["mixer_types"]):
            if student.config.mixer_types[layer] == kind:
                expected = attention_module(student, layer).state_dict()
                found = attention_module(ours, layer).state_dict()
                assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    with monkeypatch.context() as patch:  # another budget needs no new scores
        patch.setattr(mixer_search, "rank_layers", lambda *args, **kwargs: 1 / 0)
        again = result_of(memmix(*arguments(workspace, *students), "--keep-count", "1", "--overwrite", "--json"))
    assert again["scores"] == plan["scores"]
    # the same weights with another config.json compute something else, so they are scored again
    config = workspace / "teacher" / "config.json"
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    config.write_text(json.dumps(json.loads(config.read_text()) | rope))
    again = result_of(memmix(*arguments(workspace, *students), "--overwrite", "--json"))
    assert again["scores"] != plan["scores"]
    save_student(convert_model(teacher, "coffee", keep=[1]), workspace / "part", tiny_tokenizer())
    run = memmix(*arguments(workspace, *students[:2], "--student", workspace / "part", "--overwrite"))
    assert run.exit_code == 1 and "the student with coffee has attention in layers 1" in run.output
    run = memmix(*arguments(workspace, *students[:2], *students[:2], "--overwrite"))
    assert run.exit_code == 1 and "both have the mixer gka" in run.output


def test_a_budget_that_no_choice_meets_is_one_clear_line(workspace):
    """test_cli_start.py has the mistakes that are found before torch is imported."""
    text = ["--train-text", workspace / "text.txt", "--state-bytes", "9"]
    run = memmix(*arguments(workspace, "--mixers", "gka,ska", *text))
    *_, last = run.output.splitlines()
    assert run.exit_code == 1 and last.startswith("error:") and "state_bytes is 9 B" in last, run.output
    assert not (workspace / "plan.json").exists() and not (workspace / "plan.mixers").exists()
