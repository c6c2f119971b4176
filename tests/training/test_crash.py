"""Killed or out of room in the middle of a save: the last good checkpoint stays, and the run ends like a whole one.

The runs are processes of their own: one is killed by a real SIGKILL, one may not write large files any more.
"""

import signal
import textwrap

import pytest

from child import run_scripts
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.training.train import align
from tiny_runs import SMALL_RUN, changed, random_rows, weights
from tiny_teachers import tiny_teacher

COMMON = """
import os, resource, signal, sys
from pathlib import Path
import torch
from tiny_teachers import tiny_teacher
from hf_memmix.conversion import convert_model, save_student, saving
from hf_memmix.training import trainer

calls = []
def second(function, act):
    def wrapped(*args, **kwargs):
        calls.append(function)
        if len(calls) == 2:
            act(*args, **kwargs)
        return function(*args, **kwargs)
    return wrapped

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def no_more_room(*args, **kwargs):
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
"""
TRAIN = """
from hf_memmix.training.train import align
from tiny_runs import SMALL_RUN, random_rows
teacher = tiny_teacher("llama", layers=2)
align(convert_model(teacher, "gka"), teacher, random_rows(40), sys.argv[1], steps=4, save_every=1, learning_rate=1e-3,
      **SMALL_RUN)
"""
KILLS = {
    "before the optimizer is written": """
    cls = trainer.PairTrainer
    cls._save_optimizer_and_scheduler = second(cls._save_optimizer_and_scheduler, die)
    """,
    "in the middle of the optimizer's file": """
    def half(content, path, *args, **kwargs):
        Path(path).write_bytes(bytes(100))
        die()
    real = torch.save
    second_save = second(real, half)
    torch.save = lambda content, path, *args, **kwargs: (
        second_save if "optimizer" in str(path) else real
    )(content, path, *args, **kwargs)
    """,
    "before the folder is renamed": "trainer.replace_folder = second(trainer.replace_folder, die)",
    "before the rotation of old folders": "trainer.rotate_checkpoints = second(trainer.rotate_checkpoints, die)",
}


def start(folder, body, room=0):
    """How a process ends that does `body`; of what it writes, files of more than `room` bytes fail."""
    (ended,) = run_scripts(COMMON.replace("ROOM", str(room)) + textwrap.dedent(body), folder, [folder / "run"])
    return ended


def checkpoints(folder):
    return sorted(path.name for path in (folder / "run").iterdir())


def finish(folder):
    """The weights after the run of TRAIN, from wherever it stands."""
    teacher = tiny_teacher("llama", layers=2)
    student = convert_model(teacher, "gka")
    align(student, teacher, random_rows(40), folder / "run", steps=4, save_every=1, learning_rate=1e-3, **SMALL_RUN)
    return student


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return weights(finish(tmp_path_factory.mktemp("whole")))


@pytest.mark.product  # a training in a process of its own
@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_leaves_the_last_good_checkpoint(tmp_path, whole, moment):
    killed = start(tmp_path, textwrap.dedent(KILLS[moment]) + TRAIN)
    assert killed.exitcode == -signal.SIGKILL, killed.output
    left = [name for name in checkpoints(tmp_path) if name.startswith("checkpoint")]
    assert left == (["checkpoint-1", "checkpoint-2"] if "rotation" in moment else ["checkpoint-1"])
    for name in left:
        load_model(tmp_path / "run" / name)
    assert not changed(finish(tmp_path), whole)
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.product  # a training in a process of its own
@pytest.mark.parametrize(("room", "who"), [(20_000, "serializing"), (100_000, "iostream error")])
def test_out_of_room_is_a_clear_error_and_spares_the_last_checkpoint(tmp_path, whole, room, who):
    """The smaller limit stops the weights (safetensors), the larger one the optimizer's file (torch)."""
    full = "cls = trainer.PairTrainer; cls.save_model = second(cls.save_model, no_more_room)\n"
    stopped = start(tmp_path, full + TRAIN, room)
    assert stopped.exitcode == 1 and "UserError: cannot write" in stopped.error
    assert "checkpoint-2" in stopped.error and who in stopped.error
    assert checkpoints(tmp_path) == ["checkpoint-1"] and not changed(finish(tmp_path), whole)


@pytest.mark.product  # a process of its own
def test_out_of_room_in_the_export_spares_the_folder_before_it(tmp_path):
    body = """
    student = convert_model(tiny_teacher("llama", layers=2))
    save_student(student, sys.argv[1])
    no_more_room()
    save_student(student, sys.argv[1], overwrite=True)
    """
    stopped = start(tmp_path, body, 20_000)
    assert stopped.exitcode == 1 and "UserError: cannot write" in stopped.error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    load_model(tmp_path / "run")
