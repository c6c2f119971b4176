"""align --stream after every kind of break: a kill, a full disk, changed files, a lost process."""

import shutil
import signal
import textwrap

import pytest
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore

from child import ended, run_scripts, start_scripts
from hf_memmix.training.streaming import align as walking
from hf_memmix.training.streaming import processes
from hf_memmix.training.streaming.processes import Ranks
from streaming_runs import TRAINER, losses, models, stream
from tiny_runs import Stopped, contents, random_rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run without a break, and its result."""
    folder = tmp_path_factory.mktemp("whole")
    models(folder)
    return folder, stream(folder)


@pytest.fixture
def copied(whole, tmp_path):
    """A folder with copies of the student and the teacher."""
    for name in ("student", "teacher"):
        shutil.copytree(whole[0] / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def broken(copied, monkeypatch):
    """The same, with a run that has stopped when its second layer was trained and not yet written."""
    write, calls = walking.TrainedLayers.write, []

    def stops(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Stopped
        write(*args)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(walking.TrainedLayers, "write", stops)
        stream(copied)
    return copied


def same(folder, whole):
    return contents(folder / "out") == contents(whole[0] / "out")


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


# ---- killed, or out of room

RUN = """
import errno, os, resource, signal, sys, time
from pathlib import Path
from hf_memmix.training.streaming import align, layer_training, spool
from streaming_runs import stream

calls, home = [], Path(sys.argv[1])
def nth(number, function, act):
    def wrapped(*args, **kwargs):
        calls.append(function)
        if len(calls) == number:
            act(*args, **kwargs)
        return function(*args, **kwargs)
    return wrapped

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLS = {
    "in the middle of the first file": "spool._checksum = nth(3, spool._checksum, die)",
    "between a file and its record": "spool.write_sealed = nth(2, spool.write_sealed, die)",
    "in the training of a layer": "cls = layer_training.StreamedAlign; cls.loss = nth(9, cls.loss, die)",
    "before a trained layer is written": "cls = align.TrainedLayers; cls.write = nth(2, cls.write, die)",
    "after a trained layer is written": "spool.Spool.remove = nth(2, spool.Spool.remove, die)",
    "before the student is written": "align.write_student = die",
}


def run(folder, body, **how):
    """How the processes of a run end that does `body` before it starts."""
    return run_scripts(script(body), folder, [folder], **how)


def script(body):
    return RUN + textwrap.dedent(body) + "\nstream(home)\n"


@pytest.mark.product  # a new process
@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_ends_like_a_whole_one(copied, whole, moment):
    (killed,) = run(copied, KILLS[moment])
    assert killed.exitcode == -signal.SIGKILL, killed.output
    assert not (copied / "out").exists()
    said, before = [], list((copied / ".out.run" / "layers").glob("layer-*"))
    result = stream(copied, notify=said.append)
    assert any("are trained already" in line for line in said) == bool(before)
    assert losses(result).equal(losses(whole[1])) and same(copied, whole)
    assert sorted(path.name for path in copied.iterdir()) == ["out", "student", "teacher"]


@pytest.mark.product  # a new process
def test_a_spool_disk_that_fills_up(copied, whole):
    """Another disk continues the run; the spool on the full one is removed then."""
    body = """
    spool.Spool.write = nth(3, spool.Spool.write,
                            lambda *args: resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000)))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    """
    (stopped,) = run(copied, body)
    assert stopped.exitcode == 1 and "UserError: cannot write" in stopped.error and "layer-2.hidden" in stopped.error
    assert sorted(file.name for file in (copied / "spool").glob("layer*")) == ["layer-1.hidden", "layer-1.json"]
    stream(copied, spool=copied / "other")
    assert same(copied, whole) and not (copied / "spool").exists() and not (copied / "other").exists()


# ---- changed in between


def test_a_changed_file_of_an_interrupted_run_is_refused(broken, whole):
    """Every file of the run folder that the next start reads. tests/conversion/test_hashes.py changes every bit."""
    files = [path for path in (broken / ".out.run").rglob("*") if path.is_file() and not path.name.endswith(".part")]
    assert {path.name for path in files} == {"layer-0.safetensors", "memmix_spool.json", "spool.json"}
    for file in files:
        content = file.read_bytes()
        for place in (9, len(content) * 2 // 3):
            file.write_bytes(flipped(content, place))
            with pytest.raises(ValueError, match=f"^[^\n]*{file.name}[^\n]*(trains this layer again|--no-resume)$"):
                stream(broken)
        file.write_bytes(content)
    stream(broken)
    assert same(broken, whole)


@pytest.mark.parametrize("damage", ["exchanged", "another dtype", "lost"])
def test_a_damaged_spool_is_computed_again(broken, whole, damage):
    """test_spool.py has more damages."""
    spool, said = broken / "spool", []
    assert sorted(file.name for file in spool.glob("*.hidden")) == ["layer-1.hidden", "layer-2.hidden"]
    content = (spool / "layer-1.hidden").read_bytes()
    half = len(content) // 2
    if damage == "exchanged":
        (spool / "layer-1.hidden").write_bytes(content[half:] + content[:half])
    elif damage == "another dtype":  # of the same size
        record = spool / "layer-1.json"
        record.write_text(record.read_text().replace("float32", "int32"))
    else:
        shutil.rmtree(spool)
    stream(broken, notify=said.append)
    assert any("inputs of layer 1 in the spool are incomplete or damaged" in line for line in said) == (
        damage != "lost"
    )
    assert "1 of 3 layers are trained already" in said and same(broken, whole)


@pytest.mark.product  # a whole command; its parts have tests
def test_another_run_does_not_continue_a_broken_one(broken, whole):
    for changes, what in (
        ({"steps": 5}, "recipe.steps was 6, is 5"),
        ({"learning_rate": 1e-3}, "recipe.learning_rate was 0.003, is 0.001"),
        ({"data": random_rows(21)}, r"data was \w+, is \w+"),
    ):
        with pytest.raises(ValueError, match=rf"belongs to another run \({what}\)"):
            stream(broken, **changes)
    for model in ("teacher", "student"):
        file = broken / model / "model.safetensors"
        before, tensors = file.read_bytes(), load_file(file)
        tensors[next(key for key in tensors if "layers.2" in key)] += 1
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"another run \({model}.weights was files:\w+, is files:\w+\)"):
            stream(broken)
        file.write_bytes(before)
    result = stream(broken, trainer=TRAINER | {"logging_steps": 3})  # this may change; layer 0 has logged every step
    assert [row["step"] for row in result["log"]] == [1, 3, 6] and result["resumed"] and same(broken, whole)


