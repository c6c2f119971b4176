"""Measuring a pair that does not fit into memory together: the figures of both models at once, one after the other."""

import json

import pytest
import torch

from cli_runner import memmix, result_of
from hf_memmix.conversion import compare_models, convert_model, load_model, save_student
from hf_memmix.conversion.compare_in_turn import compare_in_turn
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

TOKENS = torch.randint(3, 64, (150,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pair(tmp_path):
    """Folders of a teacher and of a student that keeps one layer and has moved away from it."""
    teacher = tmp_path / "teacher"
    tiny_teacher("qwen2").save_pretrained(teacher)
    tiny_tokenizer().save_pretrained(teacher)
    student = convert_model(teacher, "gka", keep=[1])
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if name.endswith(("down_proj.weight", "v_proj.weight")):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    save_student(student, tmp_path / "student", tiny_tokenizer())
    (tmp_path / "text.txt").write_text(tiny_text(300))
    return tmp_path / "student", teacher


def spread(folder, work):
    """A model of three layers with the second one on disk, whose weights are on "meta" between forwards."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    return load_model(folder, "float32", device_map=places, offload_folder=str(work / f"off-{folder.name}"))


@pytest.mark.parametrize("placed", ["whole", "partly on disk"])
def test_figures_are_those_of_both_at_once(pair, placed, tmp_path):
    settings = {"block_size": 32, "batch_size": 2, "max_tokens": 140}
    expected = compare_models(*map(load_model, pair), TOKENS, **settings)
    in_memory, calls = [], []

    def load(folder):
        in_memory.append(folder.name)
        return load_model(folder) if placed == "whole" else spread(folder, tmp_path)

    found = compare_in_turn(
        *pair, load, TOKENS, **settings, top_k=64, progress=lambda done, total: calls.append((done, total))
    )
    assert in_memory == ["teacher", "student"] and calls == [(i, 6) for i in range(1, 7)]
    assert found.pop("kl_top_k") == 64 and found["layer_error"].keys() == expected["layer_error"].keys() == {0, 2}
    assert found["kl"] > 0.01 and min(found["layer_error"].values()) > 0.01
    for name in ("tokens", "teacher_ppl", "student_ppl", "ppl_ratio", "top1_agreement", "kl"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    for layer, error in expected["layer_error"].items():
        assert found["layer_error"][layer] == pytest.approx(error, rel=1e-4)


@pytest.mark.product  # a whole command; its parts have tests
def test_fewer_probabilities_give_a_lower_bound(pair):
    found = {k: compare_in_turn(*pair, load_model, TOKENS, block_size=32, top_k=k)["kl"] for k in (2, 16, 64)}
    assert 0 < found[2] < found[16] < found[64]


def test_wrong_pairs_are_refused_before_a_model_is_loaded(pair):
    with pytest.raises(ValueError, match="without memory layers"):
        compare_in_turn(pair[1], pair[1], None, TOKENS)
    with pytest.raises(ValueError, match="token 64 is outside the vocabulary"):
        compare_in_turn(*pair, None, TOKENS + 1)


@pytest.mark.product  # a whole command; its parts have tests
def test_commands_with_a_device_map(pair, tmp_path):
    student, teacher = pair
    command = ["report", "--student", student, "--teacher", teacher, "--text", tmp_path / "text.txt"]
    command += ["--block-size", "32", "--json"]
    at_once, in_turn = result_of(memmix(*command)), result_of(memmix(*command, "--device-map", "auto"))
    assert in_turn.pop("kl_top_k") == 64
    assert in_turn.keys() == at_once.keys() and in_turn["parameters"] == at_once["parameters"]
    assert in_turn["kl"] == pytest.approx(at_once["kl"], rel=1e-4) and in_turn["dtype"] == at_once["dtype"]

    results = []
    for name, options in (("one", []), ("two", ["--device-map", "auto"])):
        probes = ["eval", student, "--teacher", teacher, "--text", tmp_path / "text.txt", "--tasks", "mqar"]
        run = memmix(*probes, "--lengths", "64", "--samples", "4", "--out", tmp_path / name, *options)
        assert run.exit_code == 0, run.output
        results.append(json.loads((tmp_path / name / "probes.json").read_text()))
    for row in results[0]["summary"] + results[1]["summary"]:
        row["student"], row["teacher"] = (
            {k: round(v or 0, 4) for k, v in row[m].items()} for m in ("student", "teacher")
        )
    assert results[0]["summary"] == results[1]["summary"] and results[0]["models"] == results[1]["models"]

    write = ["generate", "--model", student, "--prompt", "the cat", "--temperature", "0", "--max-new-tokens", "5"]
    texts = [result_of(memmix(*write, "--json", *more))["text"] for more in ([], ["--device-map", "auto"])]
    assert texts[0] == texts[1]


@pytest.mark.product  # a whole command; its parts have tests
@pytest.mark.parametrize("kinds", [[], ["gka"], ["gka", "mamba2"]], ids=["converted", "aligned", "mixture"])
def test_select_with_a_device_map_gives_the_same_plan(pair, tmp_path, kinds):
    """The teacher is spread; the mixers come from a new conversion, or from aligned students."""
    _, teacher = pair
    command = ["select", "--teacher", teacher, "--text", tmp_path / "text.txt", "--json"]
    command += ["--tasks", "none", "--length", "64", "--max-tokens", "256"]
    command += [] if len(kinds) > 1 else ["--keep-count", "1"]
    command += [] if kinds else ["--mixer", "gka"]
    for kind in kinds:
        save_student(convert_model(teacher, kind), tmp_path / kind, tiny_tokenizer())
        command += ["--student", tmp_path / kind]
    plans = []
    for name, options in (("one", []), ("two", ["--device-map", "auto"])):
        plans.append(result_of(memmix(*command, "--out", tmp_path / f"{name}.json", *options)))
    decided, rows = ("mixer_types", "scores") if len(kinds) > 1 else ("keep", "layers")
    assert plans[0][decided] == plans[1][decided] and plans[0].get("mixer") == plans[1].get("mixer")
    for one, two in zip(plans[0][rows], plans[1][rows], strict=True):
        scores = [(one["mixers"][kind]["score"], two["mixers"][kind]["score"]) for kind in kinds if "mixers" in one]
        for ours, theirs in scores or [(one["kl"], two["kl"]), (one["nll"], two["nll"])]:
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_wrong_device_maps_are_one_line(pair, tmp_path):
    student, teacher = pair
    write = ["generate", "--model", student, "--prompt", "the cat"]
    select = ["select", "--teacher", teacher, "--out", tmp_path / "x.json", "--mixers", "gka,mamba2"]
    for command, message in (
        ([*write, "--device-map", "balanced"], "--device-map is 'balanced'"),
        ([*write, "--device-map", "auto", "--device", "cpu"], "--device is 'cpu', but --device-map auto"),
        ([*select, "--device-map", "auto"], "--mixers aligns its candidates"),
    ):
        run = memmix(*command)
        assert run.exit_code == 1 and message in " ".join(run.output.split())
