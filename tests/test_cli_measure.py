"""`memmix eval` and `memmix select` end to end on tiny models, and what mistakes look like."""

import json

import pytest
import torch
from safetensors.torch import load_file

from cli_runner import memmix, result_of
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.conversion.written import MARKER, mark_folder
from hf_memmix.mixers import WindowOptions
from hf_memmix.training.card_inputs import read_plan
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

SMALL = ["--lengths", "48,64", "--samples", "1", "--json"]


@pytest.fixture
def workspace(tmp_path):
    for name, layers in (("teacher", 2), ("other", 1)):
        tiny_teacher("llama", layers=layers).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text(tiny_text(200))
    result_of(memmix("convert", "--teacher", tmp_path / "teacher", "--mixer", "gka", "--out", tmp_path / "student",
                     "--json"))  # fmt: skip
    return tmp_path


@pytest.mark.product  # a whole command; its parts have tests
def test_teacher_beside_student(workspace):
    at = ["--text", workspace / "text.txt", "--tasks", "niah,mqar", "--out", workspace / "eval"]
    teacher = ["--teacher", workspace / "teacher", "--generate", "3"]
    result = result_of(memmix("eval", workspace / "student", *teacher, *at, *SMALL))
    names = [MARKER, "probes.json", "probes.png", "probes_gain.png"]
    assert sorted(p.name for p in (workspace / "eval").iterdir()) == names
    saved = json.loads((workspace / "eval" / "probes.json").read_text())
    assert saved == {name: value for name, value in result.items() if name != "out"}
    assert saved["models"]["student"]["mixer_types"] == ["gka", "gka"] and saved["text"]["sha256"]
    assert [row["task"] for row in saved["summary"]] == ["niah", "mqar"]
    assert saved["generation"]["settings"] == {"prompts": 3, "prompt_tokens": 128, "new_tokens": 128, "seed": 0}
    assert saved["generation"]["student"]["prompts"] == 3 and saved["by_length"][0]["student"]["generated_interval"]
    assert all(row["teacher"] and row["student"] for row in saved["cells"])
    run = memmix("eval", workspace / "student", *at, *SMALL[:-1], "--overwrite")
    assert run.exit_code == 0 and "gain" in run.stdout
    assert "choice or exact" in run.stdout and "64 tokens" in run.stdout


def test_a_length_without_room_for_a_probe_is_one_clear_line(workspace):
    """test_cli_start.py has the mistakes that are found before torch is imported."""
    run = memmix("eval", workspace / "student", "--tasks", "niah", "--lengths", "4", "--text", workspace / "text.txt",
                 "--out", workspace / "e")  # fmt: skip
    last = run.output.splitlines()[-1]
    assert run.exit_code == 1 and last.startswith("error:") and "give a longer one" in last
    assert not (workspace / "e").exists()


def test_what_a_command_reads_is_not_replaced(workspace):
    """With --overwrite, an output that is or holds the model or the text would remove them."""
    (workspace / "runs").mkdir()
    (workspace / "student").rename(workspace / "runs" / "student")
    (workspace / "text.txt").rename(workspace / "runs" / "text.txt")
    runs, student, text = (workspace / part for part in ("runs", "runs/student", "runs/text.txt"))
    mark_folder(runs)
    pair = ["--student", student, "--teacher", workspace / "teacher", "--text", text]
    for command, out in (
        (["eval", student, "--tasks", "niah", "--lengths", "64"], student),
        (["eval", student, "--tasks", "niah", "--lengths", "64", "--text", text], runs),
        (["align", *pair], runs),
        (["align", "--stream", *pair], runs),
        (["distill", *pair], runs),
        (["cache-teacher", *pair[2:]], runs),
        (["merge", student, "--student", student], runs),
        (["import-hmf", student], student),
    ):
        where = [out] if command[0] == "import-hmf" else ["--out", out]
        run = memmix(*command, *where, "--overwrite")
        assert run.exit_code == 1 and "which is read; give another folder" in run.output.splitlines()[-1], run.output
        assert (student / "model.safetensors").is_file() and text.is_file()
    small = ["--batch-size", "2", "--block-size", "16", "--steps", "1", "--json"]
    result_of(memmix("distill", *pair, "--out", student, *small, "--overwrite"))  # trained in its place


def test_select_replaces_only_its_own_files(workspace):
    select = ["select", "--teacher", workspace / "teacher", "--out", workspace / "plan.json"]
    (workspace / "plan.png").write_text("a picture")
    run = memmix(*select)
    assert run.exit_code == 1 and "plan.png' is not a plot of memmix" in run.output
    run = memmix(*select, "--overwrite")
    assert run.exit_code == 1 and "is not a plot of memmix, so it is not replaced" in run.output
    (workspace / "plan.json").write_text('{"precious": 1}')
    run = memmix(*select, "--overwrite")
    assert run.exit_code == 1 and "is not a plan of memmix, so it is not replaced" in run.output
    assert (workspace / "plan.png").read_text() == "a picture"


