"""Adapters: several at once, each answers as the model into which it is merged."""

import json
import subprocess
import sys

import pytest
import torch
from greedy import ANSWER, ask, assert_greedy, references_of, tokens_of
from safetensors.torch import load_file, save_file
from serving_cases import ROOMY

import child
from hf_memmix.serving.vllm.joined import JoinedLayers

RANK, ALPHA = 4, 8
TARGETS = ["q_proj", "v_proj", "o_proj", "g_proj", "a_proj", "gate_proj", "down_proj"]


def make_adapter(base, folder, seed: int):
    """Write a random adapter as PEFT does, and the model with it merged; the folders of both."""
    adapter, merged = folder / f"adapter{seed}", folder / f"merged{seed}"
    tensors, factors, generator = load_file(base / "model.safetensors"), {}, torch.Generator().manual_seed(seed)
    for name in list(tensors):
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in TARGETS and name != path:
            rows, columns = tensors[name].shape
            A, B = (torch.randn(*s, generator=generator) / 8 for s in ((RANK, columns), (rows, RANK)))
            factors |= {f"base_model.model.{path}.lora_A.weight": A, f"base_model.model.{path}.lora_B.weight": B}
            tensors[name] = tensors[name] + ALPHA / RANK * B @ A
    for each in (adapter, merged):
        each.mkdir()
    (merged / "config.json").write_text((base / "config.json").read_text())
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    save_file(factors, adapter / "adapter_model.safetensors", {"format": "pt"})
    description = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(description | {"task_type": "CAUSAL_LM"}))
    return adapter, merged


@pytest.mark.cases("gka")
def test_several_adapters(engines, tmp_path, monkeypatch):
    """And requests without one; but on a CPU vLLM computes these with an adapter of their batch."""
    from vllm.lora.request import LoRARequest

    from hf_memmix.serving.vllm import options

    references = references_of(engines.folders, "gka", "few")
    given = json.dumps([(r["prompt"], len(r["tokens"])) for r in references])
    requests, expected = [None], [references]
    for seed in (1, 2):
        adapter, merged = make_adapter(engines.folders / "gka", tmp_path, seed)
        command = [sys.executable, "-c", ANSWER, merged]
        found = subprocess.run(command, env=child.child_env(), input=given, capture_output=True, text=True, check=True)
        answers = json.loads(found.stdout.splitlines()[-1])
        expected.append([r | {"tokens": tokens} for r, tokens in zip(references, answers, strict=True)])
        requests.append(LoRARequest(str(seed), seed, str(adapter)))
    assert len({str([r["tokens"] for r in each]) for each in expected}) == 3
    without = 0 if torch.cuda.is_available() else 1
    if without:
        monkeypatch.setattr(options, "REFUSALS", [r for r in options.REFUSALS if "lora" not in r.option])
    engine = engines.get("gka", **ROOMY, enable_lora=True, max_loras=2, max_lora_rank=8)
    (joined,) = engine.apply_model(lambda model: sum(isinstance(m, JoinedLayers) for m in model.modules()))
    assert not joined
    prompts = [reference for each in expected[without:] for reference in each]
    adapters = [request for request in requests[without:] for _ in references]
    assert_greedy(tokens_of(ask(engine, prompts, adapters=adapters)), prompts)
    assert_greedy(tokens_of(ask(engine, references)), references)
    engines.close()
