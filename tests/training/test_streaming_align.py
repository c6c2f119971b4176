"""align --stream: the student and the losses of align in memory, after every kind of break, and what it refuses."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore

from child import child_env
from cli_runner import memmix, result_of
from hf_memmix.conversion import convert_model, load_model, save_student
from hf_memmix.conversion.families import FAMILIES, decoder_layers
from hf_memmix.training.data import StreamedBlocks, TokenBlocks
from hf_memmix.training.recipe import load_recipe
from hf_memmix.training.streaming import align_by_streaming, processes
from hf_memmix.training.streaming.processes import Ranks
from hf_memmix.training.streaming.spool import Spool
from hf_memmix.training.streaming.teacher import StreamedTeacher
from hf_memmix.training.streaming.walk import Walk
from hf_memmix.training.train import align, distill
from hf_memmix.training.trainer_arguments import training_arguments
from testing import every_third
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

# without clipping, whose norm is over all layers in memory and over one layer here
TRAINER = {"logging_steps": 1, "disable_tqdm": True, "max_grad_norm": 0.0}
OPTIONS = {"batch_size": 4, "block_size": 16, "learning_rate": 3e-3, "warmup_steps": 1, "trainer": TRAINER}
IDS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
PACKED = torch.cat([torch.arange(6), torch.arange(10)]).repeat(2, 1)


def rows(count=20, positions=None):
    tokens = torch.randint(3, 64, (count * 16,), generator=torch.Generator().manual_seed(0))
    return TokenBlocks(tokens, 16, positions)


def models(folder, family="llama", mixer="gka", keep="none", layers=3, dtype=torch.float32, **options):
    """Folders of a tiny teacher and of its student."""
    tiny_teacher(family, layers).to(dtype).save_pretrained(folder / "teacher")
    save_student(convert_model(folder / "teacher", mixer, keep, **options), folder / "student")
    return folder / "student", folder / "teacher"


def in_memory(folder, data, **options):
    """The result of `align`; its student is in `folder / "memory"`."""
    student = load_model(folder / "student")
    dtype = student.dtype
    teacher = load_model(folder / "teacher", torch.float32)  # as the command does on a CPU
    result = align(student, teacher, data, folder / "run", **OPTIONS | options)
    save_student(student, folder / "memory", dtype=dtype)
    return result


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def losses(result):
    return torch.tensor([row["loss"] for row in result["log"]], dtype=torch.float64)


# ---- the layers of a teacher, one by one


@pytest.mark.product_rows(r"bf16-(?!.*(llama|gemma|gpt|moe))")  # one of several examples stays
@every_third("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layers_one_by_one_compute_what_the_whole_teacher_does(tmp_path, family, dtype):
    tiny_teacher(family, 3).to(dtype).save_pretrained(tmp_path)
    whole, streamed = load_model(tmp_path), StreamedTeacher(tmp_path, "cpu")
    for positions in (None, PACKED):
        seen = []

        def keep(module, args, kwargs, output, seen=seen):
            seen.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output))

        handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in decoder_layers(whole)]
        with torch.no_grad():
            whole.base_model(input_ids=IDS, position_ids=positions, use_cache=False)
        for handle in handles:
            handle.remove()
        with streamed.embeddings():
            hidden = streamed.embed(IDS, positions)
        assert len(seen) == 3 and torch.equal(hidden, seen[0][0])
        for layer, (_, expected) in enumerate(seen):
            with streamed.layer(layer):
                hidden = streamed.advance(layer, hidden, IDS, positions)
            assert hidden.dtype == expected.dtype and torch.equal(hidden, expected)


def test_one_layer_and_no_other_has_weights(tmp_path):
    _, folder = models(tmp_path)
    teacher = StreamedTeacher(folder, "cpu")
    model = load_model(folder)
    norm = sum(p.numel() for p in model.model.norm.parameters())
    assert teacher.resident_parameters() == norm
    with teacher.embeddings():
        assert teacher.resident_parameters() == norm + model.model.embed_tokens.weight.numel()
    for index, layer in enumerate(model.model.layers):
        with teacher.layer(index):
            assert teacher.resident_parameters() == norm + sum(p.numel() for p in layer.parameters())
    assert teacher.resident_parameters() == norm


@pytest.mark.product  # a whole command; its parts have tests
def test_a_run_never_holds_more_than_one_layer(tmp_path, monkeypatch):
    student, teacher = models(tmp_path)
    model = load_model(teacher)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    most, fill = [], StreamedTeacher._fill

    def watched(self, names):
        fill(self, names)
        most.append(self.resident_parameters())

    monkeypatch.setattr(StreamedTeacher, "_fill", watched)
    align_by_streaming(student, teacher, rows(), tmp_path / "out", steps=2, **OPTIONS)
    norm = model.model.norm.weight.numel()
    assert max(most) == norm + max(layer, model.model.embed_tokens.weight.numel())
    assert len(most) == 1 + 1 + 3  # beside the layers, embeddings, layers


def test_a_layer_that_gets_more_than_hidden_states_is_refused(tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    _, teacher = models(tmp_path)
    native = LlamaRotaryEmbedding.forward
    monkeypatch.setattr(
        LlamaRotaryEmbedding,
        "forward",
        lambda self, x, position_ids: tuple(part + x.mean() for part in native(self, x, position_ids)),
    )
    with pytest.raises(ValueError, match="family 'llama' get more than hidden states .* align without --stream"):
        StreamedTeacher(teacher, "cpu")


# ---- the same as in memory


@pytest.mark.product  # its parts have tests
@pytest.mark.parametrize(
    ("family", "mixer", "keep", "options", "extra"),
    [
        ("llama", "gka", "none", {}, {"steps": 6}),
        ("llama", "gka", [0], {"local_window": 4}, {"steps": 3}),
        # several passes, sliding windows
        ("gemma3_text", "mamba2", [1], {}, {"steps": 12, "gradient_accumulation": 2}),
        ("qwen3", "coffee", "none", {}, {"steps": 4, "layers": "1"}),
        ("gpt2", "lattice", [0], {}, {"steps": 3, "gradient_checkpointing": True}),
    ],
)
def test_losses_and_student_are_those_of_align(tmp_path, family, mixer, keep, options, extra):
    """Bit for bit on a CPU; the logged mean over layers is rounded in another order."""
    student, teacher = models(tmp_path, family, mixer, keep, **options)
    expected = in_memory(tmp_path, rows(), **extra)
    result = align_by_streaming(student, teacher, rows(), tmp_path / "out", **OPTIONS | extra)
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-6, atol=0)
    assert [row["learning_rate"] for row in result["log"]] == [row["learning_rate"] for row in expected["log"]]
    assert result.keys() - {"cost", "layers"} == expected.keys() and result["tokens"] == expected["tokens"]
    memory, streamed = contents(tmp_path / "memory"), contents(tmp_path / "out")
    assert memory == streamed
    assert not (tmp_path / ".out.run").exists() and not (tmp_path / ".out.spool").exists()


@pytest.mark.product  # a whole command; its parts have tests
def test_packed_rows_of_a_bf16_teacher(tmp_path):
    data = rows(positions=torch.cat([torch.arange(5), torch.arange(11)]).repeat(20, 1))
    student, teacher = models(tmp_path, dtype=torch.bfloat16)
    expected = in_memory(tmp_path, data, steps=4, pack=True)
    result = align_by_streaming(student, teacher, data, tmp_path / "out", steps=4, pack=True, **OPTIONS)
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-6, atol=0)
    assert contents(tmp_path / "memory") == contents(tmp_path / "out")
    plain = align_by_streaming(student, teacher, rows(), tmp_path / "plain", steps=4, **OPTIONS)
    assert not torch.equal(losses(plain), losses(result))


@pytest.mark.product  # a whole command; its parts have tests
def test_clipping_by_layer_is_close_to_clipping_of_all(tmp_path):
    student, teacher = models(tmp_path)
    plain = in_memory(tmp_path, rows(), steps=6)
    shutil.rmtree(tmp_path / "memory")
    shutil.rmtree(tmp_path / "run")
    trainer = TRAINER | {"max_grad_norm": 0.05}
    expected = in_memory(tmp_path, rows(), steps=6, trainer=trainer)
    result = align_by_streaming(student, teacher, rows(), tmp_path / "out", steps=6, **OPTIONS | {"trainer": trainer})
    assert not torch.equal(losses(expected), losses(plain))  # gradients are clipped
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-2, atol=0)


@pytest.mark.product  # a whole command; its parts have tests
def test_data_that_are_read_as_a_stream(tmp_path):
    """More steps than one pass has rows: the first rows come again."""
    (tmp_path / "text.txt").write_text(tiny_text(160))
    student, teacher = models(tmp_path, layers=2)
    data = StreamedBlocks(tmp_path / "text.txt", tiny_tokenizer(), 16)
    expected = in_memory(tmp_path, data, steps=5)
    result = align_by_streaming(student, teacher, data, tmp_path / "out", steps=5, **OPTIONS)
    assert result["cost"]["rows"] == 10 and result["cost"]["passes"] == 2
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-6, atol=0)
    assert contents(tmp_path / "memory") == contents(tmp_path / "out")
    workers = OPTIONS | {"steps": 5, "trainer": TRAINER | {"dataloader_num_workers": 2}}
    told = "dataloader_num_workers to 2, but the data are read as a stream, which every worker would read as a whole"
    with pytest.raises(ValueError, match=told):
        align_by_streaming(student, teacher, data, tmp_path / "two", **workers)
    with pytest.raises(ValueError, match=told):
        align(load_model(student), load_model(teacher), data, tmp_path / "two", **workers)


@pytest.mark.product  # a whole command; its parts have tests
def test_workers_that_read_rows_change_nothing(tmp_path, whole, copied):
    student, teacher = copied
    options = OPTIONS | {"steps": 6, "trainer": TRAINER | {"dataloader_num_workers": 2}}
    result = align_by_streaming(student, teacher, rows(), tmp_path / "out", **options)
    assert losses(result).equal(losses(whole[1])) and contents(tmp_path / "out") == contents(whole[0] / "out")


@pytest.mark.product  # a whole command; its parts have tests
def test_only_rows_that_are_read_lie_in_the_spool(tmp_path):
    student, teacher = models(tmp_path)
    cost = align_by_streaming(student, teacher, rows(1000), tmp_path / "out", steps=3, **OPTIONS)["cost"]
    assert cost["rows"] == 3 * 4 and cost["passes"] == 1 and cost["buffers"] == 2
    assert cost["buffer_bytes"] == 12 * 16 * 32 * 4 and cost["spool_bytes"] == 2 * cost["buffer_bytes"]


@pytest.mark.product  # a whole command; its parts have tests
def test_distill_continues_from_the_student(tmp_path):
    student, teacher = models(tmp_path)
    align_by_streaming(student, teacher, rows(), tmp_path / "out", steps=2, **OPTIONS)
    aligned = load_model(tmp_path / "out")
    result = distill(aligned, load_model(teacher), rows(), tmp_path / "run", steps=2, **OPTIONS)
    assert result["steps"] == 2


# ---- breaks

RUN = """
    import os, signal, sys, time
    import torch
    from hf_memmix.training.data import TokenBlocks
    from hf_memmix.training.streaming import align, align_by_streaming, layer_training, spool

    calls = []
    def nth(number, function, act):
        def wrapped(*args, **kwargs):
            calls.append(function)
            if len(calls) == number:
                act(function, *args, **kwargs)
            return function(*args, **kwargs)
        return wrapped

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    home = sys.argv[1]
    tokens = torch.randint(3, 64, (320,), generator=torch.Generator().manual_seed(0))
    def run():
        align_by_streaming(home + "/student", home + "/teacher", TokenBlocks(tokens, 16), home + "/out",
                           spool=home + "/spool", steps=6, **OPTIONS)
