"""What `memmix align` and `distill` leave: one whole folder with all that the student's had, and nothing beside it."""

import json
import os

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_memmix.cli import app
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.training.run_lock import run_lock
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

SMALL = ["--batch-size", "4", "--block-size", "16", "--steps", "2", "--save-every", "1"]


@pytest.fixture
def workspace(tmp_path):
    teacher = tiny_teacher("llama", layers=2)
    save_student(teacher, tmp_path / "teacher", tiny_tokenizer())
    save_student(convert_model(teacher), tmp_path / "s0", tiny_tokenizer())
    (tmp_path / "text.txt").write_text(tiny_text(800))
    return tmp_path


def command(workspace, stage, *more):
    at = ["--student", workspace / "s0", "--teacher", workspace / "teacher", "--text", workspace / "text.txt"]
    return [str(part) for part in (stage, *at, "--out", workspace / "out", *SMALL, *more)]


@pytest.mark.parametrize("stage", ["align", "distill"])
def test_a_trained_student_has_all_that_the_first_had(workspace, stage):
    before = {path.name for path in workspace.iterdir()}
    mask = os.umask(0o022)
    try:
        run = CliRunner().invoke(app, command(workspace, stage))
    finally:
        os.umask(mask)
    assert run.exit_code == 0, run.output
    assert {path.name for path in workspace.iterdir()} == before | {"out"}
    student, trained = ({path.name: path for path in (workspace / name).iterdir()} for name in ("s0", "out"))
    assert student.keys() == trained.keys() and "conversion.json" in trained
    assert trained["conversion.json"].read_bytes() == student["conversion.json"].read_bytes()
    assert json.loads(trained["config.json"].read_text())["use_cache"] is True
    assert {path.stat().st_mode & 0o777 for path in trained.values()} == {0o644}


@pytest.mark.parametrize("stage", ["align", "distill"])
def test_a_trained_student_has_the_dtypes_of_the_first(workspace, stage):
    """It is trained in fp32 and written as it was: bf16, but for what a mixer keeps in fp32."""
    first = convert_model(tiny_teacher("llama", layers=2).bfloat16())
    save_student(first, workspace / "s0", tiny_tokenizer(), overwrite=True)
    run = CliRunner().invoke(app, command(workspace, stage))
    assert run.exit_code == 0, run.output
    kinds = [
        {name: tensor.dtype for name, tensor in load_file(workspace / folder / "model.safetensors").items()}
        for folder in ("s0", "out")
    ]
    assert kinds[0] == kinds[1] and {str(kind) for kind in kinds[0].values()} == {"torch.bfloat16", "torch.float32"}


def test_a_run_that_is_locked_is_named(workspace, monkeypatch):
    """Held by another process; stood in for by a lock that this process does not know of."""
    from hf_memmix.training import run_lock as module

    def held(*args):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with run_lock(workspace / ".out.run"):
        monkeypatch.setattr(module, "_held", set())
        monkeypatch.setattr(module.fcntl, "lockf", held)
        run = CliRunner().invoke(app, command(workspace, "align"))
        assert run.exit_code == 1 and not (workspace / "out").exists()
        assert f"another process works in '{workspace / '.out.run'}': process {os.getpid()} on " in run.stderr


def test_a_recipe_of_the_other_stage_is_one_line(workspace):
    run = CliRunner().invoke(app, command(workspace, "align", "--recipe", "distill"))
    assert run.exit_code == 1
    assert run.stderr.strip() == "error: recipe 'distill' is for distill, not for align; give a recipe of align"
