"""What `memmix align` and `distill` leave: one whole folder with all that the student's had, and nothing beside it."""

import json
import os

import pytest
from safetensors.torch import load_file

from cli_runner import memmix
from hf_memmix.conversion import convert_model, save_student
from hf_memmix.training.run_lock import run_lock
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

SMALL = ["--batch-size", "4", "--block-size", "16", "--steps", "2", "--save-every", "1"]


@pytest.fixture
def workspace(tmp_path):
    teacher = tiny_teacher("llama", layers=2)
    save_student(teacher, tmp_path / "teacher", tiny_tokenizer())
    save_student(convert_model(teacher, "gka"), tmp_path / "s0", tiny_tokenizer())
    (tmp_path / "text.txt").write_text(tiny_text(800))
    return tmp_path


def command(workspace, stage, *more):
    at = ["--student", workspace / "s0", "--teacher", workspace / "teacher", "--text", workspace / "text.txt"]
    return memmix(stage, *at, "--out", workspace / "out", *SMALL, *more)


@pytest.mark.parametrize("stage", ["align", "distill"])
def test_a_trained_student_has_all_that_the_first_had(workspace, stage):
    before = {path.name for path in workspace.iterdir()}
    mask = os.umask(0o022)
    try:
        run = command(workspace, stage)
    finally:
        os.umask(mask)
    assert run.exit_code == 0, run.output
    assert {path.name for path in workspace.iterdir()} == before | {"out"}
    student, trained = ({path.name: path for path in (workspace / name).iterdir()} for name in ("s0", "out"))
    assert student.keys() == trained.keys() and "conversion.json" in trained
    assert trained["conversion.json"].read_bytes() == student["conversion.json"].read_bytes()
    assert json.loads(trained["config.json"].read_text())["use_cache"] is True
    assert {path.stat().st_mode & 0o777 for path in trained.values()} == {0o644}


@pytest.mark.product_rows(r"align")  # align and distill share this code
@pytest.mark.parametrize("stage", ["align", "distill"])
def test_a_trained_student_has_the_dtypes_of_the_first(workspace, stage):
    """It is trained in fp32 and written as it was: bf16, but for what a mixer keeps in fp32."""
    first = convert_model(tiny_teacher("llama", layers=2).bfloat16(), "gka")
    save_student(first, workspace / "s0", tiny_tokenizer(), overwrite=True)
    run = command(workspace, stage)
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
        monkeypatch.setattr(module, "try_lock", held)
        run = command(workspace, "align")
        assert run.exit_code == 1 and not (workspace / "out").exists()
        assert f"another process works in '{workspace / '.out.run'}': process {os.getpid()} on " in run.stderr


def killed_before_the_run_folder_goes(workspace, monkeypatch, *more):
    """A training whose process ends after its output has appeared."""

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hf_memmix.training.run_lock.remove_folder", killed)
        assert command(workspace, "align", *more).exit_code == 130
    assert (workspace / "out" / "config.json").is_file() and (workspace / ".out.run").is_dir()


@pytest.mark.parametrize("save_every", ["0", "1"])
def test_a_run_folder_beside_its_finished_output_is_cleared(workspace, monkeypatch, save_every):
    killed_before_the_run_folder_goes(workspace, monkeypatch, "--save-every", save_every)
    run = command(workspace, "align", "--save-every", save_every)
    assert run.exit_code == 1 and "exists and is not empty" in run.output
    assert sorted(path.name for path in workspace.iterdir()) == ["out", "s0", "teacher", "text.txt"]


@pytest.mark.parametrize("what", ["an older output", "a step that is not the last"])
def test_a_run_that_can_be_continued_is_not_cleared(workspace, monkeypatch, what):
    killed_before_the_run_folder_goes(workspace, monkeypatch)
    if what == "an older output":
        for path in (workspace / "out").iterdir():
            os.utime(path, (1, 1))
    else:
        for path in (workspace / ".out.run").glob("checkpoint-*/trainer_state.json"):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"max_steps": 10}))
            os.utime(path, (1, 1))
    assert command(workspace, "align").exit_code == 1
    assert list((workspace / ".out.run").glob("checkpoint-*"))


def test_blocks_too_short_for_a_mixer_are_refused(workspace):
    """SKA reads the chunks before a token's own: with one chunk the loss would stay 1 and nothing would be learnt."""
    student = convert_model(tiny_teacher("llama", layers=2), "ska", chunk_size=16)
    save_student(student, workspace / "ska", tiny_tokenizer())
    for stage in ("align", "distill"):
        run = command(workspace, stage, "--student", workspace / "ska")
        *_, last = run.stderr.splitlines()
        assert run.exit_code == 1 and not (workspace / "out").exists() and last.startswith("error: ")
        assert "block_size is 16" in last and "ska" in last and "17 tokens" in last