"""
KILLS = {
    "in the middle of the first file": """
    spool._checksum = nth(3, spool._checksum, die)
    """,
    "between a file and its record": """
    spool.write_sealed = nth(2, spool.write_sealed, die)
    """,
    "in the middle of the training of a layer": """
    cls = layer_training.StreamedAlign
    cls.loss = nth(9, cls.loss, die)
    """,
    "before a trained layer is written": """
    cls = align.TrainedLayers
    cls.write = nth(2, cls.write, die)
    """,
    "after a trained layer is written": """
    spool.Spool.remove = nth(2, spool.Spool.remove, die)
    """,
    "before the student is written": """
    align.write_student = die
    """,
}


def start(folder, body, processes=1, env=None):
    script = folder / "run.py"
    options = f"OPTIONS = {OPTIONS!r}\n"
    script.write_text(options + textwrap.dedent(RUN) + textwrap.dedent(body) + "\nrun()\n")
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = child_env(ACCELERATE_USE_CPU="1", **(env or {}))
    return subprocess.run([*command, script, folder], env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a teacher and its student."""
    folder = tmp_path_factory.mktemp("saved")
    models(folder)
    return folder


@pytest.fixture(scope="module")
def whole(saved):
    """The folder of a run without a break, and its result."""
    result = align_by_streaming(saved / "student", saved / "teacher", rows(), saved / "out", steps=6, **OPTIONS)
    return saved, result


