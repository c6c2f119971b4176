"""Conversion by streaming: the bytes of a conversion in memory, its memory, and what stops it."""

import errno
import json
import os
import shutil
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from child import run_scripts
from cli_runner import memmix, result_of
from hf_memmix.conversion import convert, convert_model, load_model, save_student
from hf_memmix.conversion.convert import convert_to_folder
from hf_memmix.conversion.families import FAMILIES
from hf_memmix.conversion.loading import load_tokenizer
from hf_memmix.conversion.streaming import shards
from hf_memmix.conversion.streaming.stream import write_description
from hf_memmix.conversion.taken_mixers import take_mixers
from hf_memmix.mixers import MIXERS
from testing import every_third, in_turn
from tiny_runs import contents
from tiny_teachers import CONVERTIBLE, tiny_teacher, tiny_tokenizer

UP = "model.layers.1.mlp.up_proj.weight"


def saved(folder, family="llama", layers=3, dtype=torch.float32, **options):
    save_options = {name: options.pop(name) for name in ("max_shard_size", "save_original_format") if name in options}
    tiny_teacher(family, layers, **options).to(dtype).save_pretrained(folder, **save_options)
    return folder


def edit(folder, change, file="model.safetensors"):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def assert_streams_like_memory(teacher, work, *arguments, **options):
    """Both ways write the same files with the same bytes, and streaming does not fall back."""
    student = convert_model(teacher, *arguments, **options)
    save_student(student, work / "memory", load_tokenizer(teacher))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "load_model", None)
        streamed = convert_model(teacher, *arguments, out=work / "stream", **options)
    assert streamed.device.type == "meta"
    assert streamed.conversion_report.record() == student.conversion_report.record()
    first, second = contents(work / "memory"), contents(work / "stream")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    return first


# ---- the same bytes


@pytest.mark.product_rows(r"(?!gpt2|gemma|phi3|qwen2_moe|stablelm)")  # some families stay
@every_third("family", sorted(FAMILIES))  # test_convert.py converts all families
def test_every_family_in_bf16(family, tmp_path):
    teacher = saved(tmp_path / "teacher", family, dtype=torch.bfloat16)
    files = assert_streams_like_memory(teacher, tmp_path, "gka", keep=[1])
    assert {"config.json", "generation_config.json", "conversion.json", "model.safetensors"} <= files.keys()


@in_turn(mixer=CONVERTIBLE, family=["llama", "qwen2", "gpt2", "mixtral"])
def test_every_mixer(family, mixer, tmp_path):
    """Grouped keys, biases and tied embeddings, fused and transposed projections, experts; a seed of its own."""
    gated = hasattr(MIXERS[mixer].options_class, "gate_bias")
    options = {"gate_bias": False} if gated else {}  # a gate that starts at random
    teacher = saved(tmp_path / "teacher", family, tie_word_embeddings=family == "qwen2")
    assert_streams_like_memory(teacher, tmp_path, mixer, [0], seed=3, **options)


def test_tokenizer_and_generation_settings(tmp_path):
    """Settings in their file, in config.json, and absent."""
    for place in ("own file", "config.json", "nowhere"):
        work = tmp_path / place
        teacher = saved(work / "teacher")
        tiny_tokenizer().save_pretrained(teacher)
        if place != "own file":
            (teacher / "generation_config.json").unlink()
        if place != "nowhere":
            file = teacher / ("config.json" if place == "config.json" else "generation_config.json")
            file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": True, "temperature": 0.7}))
        files = assert_streams_like_memory(teacher, work)
        assert (b'"temperature": 0.7' in files["generation_config.json"]) == (place != "nowhere")
        assert "tokenizer.json" in files


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_many_shards(family, tmp_path, monkeypatch):
    """The layers of a model of several files do not end where the files end."""
    teacher = saved(tmp_path / "teacher", family, max_shard_size="30KB", tie_word_embeddings=family == "qwen2")
    for module in (convert, shards):
        monkeypatch.setattr(module, "SHARD_SIZE", "40KB")
    files = assert_streams_like_memory(teacher, tmp_path, keep=[2])
    assert len(list(teacher.glob("*.safetensors"))) > 3 and "model.safetensors.index.json" in files
    load_model(tmp_path / "stream")


@pytest.mark.parametrize(("stored", "noted"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", None)])
def test_stored_dtype_differs_from_the_config(stored, noted, tmp_path):
    teacher = saved(tmp_path / "teacher", "dots1", dtype=getattr(torch, stored))
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"dtype": noted}))
    assert_streams_like_memory(teacher, tmp_path)


