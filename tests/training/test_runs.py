"""A run is continued by itself alone, from whole files, by one process at a time."""

import copy
import json
import multiprocessing
import time

import pytest

from child import forked
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.hashes import check_files
from hf_memmix.training.run_identity import write_run_file
from hf_memmix.training.run_lock import lock_file, run_folder, run_lock
from hf_memmix.training.teacher_cache import write_cache
from hf_memmix.training.train import align, distill
from tiny_runs import SMALL_RUN, random_rows
from tiny_teachers import tiny_teacher

OPTIONS = {"steps": 2, "save_every": 1, **SMALL_RUN}
STAGES = pytest.mark.parametrize("stage", [align, distill])


@pytest.fixture
def teacher():
    return tiny_teacher("llama", layers=2)


@pytest.fixture
def data():
    return random_rows()


# ---- the same start


def test_another_run_does_not_continue_a_run(tmp_path, teacher, data):
    align(convert_model(teacher, "gka"), teacher, data, tmp_path, **OPTIONS)
    moved, other = convert_model(teacher, "gka"), copy.deepcopy(teacher)
    moved.lm_head.weight.data[0, 0] += 1
    attention_module(other, 1).q_proj.weight.data *= 1.1
    for change, options, what in (
        (
            {"student": convert_model(teacher, "gka", ridge=0.2)},
            {},
            r"student.config.mixers.gka.ridge was 0.0[0-9]*, is 0.2",
        ),
        ({"student": convert_model(teacher, "gka", keep=[0])}, {}, "student.config.mixer_types"),
        ({"student": moved}, {}, "student.weights was"),
        ({"teacher": other}, {}, "teacher.weights was"),
        ({"data": random_rows(21)}, {}, "data was"),
        ({}, {"learning_rate": 0.5}, "recipe.learning_rate was [0-9.e-]+, is 0.5"),
        ({}, {"trainer": {"max_grad_norm": 0.5}}, "recipe.trainer.max_grad_norm was None, is 0.5"),
    ):
        run = {"student": convert_model(teacher, "gka"), "teacher": teacher, "data": data} | change
        with pytest.raises(ValueError, match=rf"belongs to another run \(.*{what}"):
            align(**run, output_dir=tmp_path, **OPTIONS | options)
    with pytest.raises(ValueError, match="checkpoint-2 belongs to an earlier run"):
        align(convert_model(teacher, "gka"), teacher, data, tmp_path, resume=False, **OPTIONS)
    align(convert_model(teacher, "gka"), teacher, data, tmp_path, trainer={"logging_steps": 1}, **OPTIONS)


# ---- whole checkpoints


@pytest.mark.product_rows(r"align")  # align and distill share this code
@STAGES
def test_every_file_of_a_checkpoint_is_checked(tmp_path, teacher, data, stage):
    stage(convert_model(teacher, "gka"), teacher, data, tmp_path, **OPTIONS)
    last = tmp_path / "checkpoint-2"
    names = {path.name for path in last.iterdir()} - {"memmix_run.json"}
    assert names >= {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    for name in names:
        content = (last / name).read_bytes()
        flipped = content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]
        for broken, told in ((None, "is missing"), (flipped, "is corrupt"), (content[:-1], "is corrupt or truncated")):
            (last / name).unlink()
            if broken is not None:
                (last / name).write_bytes(broken)
            with pytest.raises(ValueError, match=f"{name} .*{told}.*remove that folder .* checkpoint-1"):
                stage(convert_model(teacher, "gka"), teacher, data, tmp_path, **OPTIONS)
            (last / name).write_bytes(content)
    stage(convert_model(teacher, "gka"), teacher, data, tmp_path, **OPTIONS)


def test_every_field_of_a_run_file_is_checked(tmp_path, teacher, data):
    align(convert_model(teacher, "gka"), teacher, data, tmp_path, **OPTIONS)
    file = tmp_path / "checkpoint-2" / "memmix_run.json"
    record = json.loads(file.read_text())
    files = {name: value for name, value in record["files"].items() if name != "optimizer.pt"}
    broken = [{name: value for name, value in record.items() if name != left_out} for left_out in record]
    for content in ({**record, "files": files}, *broken, [], None):
        file.unlink() if content is None else file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="memmix_run.json.*(corrupt|no hash|not readable).*remove that folder"):
            align(convert_model(teacher, "gka"), teacher, data, tmp_path, **OPTIONS)


