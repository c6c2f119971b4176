"""The table against transformers' own attention: extracted projections must give the q, k, v and output it has."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_memmix.conversion.families import FAMILIES, attention_module, attention_prefix, extract_attention
from tiny_teachers import tiny_teacher

# yarn, the default of gpt-oss, scales the rotary embedding, so it is not the identity at position 0
OPTIONS = {"gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}}


@pytest.fixture
def recorder():
    """An attention function that records the q, k, v [B, H, T, D] and the output it hands back."""
    record = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        groups = query.shape[1] // value.shape[1]
        output = value.repeat_interleave(groups, 1).cumsum(2).transpose(1, 2).contiguous()
        record.append((query, key, value, output))
        return output, None

    ALL_ATTENTION_FUNCTIONS["memmix_record"] = attend
    yield record
    del ALL_ATTENTION_FUNCTIONS["memmix_record"]


def rms_norm(x, weight, head_dim):
    """Over the last axis of the weight's size: one head, or all heads of a token."""
    if weight is None:
        return x
    shape = x.shape
    x = x if weight.numel() == head_dim else x.flatten(-2)
    return (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight).view(shape)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_extracted_projections_are_what_the_attention_computes(model_type, recorder):
    teacher = tiny_teacher(model_type, **OPTIONS.get(model_type, {}))
    teacher.config._attn_implementation = "memmix_record"
    layer = 1
    seen = {}

    def hook(module, args, kwargs, output):
        seen["x"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen["out"] = output[0]

    handle = attention_module(teacher, layer).register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        teacher(torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1)))
    handle.remove()

    weights = extract_attention(teacher, layer)
    query, key, value, mixed = recorder[layer]
    x = seen["x"]

    def project(role, heads):
        y = torch.nn.functional.linear(x, getattr(weights, f"{role}_weight"), getattr(weights, f"{role}_bias"))
        return y.unflatten(-1, (heads, weights.head_dim))

    q = rms_norm(project("q", weights.num_heads), weights.q_norm, weights.head_dim)
    k = rms_norm(project("k", weights.num_kv_heads), weights.k_norm, weights.head_dim)
    v = project("v", weights.num_kv_heads)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(v.transpose(1, 2), value, **close)
    # rotary embeddings leave position 0 alone; families that norm after them commute with it there
    torch.testing.assert_close(q.transpose(1, 2)[:, :, 0], query[:, :, 0], **close)
    torch.testing.assert_close(k.transpose(1, 2)[:, :, 0], key[:, :, 0], **close)
    out = torch.nn.functional.linear(mixed.flatten(-2), weights.o_weight, weights.o_bias)
    torch.testing.assert_close(out, seen["out"], **close)


def test_every_attention_tensor_has_a_source():
    for model_type in FAMILIES:
        teacher = tiny_teacher(model_type, layers=2)
        module = attention_module(teacher, 1)
        weights = extract_attention(teacher, 1)
        prefix = attention_prefix(teacher, 1)
        read = {name.removeprefix(prefix + ".") for names in weights.sources.values() for name in names}
        assert read == {name for name, _ in module.named_parameters()}
        assert set(weights.sources) == set(weights.tensors())


def test_unknown_family_and_unknown_tensor_are_refused():
    with pytest.raises(ValueError, match="'bloom' is not supported; supported: .*llama"):
        extract_attention(tiny_teacher("bloom", num_key_value_heads=None), 0)
    teacher = tiny_teacher("stablelm", qk_layernorm=True)
    with pytest.raises(ValueError, match="q_layernorm.*would be lost"):
        extract_attention(teacher, 0)


def test_extraction_copies():
    teacher = tiny_teacher("llama")
    weights = extract_attention(teacher, 0)
    before = attention_module(teacher, 0).q_proj.weight.detach().clone()
    weights.q_weight.zero_()
    torch.testing.assert_close(attention_module(teacher, 0).q_proj.weight, before, rtol=0, atol=0)