def test_head_stored_beside_the_embeddings_that_it_is_tied_to(tmp_path):
    teacher = saved(tmp_path / "teacher", "qwen2", tie_word_embeddings=True)
    edit(teacher, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    files = assert_streams_like_memory(teacher, tmp_path)
    assert b"lm_head" not in files["model.safetensors"]
    edit(teacher, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match="output projection that differs from the embeddings"):
        convert_model(teacher, "gka", out=tmp_path / "other")


def test_checkpoint_of_a_base_model_and_old_buffers(tmp_path):
    """The published GPT-2 has neither the prefix of its base model nor a head, and holds masks."""
    teacher = saved(tmp_path / "teacher", "gpt2")

    def old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    edit(teacher, old)
    assert_streams_like_memory(teacher, tmp_path)


def test_hub_id_whose_files_are_links(tmp_path, monkeypatch):
    import huggingface_hub.constants

    root = tmp_path / "hub" / "models--me--teacher"
    commit = "0123456789abcdef0123456789abcdef01234567"
    saved(tmp_path / "plain")
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "snapshots" / commit).mkdir(parents=True)
    shutil.move(tmp_path / "plain", root / "blobs")
    for file in (root / "blobs").iterdir():
        (root / "snapshots" / commit / file.name).symlink_to(file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    convert_model("me/teacher", "gka", out=tmp_path / "out")
    student = convert_model(root / "snapshots" / commit, "gka")
    for name, tensor in load_model(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, student.state_dict()[name]), name


def test_trained_mixers(tmp_path):
    """An aligned student without attention gives its mixers to a student that keeps a layer."""
    teacher = saved(tmp_path / "teacher")
    aligned = convert_model(teacher, "gka", seed=1)
    with torch.no_grad():
        for name, parameter in aligned.named_parameters():
            if "self_attn" in name:
                parameter.add_(0.5)
    save_student(aligned, tmp_path / "aligned")
    expected = convert_model(teacher, "gka", keep=[1])
    take_mixers(expected, aligned)
    save_student(expected, tmp_path / "memory")
    command = ["convert", "--teacher", teacher, "--out", tmp_path / "stream", "--keep-layers", "1"]
    assert memmix(*command, "--mixer", "gka", "--trained", tmp_path / "aligned").exit_code == 0
    assert contents(tmp_path / "stream") == contents(tmp_path / "memory")
    run = memmix(*command[:3], "--out", tmp_path / "other", "--mixer", "ska", "--trained", tmp_path / "aligned")
    assert run.exit_code == 1 and "the mixers of layer 0 differ (SKAMixer, GKAMixer)" in " ".join(run.output.split())
    assert not (tmp_path / "other").exists()
    beside = convert_model(teacher, "gka", mixers={"gka": {"local_window": 4}, "window": {"sinks": 0}})
    save_student(beside, tmp_path / "beside")  # its options are taken, too
    assert memmix(*command[:3], "--out", tmp_path / "all", "--trained", tmp_path / "beside").exit_code == 0
    assert contents(tmp_path / "all") == contents(tmp_path / "beside")
    to_gka = partial(convert_model, mixer="gka")
    for name, source in (("both", teacher), ("both in memory", load_model(teacher))):
        convert_to_folder(source, tmp_path / name, to_gka, trained=[tmp_path / "aligned"], fill=shift_decays)
    both, in_memory = (load_model(tmp_path / name) for name in ("both", "both in memory"))
    for name, values in aligned.state_dict().items():
        expected = values + 1 if name.endswith("A_log") else values
        assert torch.equal(both.state_dict()[name], expected) and torch.equal(in_memory.state_dict()[name], expected)


def shift_decays(mixer):
    """Changes a mixer that has values already."""
    with torch.no_grad():
        mixer.A_log += 1


# ---- what is converted in memory instead


@pytest.mark.parametrize("kind", ["pickled", "merged experts"])
def test_folders_that_cannot_be_streamed_are_converted_in_memory(kind, tmp_path):
    if kind == "pickled":
        teacher, reason = saved(tmp_path / "teacher"), "its weights are pickled"
        torch.save(load_file(teacher / "model.safetensors"), teacher / "pytorch_model.bin")
        (teacher / "model.safetensors").unlink()
    else:
        teacher = saved(tmp_path / "teacher", "mixtral", save_original_format=False)
        reason = "its tensors do not have the names and shapes"
    lines = []
    student = convert_to_folder(teacher, tmp_path / "out", convert_model, notify=lines.append)
    assert len(lines) == 1 and reason in lines[0] and str(teacher) in lines[0] and "\n" not in lines[0]
    save_student(convert_model(teacher), tmp_path / "memory")
    assert contents(tmp_path / "out") == contents(tmp_path / "memory") and student.device.type == "cpu"
    with pytest.warns(UserWarning, match=reason):
        convert_model(teacher, out=tmp_path / "again")
    run = memmix("convert", "--teacher", teacher, "--out", tmp_path / "third")
    assert run.exit_code == 0 and reason in run.stderr


# ---- refusals: one line, and nothing is left


def missing_shard(folder):
    min(folder.glob("model-*")).unlink()
    return "lacks the weight files model-00001-of-"


def shard_not_in_the_index(folder):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if "00001" not in shard}
    file.write_text(json.dumps(index))
    return "lacks [0-9]+ tensors: .*copy the folder again"


