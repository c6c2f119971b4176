"""A folder that replaces another: there is one under the name at every moment, also where the system cannot swap."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from hf_memmix.conversion import saving

KILLED = """
    import os, signal, sys
    from pathlib import Path
    from hf_memmix.conversion import saving

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    saving.os.replace = die  # the first of two renames, or never called
    saving.shutil.rmtree = die  # of the old folder
    with saving.atomic_folder(Path(sys.argv[1]), overwrite=True) as folder:
        (folder / "weights").write_text("new")
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "weights").write_text("old")
    return tmp_path / "student"


@pytest.mark.parametrize("swaps", [True, False])
def test_a_folder_is_overwritten_and_nothing_is_left_beside_it(path, swaps, monkeypatch):
    if not swaps:
        monkeypatch.setattr(saving, "_exchange", lambda one, other: False)
    with saving.atomic_folder(path, overwrite=True) as folder:
        (folder / "other").write_text("new")
    assert [p.name for p in path.parent.iterdir()] == ["student"] and [p.name for p in path.iterdir()] == ["other"]


def test_what_cannot_be_renamed_leaves_the_old_folder(path, monkeypatch):
    real, calls = os.replace, []

    def second_fails(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no")
        real(source, target)

    monkeypatch.setattr(saving, "_exchange", lambda one, other: False)
    monkeypatch.setattr(saving.os, "replace", second_fails)
    with pytest.raises(OSError, match="no"), saving.atomic_folder(path, overwrite=True) as folder:
        (folder / "weights").write_text("new")
    assert (path / "weights").read_text() == "old" and [p.name for p in path.parent.iterdir()] == ["student"]


def test_a_kill_while_overwriting_leaves_a_whole_folder(path):
    (path.parent / "a").mkdir()
    if not saving._exchange(path.parent / "a", path):
        pytest.skip("folders cannot be swapped here")
    saving._exchange(path.parent / "a", path)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), path], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert (path / "weights").read_text() == "new"
