"""What vLLM cannot serve is refused in a line that names it."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from greedy import refused
from references import ready
from serving_cases import LONGEST

import child
from hf_memmix.serving.vllm.versions import SPECULATION_SINCE, installed_version, numbers_of
from testing import MIXERS

pytestmark = pytest.mark.cases("gka")


@pytest.fixture
def altered(engines, tmp_path):
    """A copy of a model folder with other fields in config.json."""

    def make(**fields):
        folder = shutil.copytree(ready(engines.folders / "gka"), tmp_path / "gka")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return make


def test_unknown_mixer(engines, altered):
    message = refused(engines, altered(mixer_types=["attention", "gka", "attention", "nothing"]))
    assert "unknown mixer 'nothing' in mixer_types; known: ['attention', " in message


def test_no_mixer(engines, altered):
    message = refused(engines, altered(mixer_types=["attention"] * 4))
    assert "the model has no memory mixer: all of mixer_types are attention" in message


def test_missing_tensors(engines, altered):
    """vLLM looks for norms only: not for linear layers, of which it joins several, nor for the embeddings."""
    from safetensors.torch import load_file, save_file

    missing = {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.1.self_attn.b_proj.bias": "model.layers.1.self_attn.b_proj.bias",
        "model.layers.2.self_attn.v_proj.weight": "model.layers.2.self_attn.qkv_proj.weight",
    }
    folder = altered()
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in missing}
    assert len(kept) == len(tensors) - len(missing)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(engines, folder)
    assert "the checkpoint lacks 4 parameters of the model" in message
    assert all(name in message for name in missing.values())


def test_refused_family(engines, tmp_path):
    from hf_memmix import memmix_config
    from testing import backbone_config

    config = memmix_config(backbone_config("gpt2"), ["attention", "gka", "attention", "gka"])
    config.architectures = ["MemMixGPT2ForCausalLM"]
    config.save_pretrained(tmp_path)
    message = refused(engines, tmp_path, max_model_len=128)
    reason = "its Transformers backend does not fit the transposed projections of this family"
    assert f"'gpt2' cannot be served by vLLM: {reason}" in message


STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
GIVEN = {
    "--speculative-config (with another method than ngram, or with vLLM before 0.29)": {
        "speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    },
    "--speculative-config (with prefix caching on a CPU)": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        "enable_prefix_caching": True,
    },
    "--enable-lora (with --tensor-parallel-size)": {
        "enable_lora": True,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    },
    "--enable-lora (on a CPU)": {"enable_lora": True},
    "--pipeline-parallel-size (with a family that changes the embeddings before the first layer)": {
        **STAGES,
        "hf_overrides": {"backbone_model_type": "granite"},
    },
    "--pipeline-parallel-size (with --enforce-eager on a CPU)": {**STAGES, "enforce_eager": True},
    "--pipeline-parallel-size (with --speculative-config, --enable-lora, --quantization, --runner pooling or"
    " --states)": {**STAGES, "runner": "pooling"},
    "--decode-context-parallel-size and --prefill-context-parallel-size": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "distributed_executor_backend": "mp",
    },
    "--quantization (with another method than torchao, with --enable-lora, on several GPUs, or a quantised"
    " checkpoint)": {"quantization": "fp8"},
    "--mamba-cache-dtype and --mamba-ssm-cache-dtype": {"mamba_ssm_cache_dtype": "float16"},
    "--no-enable-chunked-prefill (with prefix caching)": {
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
    },
    "--disable-hybrid-kv-cache-manager": {"disable_hybrid_kv_cache_manager": True},
    "--kv-transfer-config and --kv-offloading-size": {"kv_offloading_size": 0.1},
    "--max-model-len (above the length from which rotary embeddings of the types longrope and dynamic change)": {
        "max_model_len": LONGEST + 1,
        "hf_overrides": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    },
}
# fields of a configuration that some version of vLLM does not take on a CPU
FIELDS = {
    "--enable-dbo and --ubatch-size": ("parallel_config", "use_ubatching", True),
    "--mamba-cache-mode all": ("cache_config", "mamba_cache_mode", "all"),
}


@pytest.mark.parametrize("option", GIVEN)
def test_refused_options(option, folders):
    """The configuration is refused, so no weight is read."""
    too_old = numbers_of(installed_version()) < SPECULATION_SINCE  # refused for that reason
    if "CPU" in option and (torch.cuda.is_available() or (too_old and "speculative" in option)):
        return
    from vllm.engine.arg_utils import EngineArgs

    given = EngineArgs(str(ready(folders / "gka")), dtype="bfloat16", **{"max_model_len": LONGEST} | GIVEN[option])
    with pytest.raises(ValueError, match=re.escape(f"{option}: ")):
        given.create_engine_config()


@pytest.mark.parametrize("option", FIELDS)
def test_refused_fields(option, folders, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    from hf_memmix.serving.vllm.options import REFUSALS, refusal_of_options

    config = EngineArgs(str(ready(folders / "gka")), max_model_len=1024).create_engine_config()
    assert refusal_of_options(config) is None
    part, name, value = FIELDS[option]
    monkeypatch.setattr(type(getattr(config, part)), name, value)
    vars(getattr(config, part)).pop(name, None)
    assert refusal_of_options(config).startswith(f"{option}: ")
    assert {row.option for row in REFUSALS} == GIVEN.keys() | FIELDS.keys()


@pytest.mark.cases("coffee")
def test_mixers_that_cannot_be_divided(folders):
    from vllm.engine.arg_utils import EngineArgs

    given = EngineArgs(
        str(ready(folders / "coffee")),
        max_model_len=LONGEST,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        hf_overrides={"mixers": {"coffee": MIXERS["coffee"] | {"inner_size": 45}}},
    )
    with pytest.raises(ValueError, match="--tensor-parallel-size 2: coffee of layer 1: 45 channels cannot be divided"):
        given.create_engine_config()


def test_command_refuses_what_vllm_refuses(folders):
    """In one line, before the server starts: options that do not reach the plugin, and those that it refuses."""
    from hf_memmix.serving.vllm.blocks import configuration

    for arguments, message in (
        (["--model-impl", "transformers"], "--model-impl transformers: vLLM would build the model without the plugin"),
        (["--tensor-parallel-size=3"], "--tensor-parallel-size 3: gka of layer 1: 2 heads cannot be"),
        (["--quantization=fp8"], "^--quantization .*: a quantised checkpoint has"),
        (["--quantization=torchao"], "^--quantization torchao: vLLM does not know how"),
        (["--max-num-seqs=0"], "--max-num-seqs 0: "),
        (["--model=other"], "^vllm serve: '--model other' stands beside the model"),
        (["--port=8001", "other"], "^vllm serve: .other. stands beside the model"),
        (["--max-model-len=9999"], "max_model_len .9999. is greater than the derived"),
        (["--prot=8001"], "^vllm serve: unrecognized arguments: --prot=8001$"),
        (["--dtype=int8"], "^vllm serve: argument --dtype: invalid choice: 'int8'"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            configuration(ready(folders / "gka"), arguments)
        assert "\n" not in str(error.value)
    # in a process of its own: Triton prints more when Python ends
    command = [sys.executable, "-m", "hf_memmix_cli", "serve", "--check", folders / "gka", "--quantization=fp8"]
    result = subprocess.run(command, env=child.child_env(), capture_output=True, text=True, check=False)
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("error: --quantization ")


def test_too_little_memory_for_the_command(folders):
    from hf_memmix.serving.vllm.blocks import configuration, sequences_that_fit

    config = configuration(ready(folders / "gka"), ["--max-model-len=1024"])
    with pytest.raises(ValueError, match="at least one request with the model's max seq len .1024."):
        sequences_that_fit(config, 10**5, (1024,))


def test_length_of_a_fixed_rotation():
    """The limit counts if a layer rotates, also where kinds of attention have rotary embeddings of their own."""
    from types import SimpleNamespace

    from hf_memmix.serving.vllm.options import longest_with_fixed_rotation

    def longest(kinds, rotation, **mixers):
        return longest_with_fixed_rotation(
            SimpleNamespace(mixer_types=kinds, mixers=mixers, rope_parameters=rotation, max_position_embeddings=100)
        )

    long = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    assert longest(["gka", "attention"], long) == longest(["gka"], long, gka={"use_rope": True}) == 40
    assert longest(["gka", "attention"], {"full_attention": {"rope_type": "default"}, "sliding_attention": long}) == 40
    assert longest(["attention"], {"rope_type": "dynamic"}) == 100
    assert longest(["mamba2"], long, mamba2={"local_window": 4}, window={"use_rope": True}) == 40
    for kinds, rotation in ((["gka"], long), (["attention"], {"rope_type": "yarn"}), (["attention"], None)):
        assert longest(kinds, rotation) == float("inf")
