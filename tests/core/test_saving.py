"""Checkpoints: save, load, shards, dtypes, ties, the Hub's folder, loading without the import."""

import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

import testing
from testing import (
    FAMILIES,
    assert_same,
    backbone_config,
    build,
    mixers_of,
    random_ids,
    tiny_config,
)

tiny_model = functools.partial(testing.tiny_model, dtype=torch.float32)  # as they are saved
IDS = random_ids(2, 9)


def load(folder, **kwargs):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    return model, {name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}


NOTHING = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load(family, tmp_path):
    model = tiny_model(family, "odd")
    model.save_pretrained(tmp_path)
    again, report = load(tmp_path)
    assert report == NOTHING
    assert type(again) is type(model)
    assert_same(again(IDS).logits, model(IDS).logits, tolerance=0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


@torch.no_grad()
@pytest.mark.parametrize(
    "family", ("llama", "gpt2", "gpt_neox", "phi3", "mixtral")
)  # test_convert.py has all families
def test_teacher_checkpoint(family, tmp_path):
    """A native checkpoint loads into a memmix configuration: nothing outside the replaced attention is missing."""
    native = tiny_model(family, None)
    native.save_pretrained(tmp_path)
    config = tiny_config(family, "odd")
    student, report = load(tmp_path, config=config)
    replaced = [f".{i}." for i in mixers_of(student)]
    for kind, names in report.items():
        assert all(any(r in str(name) for r in replaced) for name in names), (kind, names)
    assert report["missing_keys"], "the mixers have parameters of their own"
    for name, parameter in native.named_parameters():
        if not any(r in name for r in replaced):
            assert torch.equal(student.get_parameter(name), parameter), name
    assert all(torch.isfinite(p).all() for p in student.parameters())


def test_missing_parameters_are_initialised(tmp_path):
    torch.manual_seed(0)
    tiny_model("llama", None).save_pretrained(tmp_path)
    student = AutoModelForCausalLM.from_pretrained(tmp_path, config=tiny_config("llama", "all"))
    for mixer in mixers_of(student).values():
        assert ((mixer.A_log.exp() > 0) & (mixer.A_log.exp() <= 16)).all()
        dt = torch.nn.functional.softplus(mixer.dt_bias)
        assert ((dt > 5e-4) & (dt < 0.11)).all()
        assert 0.01 < mixer.a_proj.weight.std() < 0.03
        assert (mixer.o_norm.weight == 1).all()


@torch.no_grad()
@pytest.mark.parametrize("family", ("llama", "gemma3_text", "gpt2"))
@pytest.mark.parametrize("tied", (True, False))
def test_heads_tied_and_untied(family, tied, tmp_path):
    model = build(tiny_config(family, "odd", tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for m in (model, again):
        pointers = {e.weight.data_ptr() for e in (m.get_input_embeddings(), m.get_output_embeddings())}
        assert len(pointers) == (1 if tied else 2)
    assert_same(again(IDS).logits, model(IDS).logits, tolerance=0)


# ---- damage


# ---- the Hub


def files_of(folder):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())


def test_saved_folder(tmp_path):
    """What a checkpoint folder holds: no source of ours but the stub, which is four lines and needs the package."""
    tiny_model("llama", "odd").save_pretrained(tmp_path)
    expected = ["config.json", "generation_config.json", "model.safetensors", "modeling_memmix.py"]
    assert files_of(tmp_path) == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_memmix.MemMixForCausalLM"
    assert config["auto_map"]["AutoConfig"] == "modeling_memmix.MemMixConfig"
    assert "from hf_memmix import" in (tmp_path / "modeling_memmix.py").read_text()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    for name in ("q_proj.weight", "q_conv1d.weight", "A_log", "dt_bias", "alpha_proj.bias", "o_norm.weight"):
        assert f"model.layers.1.self_attn.{name}" in names


FRESH_PROCESS = """
import pickle, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

folder, again, ids = sys.argv[1], sys.argv[2], torch.tensor(eval(sys.argv[3]))
assert "hf_memmix" not in sys.modules
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("remote code ran without being trusted")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert "hf_memmix" in sys.modules
with torch.no_grad():
    logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
model.save_pretrained(again)
AutoConfig.from_pretrained(folder, trust_remote_code=True).save_pretrained(again + "/config")
pickled = pickle.load(open(folder + "/model.pickle", "rb"))
with torch.no_grad():
    assert torch.equal(pickled(ids).logits, logits)
torch.save({"logits": logits, "tokens": tokens, "class": type(model).__name__}, again + "/result.pt")
"""


@pytest.mark.product  # a new process
def test_load_without_the_import(tmp_path):
    """A process without `import hf_memmix` loads by auto_map and trust_remote_code, saves and unpickles the model."""
    model = build(tiny_config("gemma3_text", "odd"))
    folder, again = tmp_path / "first", tmp_path / "again"
    model.save_pretrained(folder)
    (folder / "model.pickle").write_bytes(pickle.dumps(model))
    threads = str(torch.get_num_threads())  # sums of other threads round in another order
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", FRESH_PROCESS, str(folder), str(again), str(IDS.tolist())]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = torch.load(again / "result.pt")
    with torch.no_grad():
        assert_same(found["logits"], model(IDS).logits, tolerance=1e-6)
    assert found["class"] == type(model).__name__
    # the second save is again only the stub: nothing of the package was copied, auto_map is as before
    assert [f for f in files_of(again) if f.endswith(".py")] == ["config/modeling_memmix.py", "modeling_memmix.py"]
    for file in ("config.json", "modeling_memmix.py"):
        first, second = ((f / file).read_text() for f in (folder, again))
        assert first == second, file


def test_trusting_remote_code_after_the_import(tmp_path):
    """After `import hf_memmix` its classes are used, with and without trust_remote_code; no source code is saved."""
    model = tiny_model("llama", "odd")
    model.save_pretrained(tmp_path / "first")
    trusted = AutoModelForCausalLM.from_pretrained(tmp_path / "first", trust_remote_code=True)
    assert type(trusted) is type(model)
    trusted.save_pretrained(tmp_path / "second")
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


@pytest.mark.parametrize("family", ("qwen3", "gemma3_text"))
def test_backbone_config(family, tmp_path):
    """Of a student and of its folder: that of the teacher, which names no class of this package."""
    expected = backbone_config(family).to_dict() | {"transformers_version": 0}
    assert tiny_config(family, "odd").backbone_config().to_dict() | {"transformers_version": 0} == expected
    build(tiny_config(family, "odd")).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures[0].startswith("MemMix")
    config.backbone_config().save_pretrained(tmp_path / "backbone")
    assert "MemMix" not in (tmp_path / "backbone" / "config.json").read_text()
    assert config.backbone_config().to_dict()["architectures"] is None