def test_files_in_folders_of_a_checkpoint_are_checked(tmp_path):
    """A sharded optimizer is a folder."""
    (tmp_path / "optimizer_0").mkdir()
    (tmp_path / "optimizer_0" / "__0_0.distcp").write_bytes(b"moments")
    write_run_file(tmp_path, {})
    hashes = json.loads((tmp_path / "memmix_run.json").read_text())["files"]
    check_files(tmp_path, hashes, "again")
    (tmp_path / "optimizer_0" / "__0_0.distcp").write_bytes(b"moment2")
    with pytest.raises(ValueError, match="optimizer_0/__0_0.distcp in .* is corrupt"):
        check_files(tmp_path, hashes, "again")


# ---- what fits


def test_a_converted_teacher_is_refused(tmp_path, teacher, data):
    converted = convert_model(teacher, "gka")
    for use in (
        lambda: align(convert_model(teacher, "gka"), converted, data, tmp_path, **OPTIONS),
        lambda: distill(convert_model(teacher, "gka"), converted, data, tmp_path, **OPTIONS),
        lambda: write_cache(converted, data, tmp_path / "cache", 4),
    ):
        with pytest.raises(ValueError, match="the teacher is a converted model, not a transformer"):
            use()


def test_weights_that_are_no_numbers_are_named(tmp_path, teacher, data):
    broken, student = copy.deepcopy(teacher), convert_model(teacher, "gka")
    broken.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    student.model.norm.weight.data[0] = float("inf")
    for stage in (align, distill):
        for pair, named in (
            ((convert_model(teacher, "gka"), broken), "teacher .* 1 tensors: model.layers.1.mlp.up_proj.weight"),
            ((student, teacher), "student .* 1 tensors: model.norm.weight"),
        ):
            with pytest.raises(ValueError, match=named):
                stage(*pair, data, tmp_path, **OPTIONS)
    with pytest.raises(ValueError, match="the teacher has NaN"):
        write_cache(broken, data, tmp_path / "cache", 4)


@STAGES
def test_training_leaves_use_cache_alone(tmp_path, teacher, data, stage):
    student = convert_model(teacher, "gka")
    assert student.config.use_cache
    stage(student, teacher, data, tmp_path, **OPTIONS)
    assert student.config.use_cache
    assert json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())["use_cache"]


# ---- one process at a time


def hold(folder):
    """A process that holds the lock of a folder."""
    here, there = multiprocessing.Pipe()

    def wait_with_the_lock():
        with run_lock(folder):
            there.send("held")
            time.sleep(600)

    process = forked(wait_with_the_lock)
    assert here.recv() == "held"
    return process


def test_a_second_process_gets_an_error_that_names_the_first(tmp_path, teacher, data, monkeypatch):
    folder = tmp_path / "run"
    process = hold(folder)
    try:
        with pytest.raises(
            ValueError, match=rf"another process works in .*run.*process {process.pid} on .*, since 20"
        ):
            align(convert_model(teacher, "gka"), teacher, data, folder, **OPTIONS)
        monkeypatch.setenv("RANK", "1")  # rank 0 of the launch has taken it for all
        with run_lock(folder):
            pass
        monkeypatch.delenv("RANK")
    finally:
        process.kill()
        process.join()
    assert lock_file(folder).exists()  # of a dead process: taken over
    align(convert_model(teacher, "gka"), teacher, data, folder, **OPTIONS)
    assert not lock_file(folder).exists()


def test_a_lock_that_is_taken_twice_is_freed_by_the_outer_one(tmp_path):
    """Commands hold it around `train`, which takes it too; the kernel would free it with the inner one."""
    folder = tmp_path / "run"

    def another_process():
        """The error that another process gets, or None."""
        here, there = multiprocessing.Pipe()

        def take():
            try:
                with run_lock(folder):
                    there.send(None)
            except ValueError as error:
                there.send(str(error))

        forked(take).join()
        return here.recv()

    with run_lock(folder):
        with run_lock(folder):
            pass
        assert lock_file(folder).exists()
        assert "another process works in" in another_process()
    assert another_process() is None


def test_a_run_folder_lives_until_the_output_is_written(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), run_folder(out) as folder:
        folder.mkdir()
        (folder / "state").touch()
        raise KeyboardInterrupt
    assert folder.is_dir()
    with run_folder(out) as again:
        assert again == folder and folder.is_dir()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), run_folder(out) as folder:
        folder.mkdir()
        raise KeyboardInterrupt
    with run_folder(out, resume=False):
        assert not folder.exists()
