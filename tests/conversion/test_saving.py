"""A folder that replaces another: there is one under the name at every moment, also where the system cannot swap."""

import errno
import os
import signal
from pathlib import Path

import pytest
from safetensors import SafetensorError

from child import forked
from hf_memmix.conversion import convert_model, load_model, save_student, saving, written
from tiny_teachers import tiny_teacher


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed(function):
    """Run a function in a process of its own, which must end by SIGKILL."""
    process = forked(function)
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture
def path(tmp_path):
    with saving.atomic_folder(tmp_path / "student") as folder:
        (folder / "weights").write_text("old")
    return tmp_path / "student"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != written.MARKER)


@pytest.mark.parametrize("swaps", [True, False])
def test_a_folder_is_overwritten_and_nothing_is_left_beside_it(path, swaps, monkeypatch):
    with pytest.raises(ValueError, match="exists and is not empty"), saving.atomic_folder(path):
        pass
    with pytest.raises(ValueError, match="is a file"), saving.atomic_folder(path / "weights"):
        pass
    if not swaps:
        monkeypatch.setattr(saving, "exchange", lambda one, other: False)
    with saving.atomic_folder(path, overwrite=True) as folder:
        (folder / "other").write_text("new")
    assert [p.name for p in path.parent.iterdir()] == ["student"] and names_in(path) == ["other"]


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_goes_where_its_link_leads(tmp_path, exists):
    """E.g. to a larger disk: the link is not replaced."""
    (tmp_path / "disk" / "student" if exists else tmp_path / "disk").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "student")
    for overwrite in (False, True):
        with saving.atomic_folder(tmp_path / "link", overwrite) as folder:
            assert folder.parent == tmp_path / "disk"
            (folder / "weights").touch()
    assert names_in(tmp_path / "disk" / "student") == ["weights"] and names_in(tmp_path / "disk") == ["student"]
    assert (tmp_path / "link").is_symlink() and names_in(tmp_path) == ["disk", "link"]


def test_a_failed_rename_keeps_the_old_folder(path, monkeypatch):
    real, calls = os.replace, []

    def second_fails(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no")
        real(source, target)

    monkeypatch.setattr(saving, "exchange", lambda one, other: False)
    monkeypatch.setattr(saving.os, "replace", second_fails)
    with pytest.raises(OSError, match="no"), saving.atomic_folder(path, overwrite=True) as folder:
        (folder / "weights").write_text("new")
    assert (path / "weights").read_text() == "old" and [p.name for p in path.parent.iterdir()] == ["student"]


def test_what_another_process_has_written_meanwhile_is_kept(tmp_path):
    with pytest.raises(ValueError, match="exists and is not empty"), saving.atomic_folder(tmp_path / "s") as folder:
        (folder / "weights").write_text("second")
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / "weights").write_text("first")
    assert (tmp_path / "s" / "weights").read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["s"]


def foreign_folders(tmp_path):
    """Folders that this tool has not written, or that hold something else too, and what the refusal says."""
    folders = {name: tmp_path / name for name in ("theirs", "broken marker", "mixed", "link", "nested")}
    for folder in folders.values():
        with saving.atomic_folder(folder) as new:
            (new / "weights").write_text("old")
    (folders["theirs"] / written.MARKER).unlink()
    (folders["broken marker"] / written.MARKER).write_text("[]")
    (folders["mixed"] / "notes.txt").write_text("mine")
    (folders["link"] / "data").symlink_to(tmp_path)
    (folders["nested"] / "inner").mkdir()
    (folders["nested"] / "inner" / "notes.txt").write_text("mine")
    told = dict.fromkeys(["theirs", "broken marker"], "was not written by memmix")
    told |= {"mixed": "holds 1 files that memmix has not written: notes.txt", "link": "not written: data"}
    return {folders[name]: message for name, message in (told | {"nested": "not written: inner/notes.txt"}).items()}


def test_only_a_folder_that_we_wrote_is_replaced(tmp_path):
    for folder, message in foreign_folders(tmp_path).items():
        before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
        for write in (saving.check_target, lambda path, overwrite: saving.atomic_folder(path, overwrite).__enter__()):
            with pytest.raises(ValueError, match=message):
                write(folder, overwrite=True)
        assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


def test_nothing_in_the_product_replaces_a_folder_by_its_own_rule():
    """Folders are removed or renamed only by saving.py and by what manages its own run folder or spool."""
    root = Path(saving.__file__).parents[1]
    files = [file for name in ("conversion", "training", "hf_memmix") for file in (root / name).rglob("*.py")]
    product = [file for file in files if not {"experiments", "benchmarks", "bundled"} & set(file.parts)]
    users = {file.relative_to(root).as_posix() for file in product if "rmtree" in file.read_text()}
    own = {"training/trainer.py", "training/streaming/align.py"}  # checkpoints and layers in the run folder
    assert users == {"conversion/saving.py"} | own


def test_a_failed_write_names_its_cause_and_the_remedy_for_it():
    for error, told in (
        (OSError(errno.EACCES, "Permission denied"), "change the permissions"),
        (OSError(errno.EROFS, "Read-only file system"), "This user may not write"),
        (OSError(errno.ENOSPC, "No space left on device"), "make room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "make room"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links"), "Give another folder"),
        (SafetensorError("Error: IoError(Os { os error 28 })"), "make room"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "This user may not write"),
        (RuntimeError("PytorchStreamWriter failed writing file"), "make room"),
    ):
        with (
            pytest.raises(ValueError, match="cannot write 'out'") as caught,
            saving.explain_write_errors("out", "make room"),
        ):
            raise error
        assert told in str(caught.value) and ("make room" in str(caught.value)) == (told == "make room")


