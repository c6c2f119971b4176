"""Folders that are not what they say: each is refused in one line that names the folder, the fault and a remedy."""

import itertools
import json
import math
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_runner import memmix
from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model, loading, model_files
from hf_memmix.conversion.estimate import meta_teacher
from hf_memmix.conversion.loading import read_config
from tiny_teachers import CONVERTIBLE, tiny_teacher

Q_WEIGHT, Q_BIAS, UP = (
    f"model.layers.1.{name}" for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.up_proj.weight")
)


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def saved(folder, family="llama", layers=2, **options):
    tiny_teacher(family, layers, **options).save_pretrained(folder)
    return folder


def refused(folder, message, load=load_model):
    """One line, which names the folder."""
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


# ---- tensors without a partner


def test_tensors_that_are_not_there(tmp_path):
    """The library would fill missing tensors with random numbers."""
    convert_model(tiny_teacher(), "gka").save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop(Q_WEIGHT))
    refused(tmp_path, f"lacks 1 tensors.*{Q_WEIGHT}")


def test_more_layers_than_the_config_names(tmp_path):
    edit_config(saved(tmp_path, layers=4), num_hidden_layers=2)
    for load in (load_model, convert_model):
        refused(tmp_path, r"18 tensors .*model.layers.2.input_layernorm.weight, .* \.\.\.", load)


@pytest.mark.parametrize("mixer", ["", *CONVERTIBLE])
def test_biases_that_the_config_does_not_name(tmp_path, mixer):
    """In a transformer, and in a layer of every mixer."""
    teacher = tiny_teacher(layers=2)
    (convert_model(teacher, mixer) if mixer else teacher).save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.1.self_attn.nosuch.bias": torch.ones(32)}))
    refused(tmp_path, "1 tensors .*: model.layers.1.self_attn.nosuch.bias")


def test_tensors_of_mixers_that_are_not_in_the_config(tmp_path):
    convert_model(tiny_teacher(layers=2), "gka").save_pretrained(tmp_path)
    edit_config(tmp_path, mixer_types=["attention", "attention"])
    refused(tmp_path, "does not have: model.layers.0.self_attn.A_log")


def test_masks_and_angles_of_old_checkpoints_are_ignored(tmp_path):
    for family, prefix, names in (
        ("llama", "model.layers.0.self_attn.rotary_emb", ["inv_freq"]),
        ("gpt2", "transformer.h.0.attn", ["bias", "masked_bias"]),
        ("gpt_neox", "gpt_neox.layers.0.attention", ["bias", "masked_bias"]),
    ):
        folder, old = saved(tmp_path / family, family), {f"{prefix}.{name}": torch.ones(1) for name in names}
        edit_tensors(folder, lambda t, old=old: t.update(old))
        load_model(folder)


def test_tensors_of_another_shape(tmp_path):
    edit_config(saved(tmp_path), intermediate_size=50)
    refused(tmp_path, r"6 tensors whose shape is not .*mlp.down_proj.weight is \[32, 48\], not \[32, 50\]")


def test_tied_output_projection_that_differs_is_refused(tmp_path):
    """A conversion would copy the embeddings and then the projection into the one tensor."""
    saved(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embeddings.clone()}))
    load_model(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embeddings + 1}))
    refused(tmp_path, "differs from the embeddings.*tie_word_embeddings to false")
    teacher = tiny_teacher(tie_word_embeddings=True)
    teacher.lm_head.weight = torch.nn.Parameter(teacher.lm_head.weight + 1)
    with pytest.raises(ValueError, match="the teacher has an output projection that differs"):
        convert_model(teacher, "gka")


# ---- values


def test_weights_that_are_not_finite(tmp_path):
    for i, (value, dtype) in enumerate(
        itertools.product((math.nan, math.inf, -math.inf), (torch.float32, torch.bfloat16))
    ):
        teacher, folder = tiny_teacher(layers=2).to(dtype), tmp_path / str(i)
        with torch.no_grad():
            teacher.get_parameter(UP)[3, 2] = value
            teacher.get_parameter(Q_WEIGHT)[0, 0] = value
        teacher.save_pretrained(folder)
        refused(folder, f"NaN or infinite values in 2 tensors: ({UP}, {Q_WEIGHT}|{Q_WEIGHT}, {UP})")
        with pytest.raises(ValueError, match=f"the teacher has NaN .* {UP}"):
            convert_model(teacher, "gka")