def no_index(folder):
    (folder / "model.safetensors.index.json").unlink()
    return "weight files such as model-00001-of-.*, but no model.safetensors.index.json"


def truncated(folder):
    file = max(folder.glob("model-*"))
    file.write_bytes(file.read_bytes()[:-8])
    return f"truncated weights \\({file.name}"


def twice(folder):
    one, other, *_ = sorted(file.name for file in folder.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(folder / one).items()))
    edit(folder, lambda tensors: tensors.update({name: tensor}), other)
    return f"has the tensor {name} in {one} and again in {other}"


def two_halves(folder):
    for file, dtype in zip(sorted(folder.glob("model-*.safetensors")), ("bfloat16", "float16"), strict=False):
        edit(folder, lambda t, d=dtype: t.update({k: v.to(getattr(torch, d)) for k, v in t.items()}), file.name)
    return "mixes files of two models, one in bf16 and one in fp16"


def float8(folder):
    file = min(folder.glob("model-*")).name
    edit(folder, lambda t: t.update({k: v.to(torch.float8_e4m3fn) for k, v in t.items()}), file)
    return "weights of the type F8_E4M3"


def packed(folder):
    file = min(folder.glob("model-*")).name
    edit(folder, lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(4, 4, dtype=torch.int32)}), file)
    return "1 weights of the type I32: model.layers.0.mlp.up_proj.qweight.* They look quantized"


def quantized(method):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        return f"holds weights quantized by '{method}'; give the original weights"

    change.__name__ = method
    return change


def wrong_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    return "tensors whose shape is not the one"


def unknown_tensor(folder):
    edit(folder, lambda t: t.update({"model.extra.weight": torch.ones(2)}), min(folder.glob("model-*")).name)
    return "1 tensors that a model of its config.json does not have: model.extra.weight"