@pytest.mark.product  # a whole command; its parts have tests
def test_no_resume_starts_again(broken):
    result = stream(broken, steps=2, resume=False)
    assert result["steps"] == 2 and not result["resumed"] and not (broken / "spool").exists()


def test_a_spool_of_another_run_is_refused(broken):
    shutil.rmtree(broken / ".out.run")
    with pytest.raises(ValueError, match=r"spool' belongs to another run \(recipe.steps was 6, is 3\)"):
        stream(broken, steps=3)


# ---- several processes


@pytest.mark.product  # new processes
def test_two_processes_share_the_layers(copied, whole):
    """Also when one of them has died, and its launcher has ended the other one."""
    body = """
    def die_after_the_other(*args):
        while not (home / ".out.run/layers/layer-0.safetensors").exists():
            time.sleep(0.05)
        die()
    if os.environ["RANK"] == "1":
        align.TrainedLayers.write = die_after_the_other
    """
    first, second = start_scripts(script(body), copied, [copied], processes=2)
    assert ended(second, copied, 1).exitcode == -signal.SIGKILL
    first.kill()
    ended(first, copied)
    assert not (copied / "out").exists()
    who = """
    cls = align.TrainedLayers
    write = cls.write
    def noted(self, layer, *args):
        (home / f"{os.environ['RANK']}-{layer}").touch()
        write(self, layer, *args)
    cls.write = noted
    """
    for expected in (["0-2", "1-1"], ["0-0", "0-2", "1-1"]):
        for process in run(copied, who, processes=2):
            assert process.exitcode == 0, process.output[-3000:]
        assert same(copied, whole) and not (copied / "spool").exists() and not (copied / ".out.run").exists()
        trained = sorted(path.name for path in copied.glob("?-?"))
        # of the killed launch, the second one takes what was written: at least layer 0
        assert trained == expected if "0-0" in expected else "0-0" not in trained and len(trained) < 3
        for path in copied.glob("?-?"):
            path.unlink()
        shutil.rmtree(copied / "out")


@pytest.mark.product  # new processes
@pytest.mark.parametrize(
    ("ends", "codes", "told"),
    [
        ("die", [-signal.SIGKILL, 1], "the launch has lost its process 0 or its launcher"),
        ("full", [1, 1], "process 0 of the launch has failed: cannot write"),
    ],
)
def test_a_process_that_ends_does_not_leave_the_other_one_waiting(copied, whole, ends, codes, told):
    """With process 0, the common store ends if the launcher does not hold it."""
    body = f"""
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if os.environ["RANK"] == "0":
        spool.write_sealed = nth(2, spool.write_sealed, {ends})
    """
    both = run(copied, body, processes=2, launcher=ends == "full")
    assert [process.exitcode for process in both] == codes
    assert f"UserError: {told}" in both[1].error
    stream(copied)  # nothing is locked or broken
    assert same(copied, whole)


def test_processes_tell_each_other_why_they_end_and_what_they_wait_for(monkeypatch):
    store, lines = HashStore(), []
    first, second = (Ranks(rank, 2, store, lines.append) for rank in range(2))
    monkeypatch.setattr(processes, "POLL", 0.01)
    monkeypatch.setattr(processes, "TELL_AFTER", 0.0)
    assert first.share("plan", lambda: {"walk": 3}) == second.share("plan", dict) == {"walk": 3} and not lines
    answers = iter([False, True])
    second.wait(lambda: next(answers), "the inputs of layer 4")
    (line,) = lines
    assert "process 1 " in line and "the inputs of layer 4" in line
    with pytest.raises(OSError, match="disk"), first.telling_failure():
        raise OSError("the disk is full\nand more")
    for _ in range(2):  # the reason of the first one stays
        with pytest.raises(ValueError, match="^process 0 .*: the disk is full$"), second.telling_failure():
            second.share("result", dict)
    alone = Ranks()
    with pytest.raises(ZeroDivisionError), alone.telling_failure():
        alone.share("plan", lambda: 1 / 0)
