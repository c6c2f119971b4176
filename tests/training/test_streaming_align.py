"""align --stream: the student and the losses of align in memory, what it refuses, and the command."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from cli_runner import memmix, result_of
from hf_memmix.conversion import convert_model, load_model, save_student
from hf_memmix.training.data import StreamedBlocks
from hf_memmix.training.recipe import load_recipe
from hf_memmix.training.streaming import processes
from hf_memmix.training.streaming.teacher import StreamedTeacher
from hf_memmix.training.streaming.walk import Walk
from hf_memmix.training.train import align
from hf_memmix.training.trainer_arguments import training_arguments
from streaming_runs import OPTIONS, TRAINER, losses, models, stream
from tiny_runs import contents, random_rows
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer

PIECES = torch.cat([torch.arange(5), torch.arange(11)]).repeat(20, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a teacher and its student, which no test changes."""
    folder = tmp_path_factory.mktemp("saved")
    models(folder)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """The same, which a test may change."""
    for name in ("student", "teacher"):
        shutil.copytree(saved / name, tmp_path / name)
    return tmp_path


def in_memory(folder, data, **options):
    """The result of `align`; its student is in `folder / "memory"`."""
    student = load_model(folder / "student")
    dtype = student.dtype
    teacher = load_model(folder / "teacher", torch.float32)  # as the command does on a CPU
    result = align(student, teacher, data, folder / "run", **OPTIONS | options)
    save_student(student, folder / "memory", dtype=dtype)
    return result


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- the same as in memory


@pytest.mark.product  # its parts have tests
@pytest.mark.parametrize(
    ("pair", "extra"),
    [
        ({}, {"steps": 6}),
        ({"keep": [0], "local_window": 4}, {"steps": 3, "far_weight": 2.0}),
        # several passes, sliding windows
        ({"family": "gemma3_text", "mixer": "mamba2", "keep": [1]}, {"steps": 12, "gradient_accumulation": 2}),
        ({"family": "qwen3", "mixer": "coffee"}, {"steps": 4, "layers": "1"}),
        ({"family": "gpt2", "mixer": "lattice", "keep": [0]}, {"steps": 3, "gradient_checkpointing": True}),
        ({"dtype": torch.bfloat16}, {"steps": 4, "pack": True}),
    ],
    ids=["llama", "beside a window", "gemma3", "qwen3", "gpt2", "packed bf16"],
)
def test_losses_and_student_are_those_of_align(tmp_path, pair, extra):
    """Bit for bit on a CPU; the logged mean over layers is rounded in another order."""
    models(tmp_path, **pair)
    data = random_rows(positions=PIECES if "pack" in extra else None)
    expected = in_memory(tmp_path, data, **extra)
    result = stream(tmp_path, data=data, **extra)
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-6, atol=0)
    assert [row["learning_rate"] for row in result["log"]] == [row["learning_rate"] for row in expected["log"]]
    assert result.keys() - {"cost", "layers"} == expected.keys() and result["tokens"] == expected["tokens"]
    assert contents(tmp_path / "memory") == contents(tmp_path / "out")
    assert names_in(tmp_path) == ["memory", "out", "run", "student", "teacher"]


@pytest.mark.product  # a whole command; its parts have tests
def test_clipping_by_layer_is_close_to_clipping_of_all(copied):
    clipped = {"trainer": TRAINER | {"max_grad_norm": 0.05}}
    expected, result = in_memory(copied, random_rows(), steps=6, **clipped), stream(copied, **clipped)
    assert not torch.equal(losses(result), losses(stream(copied, overwrite=True)))  # gradients are clipped
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-2, atol=0)


@pytest.mark.product  # a whole command; its parts have tests
def test_data_that_are_read_as_a_stream(copied):
    """More steps than one pass has rows: the first rows come again. Workers would each read all of it."""
    (copied / "text.txt").write_text(tiny_text(160))
    data = StreamedBlocks(copied / "text.txt", tiny_tokenizer(), 16)
    expected, result = in_memory(copied, data, steps=5), stream(copied, data=data, steps=5)
    assert result["cost"]["rows"] == 10 and result["cost"]["passes"] == 2
    torch.testing.assert_close(losses(result), losses(expected), rtol=1e-6, atol=0)
    assert contents(copied / "memory") == contents(copied / "out")
    workers = {"data": data, "steps": 5, "trainer": TRAINER | {"dataloader_num_workers": 2}}
    for run in (lambda: stream(copied, out=copied / "two", **workers), lambda: in_memory(copied, **workers)):
        with pytest.raises(ValueError, match="dataloader_num_workers to 2"):
            run()


