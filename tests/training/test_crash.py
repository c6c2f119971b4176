"""Killed or out of room in the middle of a save: the last good checkpoint stays, and the run ends like a whole one.

The runs are processes of their own: one is killed by a real SIGKILL, one may not write large files any more.
"""

import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from child import child_env
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.train import align
from tiny_teachers import tiny_teacher

OPTIONS = {"steps": 4, "save_every": 1, "batch_size": 4, "block_size": 16, "warmup_steps": 1, "learning_rate": 1e-3}

COMMON = """
    import os, resource, signal, sys
    import torch
    from tiny_teachers import tiny_teacher
    from hf_memmix.conversion import convert_model, save_student, saving
    from hf_memmix.training import trainer
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.train import align

    calls = []
    def second(function, act):
        def wrapped(*args, **kwargs):
            calls.append(function)
            if len(calls) == 2:
                act(function, *args, **kwargs)
            return function(*args, **kwargs)
        return wrapped

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        data = TokenBlocks(torch.randint(3, 64, (640,), generator=torch.Generator().manual_seed(0)), 16)
        teacher = tiny_teacher("llama", layers=2)
        align(convert_model(teacher), teacher, data, sys.argv[1], steps=4, save_every=1, batch_size=4, block_size=16,
              warmup_steps=1, learning_rate=1e-3)
"""
KILLS = {
    "before the optimizer is written": """
    cls = trainer.PairTrainer
    cls._save_optimizer_and_scheduler = second(cls._save_optimizer_and_scheduler, die)
    run()
    """,
    "in the middle of the optimizer's file": """
    def half(function, content, path, *args, **kwargs):
        with open(path, "wb") as file:
            file.write(bytes(100))
            file.flush()
            die()
    real = torch.save
    def save(content, path, *args, **kwargs):
        (second_save if "optimizer" in str(path) else real)(content, path, *args, **kwargs)
    second_save = second(real, half)
    torch.save = save
    run()
    """,
    "before the folder is renamed": """
    trainer.replace_folder = second(trainer.replace_folder, die)
    run()
    """,
    "before the rotation of old folders": """
    trainer.rotate_checkpoints = second(trainer.rotate_checkpoints, die)
    run()
    """,
}
FULL = """
    def no_more_room(*args, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))

    cls = trainer.PairTrainer
    cls.save_model = second(cls.save_model, no_more_room)
    try:
        run()
    except ValueError as error:
        print(error)
        sys.exit(3)
"""


def start(folder, body):
    script = folder / "run.py"
    script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(body))
    return subprocess.run([sys.executable, script, folder / "run"], env=child_env(), capture_output=True, text=True)


def checkpoints(folder):
    return sorted(path.name for path in (folder / "run").iterdir() if path.name.startswith("checkpoint"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("whole"))


def finish(folder):
    """The run of the processes above, from wherever it stands."""
    teacher = tiny_teacher("llama", layers=2)
    data = TokenBlocks(torch.randint(3, 64, (640,), generator=torch.Generator().manual_seed(0)), 16)
    student = convert_model(teacher)
    align(student, teacher, data, folder / "run", **OPTIONS)
    return student.state_dict()


@pytest.mark.product  # a training in processes of its own
@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_leaves_the_last_good_checkpoint(tmp_path, whole, moment):
    killed = start(tmp_path, KILLS[moment])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = checkpoints(tmp_path)
    assert left == (["checkpoint-1", "checkpoint-2"] if "rotation" in moment else ["checkpoint-1"])
    for name in left:
        load_model(tmp_path / "run" / name)
    resumed = finish(tmp_path)
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


@pytest.mark.product  # a training in processes of its own
@pytest.mark.parametrize(("limit", "who"), [(20_000, "serializing"), (100_000, "iostream error")])
def test_out_of_room_is_a_clear_error_and_spares_the_last_checkpoint(tmp_path, whole, limit, who):
    """The smaller limit stops the weights (safetensors), the larger one the optimizer's file (torch)."""
    stopped = start(tmp_path, FULL.replace("ROOM", str(limit)))
    assert stopped.returncode == 3, stopped.stderr
    assert "cannot write" in stopped.stdout and "checkpoint-2" in stopped.stdout
    assert who in stopped.stdout
    assert "make room and run the same command again" in stopped.stdout
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-1"]
    resumed = finish(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.product  # a training in processes of its own
def test_out_of_room_in_the_export_spares_the_folder_before_it(tmp_path):
    body = """
    student = convert_model(tiny_teacher("llama", layers=2))
    save_student(student, sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save_student(student, sys.argv[1], overwrite=True)
    except ValueError as error:
        print(error)
        sys.exit(3)
    """
    stopped = start(tmp_path, body)
    assert stopped.returncode == 3, stopped.stderr
    assert "cannot write" in stopped.stdout and "make room and save again" in stopped.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.py"]
    load_model(tmp_path / "run")