def test_another_vocabulary_is_refused(workspace):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(workspace / "other")
    run = memmix("eval", workspace / "student", "--teacher", workspace / "other", "--out", workspace / "e", *SMALL)
    assert run.exit_code == 1 and "different vocabularies" in run.output
    # as many words, two of them exchanged
    exchanged = (workspace / "other" / "tokenizer.json").read_text()
    exchanged = json.loads(exchanged)
    words = exchanged["model"]["vocab"]
    words["the"], words["cat"] = words["cat"], words["the"]
    exchanged["added_tokens"] = [token for token in exchanged["added_tokens"] if token["content"] != "extra"]
    (workspace / "other" / "tokenizer.json").write_text(json.dumps(exchanged))
    run = memmix("eval", workspace / "student", "--teacher", workspace / "other", "--out", workspace / "e", *SMALL)
    assert run.exit_code == 1 and "different vocabularies" in run.output
    tokenizer.save_pretrained(workspace / "student")
    for command in (["report"], ["align", "--out", workspace / "e"]):
        run = memmix(*command, "--student", workspace / "student", "--teacher", workspace / "teacher",
                     "--text", workspace / "text.txt")  # fmt: skip
        assert run.exit_code == 1 and "different vocabularies" in run.output


def test_more_tokens_than_a_model_was_made_for_are_refused(workspace):
    """Both are of 256 tokens: a student whose positions are rotary reads on, its teacher does not."""
    student, teacher, text = (workspace / name for name in ("student", "teacher", "text.txt"))
    text.write_text(tiny_text(400))
    for arguments, message in (
        (["report", "--student", student, "--teacher", teacher, "--text", text], "block_size is 512, but the teacher"),
        (["select", "--teacher", teacher, "--text", text, "--length", "300", "--out", workspace / "p.json"],
         "--length is 300, but the teacher was made for 256"),
        (["eval", teacher, "--text", text, "--lengths", "300", "--out", workspace / "e"], "--lengths has [300]"),
        (["generate", "--model", teacher, "--prompt", "the cat", "--max-new-tokens", "300"], "is 302, but the model"),
    ):  # fmt: skip
        run = memmix(*arguments)
        assert run.exit_code == 1 and message in run.output.splitlines()[-1], run.output
    learned = tiny_teacher("gpt2", layers=2, n_positions=16)
    save_student(convert_model(learned, "gka"), workspace / "learned", tiny_tokenizer())
    run = memmix("generate", "--model", workspace / "learned", "--prompt", "the cat", "--max-new-tokens", "30")
    assert run.exit_code == 1 and "made for 16 tokens" in run.output


def test_select_convert_and_take_the_mixers_over(workspace):
    teacher, plan = ["--teacher", workspace / "teacher"], workspace / "plans" / "plan.json"
    options = [
        "--text",
        workspace / "text.txt",
        "--keep-count",
        "1",
        "--length",
        "48",
        "--samples",
        "2",
        "--max-tokens",
        "96",
    ]
    options += ["--tasks", "niah,common_words", "--json"]
    result = result_of(memmix("select", *teacher, "--student", workspace / "student", "--out", plan, *options))
    saved = json.loads(plan.read_text())
    assert saved == {name: value for name, value in result.items() if name != "out"}
    assert sorted(p.name for p in plan.parent.iterdir()) == ["plan.json", "plan.png"]
    first = min(saved["layers"], key=lambda row: row["rank"])
    assert saved["keep"] == [first["layer"]] and first["score"] == max(row["score"] for row in saved["layers"])
    assert saved["mixer"] == "gka" and saved["mixers_of"] == "student" and saved["text"]["file"] == "text.txt"

    converted = memmix("convert", *teacher, "--plan", plan, "--trained", workspace / "student", "--seed", "7",
                       "--out", workspace / "s", "--json")  # fmt: skip
    assert result_of(converted)["kept"] == saved["keep"]
    tensors, source = (load_file(workspace / name / "model.safetensors") for name in ("s", "student"))
    (layer,) = {0, 1} - set(saved["keep"])
    mixers = [name for name in tensors if f"layers.{layer}.self_attn" in name]
    assert mixers and all(torch.equal(tensors[name], source[name]) for name in mixers)

    # options of the trained student, but for what is asked for
    for extra, expected in (([], [12, 10]), (["--mixer", "gka", "--option", "solver_phases=[21]"], [21])):
        out = workspace / f"option{len(extra)}"
        converted = memmix("convert", *teacher, "--trained", workspace / "student", *extra, "--out", out, "--json")
        assert result_of(converted)["kept"] == []
        assert json.loads((out / "config.json").read_text())["mixers"]["gka"]["solver_phases"] == expected