@pytest.mark.product  # a whole command; its parts have tests
def test_rows_that_workers_read(copied, saved):
    result = stream(copied, trainer=TRAINER | {"dataloader_num_workers": 2})
    expected = stream(saved, out=copied / "alone", spool=copied / "alone.spool")
    assert losses(result).equal(losses(expected)) and contents(copied / "out") == contents(copied / "alone")


@pytest.mark.product  # a whole command; its parts have tests
def test_a_run_holds_one_layer_and_the_rows_that_it_reads(copied, monkeypatch):
    model, most, fill = load_model(copied / "teacher"), [], StreamedTeacher._fill

    def watched(self, names):
        fill(self, names)
        most.append(self.resident_parameters())

    monkeypatch.setattr(StreamedTeacher, "_fill", watched)
    cost = stream(copied, data=random_rows(1000), steps=3)["cost"]
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert max(most) == model.model.norm.weight.numel() + max(layer, model.model.embed_tokens.weight.numel())
    assert len(most) == 1 + 1 + 3  # beside the layers, embeddings, layers
    assert cost["rows"] == 3 * 4 and cost["passes"] == 1 and cost["buffers"] == 2
    assert cost["buffer_bytes"] == 12 * 16 * 32 * 4 and cost["spool_bytes"] == 2 * cost["buffer_bytes"]


# ---- the work of several processes


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
    with pytest.raises(ValueError, match="see 2 GPUs; start 2 processes"):
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


# ---- refusals, which leave nothing


def test_folders_that_cannot_be_written(copied, saved):
    (copied / "file").write_text("mine")
    before = names_in(copied)
    for changes, message in (
        ({"out": copied / "file"}, "file' is a file"),
        ({"out": copied / "file" / "out"}, r"cannot write '.*file'"),
        ({"spool": copied / "file"}, r"cannot write '.*file': .*--spool"),
        ({"spool": copied / "file" / "spool"}, r"cannot write '.*file'"),
        ({"out": copied / "teacher", "overwrite": True}, r"teacher' would replace '.*teacher'"),
        ({"out": copied, "overwrite": True}, r"would replace '.*teacher'"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(copied, **changes)
        assert names_in(copied) == before
    assert contents(copied / "teacher") == contents(saved / "teacher")


def test_too_little_room_is_told_before_the_work(copied, monkeypatch):
    usage = shutil.disk_usage(copied)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000))
    with pytest.raises(ValueError, match="48.8 KiB .* 80.0 KiB"):
        stream(copied)
    assert names_in(copied) == ["student", "teacher"]


@pytest.mark.parametrize("name", ["notes.txt", "layer-0.hidden"])
def test_a_spool_with_other_files_is_refused(copied, name):
    (copied / "spool").mkdir()
    (copied / "spool" / name).write_text("mine")
    with pytest.raises(ValueError, match=f"belongs to no run: it holds {name}"):
        stream(copied)
    assert (copied / "spool" / name).read_text() == "mine" and names_in(copied) == ["spool", "student", "teacher"]


def lost_shard(folder):
    tiny_teacher("llama", 3).save_pretrained(folder, max_shard_size="20KB")
    sorted(folder.glob("*.safetensors"))[1].unlink()