@pytest.mark.parametrize("mixer", CONVERTIBLE)
def test_students_that_are_not_finite(tmp_path, mixer):
    student = convert_model(tiny_teacher(layers=2), mixer)
    name = next(name for name, _ in student.named_parameters() if "layers.1.self_attn" in name)
    student.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: t[name].view(-1)[-1:].fill_(math.nan))
    with pytest.raises(ValueError, match="NaN or infinite|not finite|norm nan"):  # some mixers speak up themselves
        load_model(tmp_path)


def test_command_names_the_tensor(tmp_path):
    edit_tensors(saved(tmp_path / "teacher"), lambda t: t[UP][0, :1].fill_(math.nan))
    run = memmix("convert", "--teacher", tmp_path / "teacher", "--out", tmp_path / "student")
    assert run.exit_code == 1 and "Traceback" not in run.output and not (tmp_path / "student").exists()
    assert f"NaN or infinite values in 1 tensors: {UP}" in " ".join(run.output.split())


def test_a_conversion_reads_every_weight_once_for_this_check(tmp_path, monkeypatch):
    """Whether it gets a model or a folder, or converts by streaming: one pass takes seconds per billion parameters."""
    read, teacher, is_finite = [], tiny_teacher(layers=2), loading._is_finite

    def counted(tensor):
        read.append(0 if tensor.is_meta else tensor.numel())
        return is_finite(tensor)

    monkeypatch.setattr(loading, "_is_finite", counted)
    once = sum(tensor.numel() for tensor in teacher.state_dict().values())
    convert_model(teacher, "gka")
    assert sum(read) == once
    teacher.save_pretrained(tmp_path / "teacher")
    convert_model(tmp_path / "teacher", "gka")
    assert sum(read) == 2 * once
    assert memmix("convert", "--teacher", tmp_path / "teacher", "--out", tmp_path / "student").exit_code == 0
    assert sum(read) == 3 * once


# ---- config.json


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 .*at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 .*multiple of num_key_value_heads, 3"),
        ({"head_dim": -8}, "head_dim -8"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"hidden_act": "nosuch"}, "hidden_act 'nosuch'.*silu"),
        ({"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}}, "rope_type 'nosuch'.*yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "impossible values.*factor"),
        ({"num_hidden_layers": "2"}, "impossible values.*num_hidden_layers"),
        ({"dtype": "nosuch"}, "impossible values.*nosuch"),
        ({"model_type": "nosuch"}, "impossible values.*nosuch"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "quantized by 'fp8'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized by 'gptq'"),
    ],
    ids=str,
)
def test_impossible_configs(tmp_path, fields, message):
    edit_config(saved(tmp_path), **fields)
    for load in (load_model, read_config, meta_teacher):
        refused(tmp_path, message, load)


def test_activations_under_other_names(tmp_path):
    for family, field in (("gpt2", "activation_function"), ("gemma2", "hidden_activation")):
        edit_config(saved(tmp_path / family, family), **{field: "nosuch"})
        refused(tmp_path / family, f"{field} 'nosuch'")


# ---- files


def first_and_rest(folder):
    """The index and one shard of a model in several."""
    tiny_teacher(layers=2).save_pretrained(folder, max_shard_size="20KB")
    return folder / "model.safetensors.index.json", sorted(folder.glob("model-*.safetensors"))[1]


def test_shards(tmp_path):
    index, shard = first_and_rest(tmp_path)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    refused(tmp_path, f"corrupt or truncated weights .{shard.name}")
    shard.unlink()
    refused(tmp_path, f"lacks the weight files {shard.name}")
    shard.write_bytes(whole)
    load_model(tmp_path)
    for text, message in (("{", "is not JSON"), ("{}", "has no weight_map"), ('{"weight_map": [1]}', "no weight_map")):
        index.write_text(text)
        refused(tmp_path, message)
    index.write_text(json.dumps({"weight_map": {Q_WEIGHT: "nosuch.safetensors"}}))
    refused(tmp_path, "lacks the weight files nosuch.safetensors")


def test_files_that_are_not_what_they_say(tmp_path):
    for content in (b"", b"x" * 1000):
        (saved(tmp_path) / "model.safetensors").write_bytes(content)
        refused(tmp_path, "corrupt or truncated weights")
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "a config.json but no weights")
    for text, message in (("{", "is not JSON"), ("[]", "no JSON object"), ("{}", "model_type")):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, message)


