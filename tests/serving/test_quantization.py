"""torchao rounds weights while the model loads. It does not round the weights of mixers."""

import json
import subprocess
import sys

import pytest
import torch
from greedy import ANSWER, ask, assert_greedy, references_of, tokens_of
from safetensors.torch import load_file, save_file
from serving_cases import ROOMY

import child


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """[rows, columns] as it is after int8 with a scale per row."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Sequential(torch.nn.Linear(*weight.shape[::-1], bias=False))
    layer[0].weight.data.copy_(weight)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer[0].weight.dequantize().detach()


def kinds(model) -> set[tuple[str, str]]:
    """The last two names of each parameter, and how it is stored."""
    return {(name.split(".")[-2], type(p.data).__name__) for name, p in model.named_parameters() if p.dim() > 1}


@pytest.mark.cases("gka")
def test_int8(engines, tmp_path):
    """The answers of a model with rounded weights in feed-forward and kept attention layers."""
    from torchao.core.config import config_to_dict
    from torchao.quantization import Int8WeightOnlyConfig

    folder = engines.folders / "gka"
    references = references_of(engines.folders, "gka", "few")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        if ".mlp." in name or (layer in (0, 2) and "_proj.weight" in name):  # layers of attention
            tensors[name] = rounded(tensor)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    given = json.dumps([(r["prompt"], len(r["tokens"])) for r in references])
    command = [sys.executable, "-c", ANSWER, tmp_path]
    found = subprocess.run(command, env=child.child_env(), input=given, capture_output=True, text=True, check=True)
    answers = json.loads(found.stdout.splitlines()[-1])
    assert answers != [r["tokens"] for r in references]
    int8 = json.dumps(config_to_dict(Int8WeightOnlyConfig()))
    options = {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": int8}}
    engine = engines.get("gka", **ROOMY, **options)
    expected = [r | {"tokens": tokens} for r, tokens in zip(references, answers, strict=True)]
    assert_greedy(tokens_of(ask(engine, expected)), expected)
    (stored,) = engine.apply_model(kinds)
    assert {name for name, kind in stored if kind == "Int8Tensor"} == {
        "gate_up_proj",
        "down_proj",
        "qkv_proj",
        "o_proj",
    }
    assert ("joined_layers", "Tensor") in stored
    with pytest.raises(ValueError, match="quantised weights cannot be loaded again"):
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    engines.close()