def pickled(folder):
    tiny_teacher("llama", 3).save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def inputs_per_layer(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gemma3n_text"}')


def not_finite(folder):
    model = tiny_teacher("llama", 3)
    model.model.layers[2].mlp.up_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(folder)


TEACHERS = {
    "is a converted model": lambda folder: shutil.copytree(folder.parent / "student", folder),
    "student .3 layers of 32. and teacher .3 of 64. differ": lambda folder: tiny_teacher(
        "llama", 3, hidden_size=64
    ).save_pretrained(folder),
    "'gemma3n_text' cannot be converted": inputs_per_layer,
    "pickled weights": pickled,
    "lacks the weight files model-00002-of": lost_shard,
    "NaN or infinite values in 1 tensors: model.layers.2.mlp.up_proj.weight": not_finite,
}


def test_teachers_that_cannot_be_read_by_layer(copied):
    for message, write in TEACHERS.items():
        shutil.rmtree(copied / "teacher")
        write(copied / "teacher")
        with pytest.raises(ValueError, match=message):
            stream(copied)
        if write is not not_finite:  # found when its layer is read
            assert names_in(copied) == ["student", "teacher"]
    assert not (copied / "out").exists()


def test_what_does_not_fit_is_refused(copied):
    (copied / "link").symlink_to(".out.run")
    spools = ("out", "out/spool", ".out.run", ".out.run/spool", "link/spool", "other/../out")
    for changes, message in (
        ({"student": copied / "teacher"}, "plain 'llama' model"),
        ({"block_size": 512}, "blocks of 16 tokens, but block_size of the recipe is 512"),
        ({"far_weight": 1.0}, "far_window is 0, but layers .* set far_window"),
        ({"far_weight": 1.0, "far_window": 16}, "no token of a block of 16 lies outside a window of 16"),
        ({"layers": "7"}, "names layers 7, but there are layers 0 to 2"),
        ({"recipe": "distill"}, "recipe 'distill' is for distill"),
        ({"groups": [{"match": r"layers\.1\.", "learning_rate": 0.0}]}, "every learning rate of layer 1 is 0"),
        *(({"spool": copied / place}, "lies in the output or run folder") for place in spools),
    ):
        with pytest.raises(ValueError, match=message):
            stream(copied, **changes)
        assert names_in(copied) == ["link", "student", "teacher"]


# ---- the command


@pytest.fixture
def workspace(tmp_path):
    save_student(tiny_teacher("llama", layers=2), tmp_path / "teacher", tiny_tokenizer())
    save_student(convert_model(tmp_path / "teacher", "gka"), tmp_path / "student", tiny_tokenizer())
    (tmp_path / "text.txt").write_text(tiny_text(800))
    return tmp_path


def command(folder, *more, student=True):
    given = ["--student", folder / "student"] if student else []
    given += ["--teacher", folder / "teacher", "--text", folder / "text.txt", "--out", folder / "out"]
    return memmix("align", *given, "--batch-size", 4, "--block-size", 16, "--steps", 3, *more)


@pytest.mark.product  # a whole command; its parts have tests
def test_the_command_leaves_what_align_leaves(workspace):
    before = names_in(workspace)
    cost = result_of(command(workspace, "--stream", "--dry-run", "--json"))
    assert cost["spool_bytes"] == 2 * 12 * 16 * 32 * 4 and cost["peak_memory"]["host"] > 50 * 2**20
    run = command(workspace, "--stream", "--dry-run")
    assert "2 layers, 12 rows, 192 tokens; spool 48.0 KiB" in run.stdout and names_in(workspace) == before
    plain = result_of(command(workspace, "--json"))
    (workspace / "out").rename(workspace / "memory")
    run = command(workspace, "--stream", "--spool", workspace / "spool", "--json")
    result = result_of(run)
    assert "48.0 KiB" in run.stderr and set(result["layers"]) == {"0", "1"} and result["out"].endswith("out")
    assert result["last_loss"] == pytest.approx(plain["last_loss"], rel=0.02)
    assert contents(workspace / "memory").keys() == contents(workspace / "out").keys()
    assert names_in(workspace) == sorted([*before, "memory", "out"])
    told = command(workspace, "--stream", "--overwrite")
    assert told.exit_code == 0 and "align: 3 steps, 192 tokens" in told.stdout


@pytest.mark.product  # a whole command; its parts have tests
def test_a_plan_is_converted_first(workspace):
    (workspace / "plan.json").write_text(json.dumps({"num_layers": 2, "mixer_types": ["attention", "mamba2"]}))
    made = []
    for more in (["--stream"], []):
        result_of(command(workspace, *more, "--plan", workspace / "plan.json", "--json", student=False))
        made.append(contents((workspace / "out").rename(workspace / f"out{len(made)}")))
    assert made[0] == made[1]


@pytest.mark.parametrize("more", [[], ["--stream"]], ids=["memory", "stream"])
def test_the_teacher_is_not_overwritten(workspace, more):
    before = contents(workspace / "teacher")
    run = command(workspace, *more, "--overwrite", "--out", workspace / "teacher")
    assert run.exit_code == 1 and "would replace" in run.stderr and contents(workspace / "teacher") == before


def test_a_tracker_is_refused(workspace, monkeypatch):
    installed = "hf_memmix.training.trainer_arguments.get_available_reporting_integrations"
    monkeypatch.setattr(installed, lambda: ["tensorboard"])
    run = command(workspace, "--stream", "--report-to", "tensorboard")
    *_, last = run.stderr.splitlines()
    assert run.exit_code == 1 and last.startswith("error: ") and "report_to is 'tensorboard'" in last