def test_a_greedy_choice_before_any_training(workspace):
    teacher, plan = ["--teacher", workspace / "teacher"], workspace / "plans" / "plan.json"
    select = ["select", *teacher, "--window", "8", "--keep-count", "1", "--length", "48",
              "--text", workspace / "text.txt", "--samples", "1", "--tasks", "niah", "--max-tokens", "96",
              "--out", plan]  # fmt: skip
    result = result_of(memmix(*select, "--json"))
    saved = json.loads(plan.read_text())
    assert saved | {"out": str(plan)} == result and [row["kept"] for row in saved["trace"]] == [0, 1]
    assert saved["keep"] == [saved["trace"][1]["layer"]]
    assert saved["stand_in"] == {"mixer": "window", "window": 8, "sinks": 1, "drop": False}
    assert sorted(p.name for p in plan.parent.iterdir()) == ["plan.json", "plan.png", "plan.search"]
    converted = result_of(memmix("convert", *teacher, "--plan", plan, "--out", workspace / "s", "--json"))
    assert converted["kept"] == saved["keep"]
    own = json.loads((workspace / "s" / "config.json").read_text())["mixers"]["window"]
    assert own == WindowOptions(window=512, sinks=1, use_rope=True, norm_eps=own["norm_eps"]).to_dict()  # no stand-in
    assert read_plan(plan)["trace"] == saved["trace"]  # of a card

    for written in (plan, plan.with_suffix(".png")):
        written.unlink()
    run = memmix(*select)  # the measurements stayed: the same search is not repeated, another one is refused
    assert run.exit_code == 0 and json.loads(plan.read_text()) == saved and "measuring" not in run.stderr
    for written in (plan, plan.with_suffix(".png")):
        written.unlink()
    run = memmix(*select, "--drop")
    assert run.exit_code == 1 and "drop was False, is True" in run.stderr.splitlines()[-1]
    run = memmix(*select, "--drop", "--overwrite", "--window", "48")
    assert run.exit_code == 0 and "no layer loses anything" in run.stderr
    assert all(row["loss"] == 0 for row in json.loads(plan.read_text())["trace"])


def test_mistakes_of_plans_are_one_clear_line(workspace):
    (workspace / "broken.json").write_text("{")
    (workspace / "empty.json").write_text("{}")
    (workspace / "long.json").write_text(json.dumps({"mixer": "gka", "keep": [0], "num_layers": 9}))
    base = ["convert", "--teacher", workspace / "teacher", "--out", workspace / "s"]
    kept = result_of(memmix(*base[:-1], workspace / "kept", "--keep-layers", "1", "--json"))
    assert kept["kept"] == [1]
    result_of(memmix("convert", "--teacher", workspace / "other", "--out", workspace / "converted", "--json"))
    select = ["select", "--teacher", workspace / "teacher", "--out", workspace / "p.json", "--text"]
    select += [workspace / "text.txt", "--max-tokens", "64", "--length", "32", "--tasks", "none"]
    for command, message in (
        ([*base, "--plan", workspace / "broken.json"], "is not JSON"),
        ([*base, "--plan", workspace / "empty.json"], "is not a plan"),
        ([*base, "--plan", workspace / "long.json"], "is for 9 layers"),
        ([*base, "--trained", workspace / "kept"], "layer 1 of the trained student is attention"),
        ([*base, "--mixer", "gka", "--trained", workspace / "student", "--option", "use_gate=false"], "differ"),
        ([*base, "--trained", workspace / "kept", "--trained", workspace / "student"], "--mixer, or the layers"),
        ([*base, "--plan", workspace / "long.json", "--keep-count", "1"], "give one of them"),
        ([*select, "--student", workspace / "converted"], "different numbers of layers"),
        (
            [*select, "--student", workspace / "kept", "--keep-count", "1"],
            "are attention, so no mixer can be measured",
        ),
        ([*select, "--mixer", "gka", "--length", "250"], "less than the 250 tokens"),
        ([*select, "--mixer", "window"], "--length is 32"),
    ):
        run = memmix(*command)
        assert run.exit_code == 1 and "Traceback" not in run.output, run.output
        assert run.output.splitlines()[-1].startswith("error:") and message in run.output.splitlines()[-1]
        assert not (workspace / "s").exists() and not (workspace / "p.json").exists()