def test_a_folder_without_permission_is_refused_before_the_work(path, monkeypatch):
    """Permissions of a real folder do not stop the superuser, as whom tests may run."""
    asked = []
    monkeypatch.setattr(saving.os, "access", lambda folder, mode: asked.append((folder, mode)))
    with pytest.raises(ValueError, match="cannot write .*change the permissions"):
        saving.check_target(path.parent / "new" / "out")
    assert asked == [(path.parent, os.W_OK)]


@pytest.mark.parametrize("out", [".", "..", ""])
def test_the_current_folder_is_not_replaced(path, out, monkeypatch):
    """E.g. `--out "$OUT" --overwrite` where OUT is not set."""
    monkeypatch.chdir(path)
    with pytest.raises(ValueError, match="is or holds the current folder, which would be removed"):
        saving.check_target(out, overwrite=True)
    assert (path / "weights").read_text() == "old"


def test_an_output_may_renew_a_folder_but_not_hold_it(path, monkeypatch):
    (path / "part").mkdir()
    (path.parent / "text.txt").write_text("text")
    saving.check_not_read(path, path.parent / "text.txt", None, renewed=[path, None])
    monkeypatch.chdir(path)
    saving.check_not_read(".", "hub:wikitext", "owner/teacher")  # names on the Hub are not in this folder
    for sources, renewed in (([path / "weights"], []), ([path], []), ([], [path / "part"]), ([path], [path])):
        with pytest.raises(ValueError, match="the output '.*student' would replace '.*', which is read"):
            saving.check_not_read(path, *sources, renewed=renewed)


def test_a_kill_during_overwriting_leaves_a_complete_folder(path):
    (path.parent / "a").mkdir()
    if not saving.exchange(path.parent / "a", path):
        pytest.skip("folders cannot be swapped here")
    saving.exchange(path.parent / "a", path)

    def overwrite():
        saving.os.replace = die  # the first of two renames, or never called
        saving.shutil.rmtree = die  # of the old folder
        with saving.atomic_folder(path, overwrite=True) as folder:
            (folder / "weights").write_text("new")

    is_killed(overwrite)
    assert (path / "weights").read_text() == "new"


def modes(folder):
    found = {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
    marker, other = found.pop(written.MARKER), found.get("weights", found.get("model.safetensors"))
    assert marker == other
    return found


@pytest.mark.parametrize(
    ("mask", "folders", "files"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (2, 0o775, 0o664)]
)
def test_saved_files_have_the_mode_of_the_umask(tmp_path, mask, folders, files):
    """Also safetensors files, which are written with 0600, and the folder, which mkdtemp makes with 0700."""
    before = os.umask(mask)
    try:
        with saving.atomic_folder(tmp_path / "student") as folder:
            (folder / "inner").mkdir(mode=0o700)
            for name in ("weights", "inner/more"):
                (folder / name).touch(mode=0o600)
        save_student(convert_model(tiny_teacher("llama", layers=2), "gka"), tmp_path / "model")
    finally:
        os.umask(before)
    assert modes(tmp_path / "student") == {"student": folders, "inner": folders, "weights": files, "more": files}
    found = modes(tmp_path / "model")
    assert found.pop("model") == folders and "model.safetensors" in found and set(found.values()) == {files}


@pytest.mark.parametrize("moment", ["writing", "between two renames", "discarding"])
def test_the_next_command_removes_leftovers_of_a_kill(path, moment):
    running = path.with_name(f".student.{saving._host()}-{os.getpid()}-abc.tmp")
    elsewhere = path.with_name(".student.another-host-1-abc.tmp")
    for folder in (running, elsewhere):
        folder.mkdir()

    def save():
        if moment == "discarding":
            (path.parent / ".student.run").mkdir()
            saving.shutil.rmtree = die
            saving.remove_folder(path.parent / ".student.run", beside=path)
        if moment == "between two renames":
            replace = os.replace
            saving.exchange = lambda one, other: False
            saving.os.replace = lambda one, other: die() if other == path else replace(one, other)
        with saving.atomic_folder(path, overwrite=True) as folder:
            (folder / "weights").write_text("new")
            if moment == "writing":
                die()

    is_killed(save)
    assert len(list(path.parent.iterdir())) > 3 or not path.exists()
    with pytest.raises(ValueError, match="exists and is not empty"):
        saving.check_target(path)
    assert (path / "weights").read_text() == "old"
    assert {p.name for p in path.parent.iterdir()} == {"student", running.name, elsewhere.name}


def test_the_conversion_report_is_kept_when_a_loaded_student_is_saved(tmp_path):
    save_student(convert_model(tiny_teacher("llama", layers=2), "gka"), tmp_path / "a")
    save_student(load_model(tmp_path / "a"), tmp_path / "b")
    report = (tmp_path / "b" / "conversion.json").read_text()
    assert report == (tmp_path / "a" / "conversion.json").read_text() and '"converted"' in report
    tiny_teacher("llama", layers=2).save_pretrained(tmp_path / "c")
    save_student(load_model(tmp_path / "c"), tmp_path / "d")
    assert not (tmp_path / "d" / "conversion.json").exists()