FAULTS = [missing_shard, shard_not_in_the_index, no_index, truncated, twice, two_halves, float8, packed, wrong_shape]
FAULTS += [unknown_tensor, *map(quantized, ("fp8", "gptq", "awq", "bitsandbytes"))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_broken_teachers_are_refused_in_one_line(fault, tmp_path):
    teacher = saved(tmp_path / "teacher", max_shard_size="30KB")
    message = fault(teacher)
    with pytest.raises(ValueError, match=message) as error:
        convert_model(teacher, "gka", out=tmp_path / "out")
    assert "\n" not in str(error.value) and "teacher" in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["teacher"]


@pytest.mark.parametrize("name", [UP, "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite(name, value, tmp_path):
    teacher = saved(tmp_path / "teacher", dtype=torch.bfloat16)
    edit(teacher, lambda t: t[name].view(-1)[-1:].fill_(value))
    with pytest.raises(ValueError, match=f"NaN or infinite values in 1 tensors: {name}"):
        convert_model(teacher, "gka", out=tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["teacher"]


@pytest.mark.parametrize("out", ["teacher", "."])
def test_the_teacher_is_not_overwritten(tmp_path, out):
    tiny_teacher("llama").save_pretrained(tmp_path / "teacher")
    before = {file.name: file.read_bytes() for file in (tmp_path / "teacher").iterdir()}
    told = r"the output '.*' would replace '.*teacher', which is read; give another folder"
    with pytest.raises(ValueError, match=told):
        convert_to_folder(tmp_path / "teacher", tmp_path / out, convert_model, overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "teacher").iterdir()} == before


def test_a_full_disk_is_noticed_before_the_work(tmp_path, monkeypatch):
    teacher = saved(tmp_path / "teacher")
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(ValueError, match="has 1000 B free, and the student needs .* KiB; make room"):
        convert_model(teacher, "gka", out=tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["teacher"]


def test_a_disk_that_becomes_full_loses_nothing(tmp_path, monkeypatch):
    teacher = saved(tmp_path / "teacher")
    convert_model(teacher, "gka", out=tmp_path / "out")
    before = contents(tmp_path / "out")
    write, calls = os.pwrite, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    command = ["convert", "--teacher", teacher, "--out", tmp_path / "out", "--mixer", "ska", "--overwrite"]
    run = memmix(*command)
    text = " ".join(run.output.split())
    assert run.exit_code == 1 and "No space left" in text and "an earlier folder is untouched" in text
    assert contents(tmp_path / "out") == before and sorted(os.listdir(tmp_path)) == ["out", "teacher"]
    monkeypatch.undo()
    assert memmix(*command).exit_code == 0


@pytest.mark.product  # a new process
def test_a_killed_conversion_leaves_nothing_once_it_runs_again(tmp_path):
    teacher = saved(tmp_path / "teacher")
    script = (
        "import os, sys; from hf_memmix.conversion.convert import convert_model, convert_to_folder\n"
        "kill = lambda done, total: os.kill(os.getpid(), 9) if done * 2 > total else None\n"
        "convert_to_folder(sys.argv[1], sys.argv[2], convert_model, progress=kill)"
    )
    (run,) = run_scripts(script, tmp_path, [teacher, tmp_path / "out"])
    assert run.exitcode == -signal.SIGKILL and not (tmp_path / "out").exists()
    assert len(os.listdir(tmp_path)) == 2  # the teacher and an incomplete folder
    convert_model(teacher, "gka", out=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "teacher"]
    load_model(tmp_path / "out")


# ---- memory and cost

MEMORY = """
import json, resource, sys
from hf_memmix.conversion import convert_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
convert_model(sys.argv[1], out=sys.argv[3])  # brings all libraries into memory
before = peak()
convert_model(sys.argv[2], out=sys.argv[4])
print(json.dumps({"before": before, "after": peak()}))
"""


@pytest.mark.product  # a new process
def test_memory_is_one_layer_and_one_piece(tmp_path):
    """Most of this teacher are MLPs. The model has 190 MiB; in memory, its student would have four times as much."""
    sizes = {"hidden_size": 128, "intermediate_size": 2**16}
    config = tiny_teacher(layers=1).config.to_dict() | sizes | {"num_hidden_layers": 4, "dtype": "bfloat16"}
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(config), dtype=torch.bfloat16)
    (tmp_path / "big").mkdir()
    write_description(model, tmp_path / "big")
    with shards.ShardWriter(tmp_path / "big", model.state_dict(), 1) as writer:
        for name, tensor in model.state_dict().items():
            writer.write(name, [torch.ones(tensor.shape, dtype=tensor.dtype)])
    saved(tmp_path / "small")
    folders = [tmp_path / name for name in ("small", "big", "one", "two")]
    (run,) = run_scripts(MEMORY, tmp_path, folders)
    found = json.loads(run.output.splitlines()[-1])
    size = (tmp_path / "big" / "model.safetensors").stat().st_size
    assert size > 190 * 2**20
    assert found["after"] - found["before"] < 80 * 2**20


def test_dry_run_says_what_the_conversion_reads_and_writes(tmp_path):
    teacher = saved(tmp_path / "teacher", "qwen2", dtype=torch.bfloat16, tie_word_embeddings=True)
    command = ["convert", "--teacher", teacher, "--out", tmp_path / "out", "--keep-layers", "1"]
    cost = result_of(memmix(*command, "--dry-run", "--json"))["streaming"]
    assert os.listdir(tmp_path) == ["teacher"]  # the file that measured the disk is gone
    assert memmix(*command).exit_code == 0
    assert cost["reads"] == (teacher / "model.safetensors").stat().st_size
    assert cost["writes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert cost["seconds"] > 0 and cost["peak_memory"] > 50 * 2**20
    run = memmix(*command[:3], "--dry-run")
    assert run.exit_code == 0 and "of memory and about" in run.stdout