@pytest.fixture
def copied(saved, tmp_path):
    """Copies of the student and the teacher."""
    for name in ("student", "teacher"):
        shutil.copytree(saved / name, tmp_path / name)
    return tmp_path / "student", tmp_path / "teacher"


@pytest.mark.product  # a new process
@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_run_ends_like_a_whole_one(tmp_path, whole, copied, moment):
    student, teacher = copied
    killed = start(tmp_path, KILLS[moment])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out").exists()
    said = []
    before = {file.name for file in (tmp_path / ".out.run" / "layers").glob("layer-*")}
    result = align_by_streaming(
        student, teacher, rows(), tmp_path / "out", spool=tmp_path / "spool", steps=6, notify=said.append, **OPTIONS
    )
    assert any("are trained already" in line for line in said) == bool(before)
    assert losses(result).equal(losses(whole[1])) and contents(tmp_path / "out") == contents(whole[0] / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run.py", "student", "teacher"]


def test_a_changed_file_of_an_interrupted_run_is_refused(tmp_path, whole, copied):
    """Every file of the run folder that the next start reads; one changed bit in each of many places."""
    student, teacher = copied
    assert start(tmp_path, KILLS["before a trained layer is written"]).returncode == -signal.SIGKILL
    folder = tmp_path / ".out.run"
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".part")]
    assert {path.name for path in files} == {"layer-0.safetensors", "memmix_spool.json", "spool.json"}

    def again():
        align_by_streaming(
            student, teacher, rows(), tmp_path / "out", spool=tmp_path / "spool", steps=6, notify=str, **OPTIONS
        )

    for file in files:
        content = file.read_bytes()
        for place in range(9, len(content), len(content) // 7):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(ValueError, match=f"^[^\n]*{file.name}[^\n]*(trains this layer again|--no-resume)$"):
                again()
        file.write_bytes(content)
    again()
    assert contents(tmp_path / "out") == contents(whole[0] / "out")


@pytest.mark.product  # a new process
@pytest.mark.parametrize("damage", ["flipped", "truncated", "lost", "exchanged", "another dtype"])
def test_a_damaged_spool_is_computed_again(tmp_path, whole, copied, damage):
    student, teacher = copied
    assert start(tmp_path, KILLS["before a trained layer is written"]).returncode == -signal.SIGKILL
    spool = tmp_path / "spool"
    assert sorted(file.name for file in spool.glob("*.hidden")) == ["layer-1.hidden", "layer-2.hidden"]
    content = bytearray((spool / "layer-1.hidden").read_bytes())
    half = len(content) // 2
    broken = {"truncated": content[:-4], "exchanged": content[half:] + content[:half]}
    if damage == "lost":
        shutil.rmtree(spool)
    elif damage == "another dtype":  # of the same size
        record = (spool / "layer-1.json").read_text()
        (spool / "layer-1.json").write_text(record.replace("float32", "int32"))
    else:
        content[1000] ^= 1
        (spool / "layer-1.hidden").write_bytes(broken.get(damage, content))
    said = []
    align_by_streaming(student, teacher, rows(), tmp_path / "out", spool=spool, steps=6, notify=said.append, **OPTIONS)
    again = "the inputs of layer 1 in the spool are incomplete or damaged; they are computed again"
    assert (again in said) == (damage != "lost") and "1 of 3 layers are trained already" in said
    assert contents(tmp_path / "out") == contents(whole[0] / "out")


@pytest.mark.product  # a whole command; its parts have tests
def test_a_spool_disk_that_fills_up(tmp_path, whole, copied, monkeypatch):
    student, teacher = copied
    full = """
    import resource
    spool.Spool.write = nth(3, spool.Spool.write,
                            lambda *args: resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000)))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    whole_run = run
    def run():
        try:
            whole_run()
        except ValueError as error:
            print(error)
            sys.exit(3)
    """
    stopped = start(tmp_path, full)
    assert stopped.returncode == 3, stopped.stderr
    assert "cannot write" in stopped.stdout and "layer-2.hidden" in stopped.stdout
    assert "Trained layers and complete files of the spool are kept: make room" in stopped.stdout
    assert len(stopped.stdout.strip().splitlines()) == 1
    assert sorted(file.name for file in (tmp_path / "spool").glob("layer*")) == ["layer-1.hidden", "layer-1.json"]
    align_by_streaming(student, teacher, rows(), tmp_path / "out", spool=tmp_path / "other", steps=6, **OPTIONS)
    assert contents(tmp_path / "out") == contents(whole[0] / "out")
    assert not (tmp_path / "spool").exists() and not (tmp_path / "other").exists()


def test_too_little_room_is_told_before_the_work(tmp_path, copied, monkeypatch):
    student, teacher = copied
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    with pytest.raises(ValueError, match=r"has 48.8 KiB free, and the hidden states need 80.0 KiB more; make room"):
        align_by_streaming(student, teacher, rows(), tmp_path / "out", steps=6, **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["student", "teacher"]


# ---- several processes


@pytest.mark.product  # a new process
@pytest.mark.parametrize("killed", [False, True])
def test_two_processes_share_the_layers(tmp_path, whole, copied, killed):
    if killed:
        body = """
        def die_after_the_other(*args):
            # the launcher ends process 0 as soon as this one is dead, so process 0 has to write its layer first
            for _ in range(2000):
                if os.path.exists(home + "/.out.run/layers/layer-0.safetensors"):
                    break
                time.sleep(0.05)
            die()
        if os.environ["RANK"] == "1":
            align.TrainedLayers.write = die_after_the_other
        """
        assert start(tmp_path, body, processes=2).returncode != 0
        assert not (tmp_path / "out").exists()
    who = """
    cls = align.TrainedLayers
    write = cls.write
    def noted(self, layer, *args):
        open(f"{home}/{os.environ['RANK']}-{layer}", "w")
        write(self, layer, *args)
    cls.write = noted
    """
    run = start(tmp_path, who, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    assert contents(tmp_path / "out") == contents(whole[0] / "out")
    trained = sorted(path.name for path in tmp_path.glob("?-?"))
    # of a killed launch the second one takes what was written: at least layer 0
    assert trained == ["0-0", "0-2", "1-1"] if not killed else "0-0" not in trained and len(trained) < 3
    assert not (tmp_path / "spool").exists() and not (tmp_path / ".out.run").exists()


def two_by_hand(folder, body):
    """Two processes without a launcher that would end one of them when the other one ends."""
    script = folder / "run.py"
    script.write_text(f"OPTIONS = {OPTIONS!r}\n" + textwrap.dedent(RUN) + textwrap.dedent(body) + "\nrun()\n")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1"}
    runs = [
        subprocess.Popen(
            [sys.executable, script, folder],
            env=child_env(**launch, RANK=str(rank), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [run.communicate(timeout=300)[1] for run in runs]
    return [run.returncode for run in runs], [(text.strip().splitlines() or [""])[-1] for text in told]


@pytest.mark.product  # a new process
@pytest.mark.parametrize(
    ("ends", "codes", "told"),
    [
        ("die", [-signal.SIGKILL, 1], "the launch has lost its process 0 or its launcher"),
        ("full", [1, 1], "process 0 of the launch has failed: cannot write"),
    ],
)
def test_a_process_that_ends_does_not_leave_the_other_one_waiting(tmp_path, whole, copied, ends, codes, told):
    body = """
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if os.environ["RANK"] == "0":
        spool.write_sealed = nth(2, spool.write_sealed, ACT)
    """
    returned, last = two_by_hand(tmp_path, "import errno\n" + textwrap.dedent(body).replace("ACT", ends))
    assert returned == codes and f"UserError: {told}" in last[1]
    student, teacher = copied
    align_by_streaming(student, teacher, rows(), tmp_path / "out", spool=tmp_path / "spool", steps=6, **OPTIONS)
    assert contents(tmp_path / "out") == contents(whole[0] / "out")  # nothing is locked or broken


def test_processes_tell_each_other_why_they_end_and_what_they_wait_for(monkeypatch):
    store, lines = HashStore(), []
    first, second = (Ranks(rank, 2, store, lines.append) for rank in range(2))
    monkeypatch.setattr(processes, "POLL", 0.01)
    monkeypatch.setattr(processes, "TELL_AFTER", 0.0)
    assert first.share("plan", lambda: {"walk": 3}) == second.share("plan", dict) == {"walk": 3} and not lines
    answers = iter([False, True])
    second.wait(lambda: next(answers), "the inputs of layer 4")
    assert lines == ["process 1 has waited 0 s for the inputs of layer 4"]
    with pytest.raises(OSError, match="disk"), first.telling_failure():
        raise OSError("the disk is full\nand more")
    for _ in range(2):  # the reason of the first one stays
        told = "^process 0 of the launch has failed: the disk is full$"
        with pytest.raises(ValueError, match=told), second.telling_failure():
            second.share("result", dict)
    alone = Ranks()
    with pytest.raises(ZeroDivisionError), alone.telling_failure():
        alone.share("plan", lambda: 1 / 0)


def test_each_process_computes_on_its_own_gpu(tmp_path, monkeypatch):
    """CUDA_VISIBLE_DEVICES is read before a run begins, so the current GPU decides, which the Trainer must respect."""
    current = [0]
    for name, value in (
        ("device_count", lambda: 2),
        ("set_device", lambda index: current.__setitem__(0, index)),
        ("current_device", lambda: current[0]),
        ("is_initialized", lambda: True),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    processes._take_gpu(1)
    arguments = training_arguments(load_recipe("align"), tmp_path)
    assert (arguments.device, arguments.n_gpu, current) == (torch.device("cuda", 1), 1, [1])
    with pytest.raises(ValueError, match="started more than 2 processes, but they see 2 GPUs; start 2 processes"):
        processes._take_gpu(2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    processes._take_gpu(0)
    assert current == [1] and training_arguments(load_recipe("align"), tmp_path).device.type == "cpu"


def test_the_walk_of_several_processes():
    walk = Walk.plan(train=[1, 2, 5], ready=[])
    assert walk.produce == [0, 1, 2, 3, 4, 5] and walk.steps() == [0, 1, 2, 3, 4, 5]
    assert [walk.owner(layer, 2) for layer in range(6)] == [0, 0, 1, 0, 0, 0]
    assert (walk.buffers(1), walk.buffers(2), walk.buffers(8)) == (2, 3, 4)
    later = Walk.plan(train=[2, 5], ready=[2, 3])  # 4 and 5 are computed from 3
    assert later.produce == [4, 5] and later.steps() == [2, 3, 4, 5]
    assert Walk.plan(train=[0], ready=[]) == Walk(train=[0], produce=[0]) and Walk([0], [0]).buffers(1) == 1
    assert Walk.plan(train=[], ready=[3]) == Walk([], [])


# ---- refusals


@pytest.fixture
def broken(tmp_path, copied, monkeypatch):
    """A run that stopped after its first layer; `run(**changes)` continues it."""
    options = {"student": tmp_path / "student", "teacher": tmp_path / "teacher", "data": rows()}
    options |= {"out": tmp_path / "out", "spool": tmp_path / "spool", "steps": 6, **OPTIONS}

    def run(**changes):
        return align_by_streaming(**options | changes)

    with monkeypatch.context() as patch:
        patch.setattr(
            "hf_memmix.training.streaming.align._Run._release", lambda self: self.trained.record(0) and 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            run()
    return run


def changed_weights(folder, name):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.product  # a whole command; its parts have tests
def test_another_run_does_not_continue_a_broken_one(tmp_path, whole, broken):
    for changes, what in (
        ({"steps": 5}, r"recipe.steps was 6, is 5"),
        ({"learning_rate": 1e-3}, r"recipe.learning_rate was 0.003, is 0.001"),
        ({"data": rows(21)}, r"data was \w+, is \w+"),
    ):
        with pytest.raises(ValueError, match=rf"belongs to another run \({what}\); give the recipe, data and models"):
            broken(**changes)
    name = "model.layers.2.self_attn.q_proj.weight"
    for model in ("teacher", "student"):
        stored = next(key for key in load_file(tmp_path / model / "model.safetensors") if "layers.2" in key)
        before = (tmp_path / model / "model.safetensors").read_bytes()
        changed_weights(tmp_path / model, name if model == "teacher" else stored)
        with pytest.raises(
            ValueError, match=rf"belongs to another run \({model}.weights was files:\w+, is files:\w+\)"
        ):
            broken()
        (tmp_path / model / "model.safetensors").write_bytes(before)
    result = broken(trainer=TRAINER | {"logging_steps": 3})  # this may change; layer 0 has logged every step
    assert [row["step"] for row in result["log"]] == [1, 3, 6] and result["resumed"]
    assert contents(tmp_path / "out") == contents(whole[0] / "out")


@pytest.mark.product  # a whole command; its parts have tests
def test_no_resume_starts_again(tmp_path, broken):
    with pytest.raises(ValueError, match="belongs to another run"):
        broken(steps=2)
    result = broken(steps=2, resume=False)
    assert result["steps"] == 2 and not result["resumed"] and not (tmp_path / "spool").exists()


def test_folders_that_cannot_be_written_are_refused_in_one_line(tmp_path, saved, copied):
    student, teacher = copied
    (tmp_path / "file").write_text("mine")
    for changes, match in (
        ({"out": tmp_path / "file"}, "file' is a file; give a folder to write to"),
        ({"out": tmp_path / "file" / "out"}, r"cannot write '.*file': .*File exists.*\. Give another folder"),
        ({"spool": tmp_path / "file"}, r"cannot write '.*file': .*File exists.*\. Give another --spool"),
        ({"spool": tmp_path / "file" / "spool"}, r"cannot write '.*file': .*File exists.*\. Give another folder"),
        ({"out": teacher, "overwrite": True}, r"the output '.*teacher' would replace '.*teacher', which is read"),
        ({"out": tmp_path, "overwrite": True}, r"the output '.*' would replace '.*teacher', which is read"),
    ):
        with pytest.raises(ValueError, match=match):
            align_by_streaming(**{"student": student, "teacher": teacher, "data": rows(), "out": tmp_path / "out"}
                               | {"steps": 2, **OPTIONS} | changes)  # fmt: skip
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "student", "teacher"]
    assert contents(teacher) == contents(saved / "teacher")


def test_a_teacher_of_another_width_is_refused_before_anything_is_computed(tmp_path, copied):
    student, _ = copied
    tiny_teacher("llama", 3, hidden_size=64).save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"student \(3 layers of 32\) and teacher \(3 of 64\) differ"):
        align_by_streaming(student, tmp_path / "wide", rows(), tmp_path / "out", steps=2, **OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["student", "teacher", "wide"]


@pytest.mark.parametrize("name", ["notes.txt", "layer-0.hidden"])
def test_a_spool_with_other_files_is_refused(tmp_path, copied, name):
    student, teacher = copied
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / name).write_text("mine")
    with pytest.raises(ValueError, match=f"is not empty and belongs to no run: it holds {name}; give a new or"):
        align_by_streaming(student, teacher, rows(), tmp_path / "out", spool=tmp_path / "spool", steps=2, **OPTIONS)
    assert (tmp_path / "spool" / name).read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spool", "student", "teacher"]


def test_a_spool_of_another_run_is_refused(tmp_path, broken):
    shutil.rmtree(tmp_path / ".out.run")
    with pytest.raises(ValueError, match=r"spool' belongs to another run \(recipe.steps was 6, is 3\)"):
        broken(steps=3)


@pytest.mark.product  # its parts have tests
def test_folders_that_cannot_be_read_by_layer_are_refused(tmp_path, copied):
    student, teacher = copied

    def fails(match, teacher=teacher, student=student, **changes):
        with pytest.raises(ValueError, match=match):
            align_by_streaming(student, teacher, rows(), tmp_path / "out", steps=2, **OPTIONS | changes)

    fails("is a converted model, not a transformer", teacher=student)
    fails("plain 'llama' model without memory layers", student=teacher)
    fails("data has blocks of 16 tokens, but block_size of the recipe is 512", block_size=512)
    fails("layers is .7.; it names layers 7, but there are layers 0 to 2", layers="7")
    fails("recipe 'distill' is for distill", recipe="distill")
    (tmp_path / "link").symlink_to(".out.run")
    for spool in ("out", "out/spool", ".out.run", ".out.run/spool", "link/spool", "other/../out"):
        fails("lies in the output or run folder", spool=tmp_path / spool)
    (tmp_path / "inputs-per-layer").mkdir()
    (tmp_path / "inputs-per-layer" / "config.json").write_text('{"model_type": "gemma3n_text"}')
    fails("family 'gemma3n_text' cannot be converted: layers use the keys", teacher=tmp_path / "inputs-per-layer")
    pickled = tmp_path / "pickled"
    shutil.copytree(teacher, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    fails("holds pickled weights, which cannot be read by layer; save the model as safetensors", teacher=pickled)
    tiny_teacher("llama", 3).save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    sorted((tmp_path / "sharded").glob("*.safetensors"))[1].unlink()
    fails("lacks the weight files model-00002-of", teacher=tmp_path / "sharded")
    changed_weights(teacher, "model.layers.2.mlp.up_proj.weight")
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    assert not list(tmp_path.glob(".out.*"))  # nothing of the refused runs stays
    fails("has NaN or infinite values in 1 tensors: model.layers.2.mlp.up_proj.weight", teacher=teacher)
    assert not (tmp_path / "out").exists()


def test_a_recipe_that_trains_nothing_of_a_layer_is_refused(tmp_path, copied):
    student, teacher = copied
    groups = [{"match": r"layers\.[012]\.", "learning_rate": 0.0}]
    with pytest.raises(ValueError, match="every learning rate of the recipe is 0"):
        align_by_streaming(student, teacher, rows(), tmp_path / "out", steps=2, groups=groups, **OPTIONS)


# ---- the command


@pytest.fixture
def workspace(tmp_path):
    save_student(tiny_teacher("llama", layers=2), tmp_path / "teacher", tiny_tokenizer())
    save_student(convert_model(tmp_path / "teacher"), tmp_path / "student", tiny_tokenizer())
    (tmp_path / "text.txt").write_text(tiny_text(800))
    return tmp_path


def command(folder, *more, student=True):
    given = ["--student", folder / "student"] if student else []
    given += ["--teacher", folder / "teacher", "--text", folder / "text.txt", "--out", folder / "out"]
    return memmix("align", *given, "--batch-size", 4, "--block-size", 16, "--steps", 3, *more)


@pytest.mark.product  # a whole command; its parts have tests
def test_the_command_leaves_what_align_leaves(workspace):
    before = {path.name for path in workspace.iterdir()}
    plain = result_of(command(workspace, "--json"))
    (workspace / "out").rename(workspace / "memory")
    run = command(workspace, "--stream", "--spool", workspace / "spool", "--json")
    result = result_of(run)
    assert "12 rows, 192 tokens: the spool" in run.stderr and "needs 48.0 KiB (2 x 24.0 KiB)" in run.stderr
    assert result["last_loss"] == pytest.approx(plain["last_loss"], rel=0.02)
    assert set(result["layers"]) == {"0", "1"} and result["out"].endswith("out")
    assert contents(workspace / "memory").keys() == contents(workspace / "out").keys()
    assert {path.name for path in workspace.iterdir()} == before | {"memory", "out"}
    told = command(workspace, "--stream", "--overwrite")
    assert told.exit_code == 0 and "align: 3 steps, 192 tokens" in told.stdout


@pytest.mark.parametrize("more", [[], ["--stream"]], ids=["memory", "stream"])
def test_the_teacher_is_not_overwritten(workspace, more):
    before = contents(workspace / "teacher")
    run = command(workspace, *more, "--overwrite", "--out", workspace / "teacher")
    assert run.exit_code == 1 and "would replace" in run.stderr and contents(workspace / "teacher") == before


@pytest.mark.product  # its parts have tests
def test_a_dry_run_measures_and_leaves_nothing(workspace):
    before = {path.name for path in workspace.iterdir()}
    cost = result_of(command(workspace, "--stream", "--dry-run", "--json"))
    assert cost["spool_bytes"] == 2 * 12 * 16 * 32 * 4 and cost["peak_memory"]["host"] > 50 * 2**20
    run = command(workspace, "--stream", "--dry-run")
    assert "2 layers, 12 rows, 192 tokens; spool 48.0 KiB; peak memory" in run.stdout
    assert {path.name for path in workspace.iterdir()} == before


@pytest.mark.product  # a whole command; its parts have tests
def test_a_plan_is_converted_first(workspace):
    plan = {"num_layers": 2, "mixer_types": ["attention", "mamba2"]}
    (workspace / "plan.json").write_text(json.dumps(plan))
    result_of(command(workspace, "--stream", "--plan", workspace / "plan.json", "--json", student=False))
    (workspace / "out").rename(workspace / "streamed")
    result_of(command(workspace, "--plan", workspace / "plan.json", "--json", student=False))
    assert contents(workspace / "streamed") == contents(workspace / "out")


def test_options_that_do_not_fit(workspace, monkeypatch):
    installed = "hf_memmix.training.trainer_arguments.get_available_reporting_integrations"
    monkeypatch.setattr(installed, lambda: ["tensorboard"])
    for more, told in (
        (["--spool", "x"], "--spool belongs to --stream; give --stream too"),
        (["--dry-run"], "--dry-run belongs to --stream"),
        (["--stream", "--report-to", "tensorboard"], "report_to is 'tensorboard', but --stream"),
        (["--stream", "--plan", "p.json"], "--student and --plan are both given"),
    ):
        run = command(workspace, *more)
        *_, last = run.stderr.splitlines()
        assert run.exit_code == 1 and last.startswith("error: ") and told in last


def test_a_spool_is_read_as_it_was_written(tmp_path):
    spool = Spool(tmp_path, 5, (3, 7))
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.randn(5, 3, 7).to(dtype)
        spool.write(4, values.split(2))
        assert spool.is_ready(4) and spool.is_sound(4) and not spool.is_sound(3)
        with spool.read(4) as hidden:
            assert torch.equal(hidden.read([3, 0, 4, 3]), values[[3, 0, 4, 3]])
            with pytest.raises(ValueError, match=r"layer-4.hidden' ends before row 5; another process has changed"):
                hidden.read([0, 5])
    with pytest.raises(RuntimeError, match="have .* bytes, not those of 5 rows"):
        spool.write(3, values[:4].split(2))
    assert sorted(os.listdir(tmp_path)) == ["layer-4.hidden", "layer-4.json"]
