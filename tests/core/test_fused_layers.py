"""Norms and MLPs of the backbone in fewer kernels: the same results, the same class names, and only where they fit."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import hf_memmix
from hf_memmix.fused_layers import FusedMLP, FusedRMSNorm, fuse_layers, fused_class
from testing import assert_same

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def native(config_class=LlamaConfig, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SIZES, **options)).to(DEVICE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def fused_layers(model) -> dict[str, type]:
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, (FusedRMSNorm, FusedMLP))}


def loss_and_gradients(model):
    tokens = torch.arange(14, device=DEVICE).view(2, 7)
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_same_results(config_class, backend, monkeypatch):
    model = native(config_class)
    want = loss_and_gradients(model)
    fuse_layers(model)
    heads = ["self_attn.q_norm", "self_attn.k_norm"] if config_class is Qwen3Config else []
    inside = [*heads, "mlp", "input_layernorm", "post_attention_layernorm"]
    assert set(fused_layers(model)) == {"model.norm", *(f"model.layers.0.{name}" for name in inside)}
    monkeypatch.setenv("HF_MEMMIX_BACKEND", backend)
    got = loss_and_gradients(model)
    for name in want:
        if backend == "torch":
            assert torch.equal(got[name], want[name]), name
        else:
            assert_same(got[name], want[name], name, tolerance=1e-5)


def test_kernels_run(monkeypatch):
    """One kernel for each norm and each product."""
    from hf_memmix_kernels.rowwise import launch

    model, calls = native(), []
    fuse_layers(model)
    for name in ("gated_norm_fwd_triton", "gated_product_fwd_triton"):
        function = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *a, f=function, n=name: calls.append(n) or f(*a))
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    model(torch.arange(5, device=DEVICE)[None])
    assert sorted(calls) == ["gated_norm_fwd_triton"] * 3 + ["gated_product_fwd_triton"]


def test_models_with_mixers_have_them():
    config = hf_memmix.memmix_config(LlamaConfig(**SIZES), mixer_types=["coffee"])
    model = AutoModelForCausalLM.from_config(config)
    assert len(fused_layers(model)) == 4
    assert [type(layer.mlp).__name__ for layer in model.model.layers] == ["LlamaMLP"]
    assert isinstance(model.model.norm, LlamaRMSNorm)


def test_copies_and_pickles_stay_fused():
    model = native()
    fuse_layers(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fused_layers(other) == fused_layers(model)
        assert set(other.state_dict()) == set(model.state_dict())
        assert torch.equal(other.model.norm.weight, model.model.norm.weight)


def test_layers_that_compute_something_else_stay():
    assert fused_class(Gemma2RMSNorm) is None and fused_class(nn.LayerNorm) is None and fused_class(nn.Linear) is None
    assert issubclass(fused_class(LlamaMLP), LlamaMLP) and fused_class(LlamaMLP) is fused_class(LlamaMLP)
    gelu = native(hidden_act="gelu")
    fuse_layers(gelu)
    assert FusedMLP not in {kind.__mro__[1] for kind in fused_layers(gelu).values()}
    gemma = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES))
    fuse_layers(gemma)
    assert not fused_layers(gemma)
