"""`memmix eval` and `memmix select` end to end on tiny models, and what mistakes look like."""

import json

import pytest

from test_cli import memmix, result_of
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

SMALL = ["--lengths", "48,64", "--samples", "2", "--depths", "0,1", "--json"]


@pytest.fixture
def workspace(tmp_path):
    for name, layers in (("teacher", 2), ("other", 1)):
        tiny_teacher("llama", layers=layers).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text(tiny_text(200))
    result_of(memmix("convert", "--teacher", tmp_path / "teacher", "--out", tmp_path / "student", "--json"))
    return tmp_path


def test_teacher_beside_student(workspace):
    at = ["--text", workspace / "text.txt", "--tasks", "niah,mqar", "--out", workspace / "eval"]
    result = result_of(memmix("eval", workspace / "student", "--teacher", workspace / "teacher", *at, *SMALL))
    assert sorted(p.name for p in (workspace / "eval").iterdir()) == ["probes.json", "probes.png", "probes_gain.png"]
    saved = json.loads((workspace / "eval" / "probes.json").read_text())
    assert saved == {name: value for name, value in result.items() if name != "out"}
    assert saved["models"]["student"]["mixer_types"] == ["gka", "gka"] and saved["text"]["sha256"]
    assert [row["task"] for row in saved["summary"]] == ["niah", "mqar"]
    assert all(row["teacher"] and row["student"] for row in saved["cells"])
    run = memmix("eval", workspace / "student", *at, *SMALL[:-1], "--overwrite")
    assert run.exit_code == 0 and "gain" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nosuch"], "task 'nosuch' is unknown"),
        (["--lengths", "a"], "--lengths is 'a'"),
        (["--lengths", "4"], "give a longer one"),
        (["--depths", "2"], "depth 2.0 is outside"),
        (["--text", "{}/no.txt"], "does not exist"),
        (["--teacher", "{}/bare"], "not a model folder"),
    ],
)
def test_mistakes_of_eval_are_one_clear_line(workspace, arguments, message):
    options = [part.format(workspace) for part in arguments]
    if "--text" not in options:
        options += ["--text", workspace / "text.txt"]
    if "--lengths" not in options:
        options += ["--lengths", "64"]
    run = memmix("eval", workspace / "student", "--tasks", "niah", *options, "--out", workspace / "e")
    assert run.exit_code == 1 and "Traceback" not in run.output
    assert run.output.splitlines()[-1].startswith("error:") and message in run.output.splitlines()[-1]
    assert not (workspace / "e").exists()


def test_another_vocabulary_is_refused(workspace):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["extra"])
    tokenizer.save_pretrained(workspace / "other")
    run = memmix("eval", workspace / "student", "--teacher", workspace / "other", "--out", workspace / "e", *SMALL)
    assert run.exit_code == 1 and "another vocabulary" in run.output