class Touch:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles(tmp_path):
    """Plain tensors load. Other objects are refused in one line and are not executed."""
    tensors = load_file(saved(tmp_path) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    file, trace = tmp_path / "pytorch_model.bin", tmp_path / "trace"
    torch.save(tensors, file)
    assert torch.equal(load_model(tmp_path).get_parameter(UP), tensors[UP])
    for content in (pickle.dumps(Touch(trace)), b"garbage" * 100, file.read_bytes()[:-2000]):
        file.write_bytes(content)
        refused(tmp_path, "pytorch_model.bin' is damaged, or holds Python objects other")
    assert not trace.exists()


def test_quantized_tensors_that_the_config_does_not_mention(tmp_path):
    for dtype in (torch.int8, torch.float8_e4m3fn):
        edit_tensors(saved(tmp_path), lambda t, dtype=dtype: t.update({Q_WEIGHT: t[Q_WEIGHT].to(dtype)}))
        refused(tmp_path, f"1 weights of the type .*{Q_WEIGHT}")


def test_mxfp4_is_read_as_plain_weights(tmp_path):
    """gpt_oss is released in this form; transformers dequantizes it while loading."""
    saved(tmp_path, "gpt_oss", intermediate_size=32)

    def pack(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(shape, 127, dtype=torch.uint8)

    edit_tensors(tmp_path, pack)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    teacher = load_model(tmp_path)
    assert teacher.model.layers[0].mlp.experts.down_proj.is_floating_point()
    student = convert_model(teacher, "gka")
    student.save_pretrained(tmp_path / "student")
    load_model(tmp_path / "student")


def test_a_folder_with_an_adapter_is_named_as_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="holds an adapter, not a model; merge it into its base model"):
        read_config(tmp_path)
    tiny_teacher(layers=1).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds an adapter beside a model; merge it into its base model"):
        read_config(tmp_path)


def break_file(file, how):
    file.unlink(missing_ok=True)
    contents = {"no JSON": b'{"a": ', "a list": b"[1]", "bytes": b"\xff\xfe", "deep": b"[" * 3000 + b"]" * 3000}
    contents["deep object"] = b'{"a":' * 3000 + b"1" + b"}" * 3000
    if how in contents:
        file.write_bytes(contents[how])
    elif how == "folder":
        file.mkdir()
    else:
        file.symlink_to({"link to nothing": "nowhere", "loop": file.name}[how])


NOT_A_FILE = {"folder": "is not a file", "link to nothing": "is a link to a file", "loop": "is a link to a file"}
NO_OBJECT = {"no JSON": "is not JSON", "bytes": "is not JSON", "a list": "no JSON object"}
NO_OBJECT |= {"deep": "nested more than 100 levels", "deep object": "nested more than 100 levels"}


SIDE_FILES = ["config.json", *model_files.OBJECTS, "chat_template.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]


@pytest.mark.parametrize("name", [*SIDE_FILES, "tokenizer.json"])
def test_no_broken_file_of_a_teacher_is_replaced_by_a_default(tmp_path, name):
    """generation_config.json became that of the model class, with exit code 0; other files were left out."""
    shutil.copytree(asset_path("tiny_teacher"), tmp_path / "teacher")
    before = sorted(path.name for path in (tmp_path / "teacher").iterdir())
    kinds = NOT_A_FILE | (NO_OBJECT if name == "config.json" or name in model_files.OBJECTS else {})
    kinds |= {"bytes": "is not UTF-8"} if name in model_files.TEXTS else {}
    file = tmp_path / "teacher" / name
    kept = file.read_bytes() if name in before else None
    for how, told in kinds.items():
        break_file(file, how)
        with pytest.raises(ValueError, match=f"{name}' (is |holds )?{told}"):
            convert_model(tmp_path / "teacher", "gka", out=tmp_path / "student")
        file.rmdir() if how == "folder" else file.unlink()
        assert not (tmp_path / "student").exists()
    if kept is not None:
        file.write_bytes(kept)
    convert_model(tmp_path / "teacher", "gka", out=tmp_path / "student")


def test_gguf_is_refused_as_quantized_weights(tmp_path):
    folder, named = tmp_path / "teacher", tmp_path / "Some-Model-GGUF"
    folder.mkdir(), named.mkdir()
    (folder / "model-q4.gguf").write_bytes(b"GGUF")
    for given in (folder / "model-q4.gguf", folder, named):
        with pytest.raises(ValueError, match="quantized by 'gguf'.*memmix import-gguf "):
            convert_model(given, "gka", out=tmp_path / "student")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="quantized by 'gguf'"):
        convert_model(folder, "gka", out=tmp_path / "student")


@pytest.mark.parametrize(("family", "part"), [("qwen2_5_vl", "qwen2_5_vl_text"), ("llava", "llama")])
def test_models_that_see_are_refused_by_name(tmp_path, family, part):
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"'{family}'.*'{part}'"):
        convert_model(tmp_path, "gka", out=tmp_path / "student")
