"""The table against transformers' own attention: extracted projections must give the q, k, v and output it has."""

import itertools
import sys
import warnings

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_memmix.backbones import layer_rotates
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.families import (
    FAMILIES,
    REFUSED,
    attention_module,
    attention_prefix,
    extract_attention,
    family_of,
)
from hf_memmix.conversion.loading import load_model
from hf_memmix.mixers import MIXERS
from testing import every_third
from tiny_teachers import rotating_mixers, tiny_teacher


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


def rms_norm(x, weight, head_dim, eps):
    """Over the last axis of the weight's size: one head, or all heads of a token."""
    if weight is None:
        return x
    shape = x.shape
    x = x if weight.numel() == head_dim else x.flatten(-2)
    return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).view(shape)


def rotate(x, cos, sin, layout):
    """Rotate channels (i, i + d/2) of x [B, T, H, D] by angles in one of the layouts of cos and sin."""
    cos, sin = (
        t[..., ::2] if layout == "pairs" else t[..., : t.shape[-1] // (2 - (layout == "single"))] for t in (cos, sin)
    )
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


# what a family's configuration can turn on or off; each family's own defaults are tested as they are
OPTIONS = [
    ("llama", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"head_dim": 16}),
    ("phi3", {"num_key_value_heads": 1}),
    ("gpt_neox", {"attention_bias": False}),
    ("stablelm", {"use_qkv_bias": True}),
    ("starcoder2", {"use_bias": False}),
    ("cohere", {"attention_bias": True}),
    ("cohere2", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),  # then no layer rotates
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),  # then all of them do
    ("ernie4_5", {"use_bias": True}),
    ("gemma3_text", {"attention_bias": True}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    ("phimoe", {"attention_bias": True}),
]
TEACHERS = [(model_type, {}) for model_type in sorted(FAMILIES)] + OPTIONS


def run_recorded(teacher, layer):
    """The input, output and rotary embeddings of one attention layer, whose q, k, v a `recorder` has."""
    teacher.config._attn_implementation = "memmix_record"
    seen = {}

    def hook(module, args, kwargs, output):
        seen["x"] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        seen["out"] = output[0]
        seen["rotary"] = kwargs.get("position_embeddings")

    handle = attention_module(teacher, layer).register_forward_hook(hook, with_kwargs=True)
    with torch.no_grad():
        teacher(torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1)))
    handle.remove()
    return seen


@pytest.mark.parametrize(("model_type", "options"), TEACHERS, ids=str)
def test_extracted_projections_are_what_the_attention_computes(model_type, options, recorder):
    teacher = tiny_teacher(model_type, layers=4, **options)
    for layer in (1, 3):  # some families have no rotation in every fourth layer
        recorder.clear()
        check_projections(teacher, layer, recorder)


@every_third("model_type", sorted(name for name, row in FAMILIES.items() if row.rotary is not None))
def test_kept_layers_without_rope_have_plain_queries_and_keys(model_type, recorder):
    """Of one of two kept layers, after the norms; the other one rotates as in the teacher."""
    teacher = tiny_teacher(model_type, layers=4)
    still, rotating = (0, 1) if layer_rotates(teacher.config, 0) else (1, 0)
    student = convert_model(teacher, "gka", keep=[0, 1], keep_without_rope=[still])
    assert student.config.attention_without_rope == [still]
    for layer in (still, rotating):
        recorder.clear()
        check_projections(student, layer, recorder, rotated=layer == rotating)


def check_projections(teacher, layer, recorder, rotated=True):
    seen = run_recorded(teacher, layer)
    weights = extract_attention(teacher, layer)
    query, key, value, mixed = recorder[layer]
    x = seen["x"]

    def project(role, heads):
        y = torch.nn.functional.linear(x, getattr(weights, f"{role}_weight"), getattr(weights, f"{role}_bias"))
        return y.unflatten(-1, (heads, weights.head_dim))

    eps = getattr(teacher.config, "rms_norm_eps", 1e-6)
    q = rms_norm(project("q", weights.num_heads), weights.q_norm, weights.head_dim, eps)
    k = rms_norm(project("k", weights.num_kv_heads), weights.k_norm, weights.head_dim, eps)
    v = project("v", weights.num_kv_heads)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(v.transpose(1, 2), value, **close)
    if rotated and weights.rotary is not None and layer_rotates(teacher.config, layer):
        q, k = (rotate(x, *seen["rotary"], weights.rotary) for x in (q, k))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if family_of(teacher.config).norm_last:  # only position 0 commutes
        q, k, query, key = (x[:, :, :1] for x in (q, k, query, key))
    # scores, not q and k: they do not depend on the order of a head's channels
    groups = weights.num_heads // weights.num_kv_heads
    scores = [a @ b.repeat_interleave(groups, 1).mT for a, b in ((q, k), (query, key))]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    out = torch.nn.functional.linear(mixed.flatten(-2), weights.o_weight, weights.o_bias)
    torch.testing.assert_close(out, seen["out"], **close)


@every_third(("model_type", "mixer"), list(itertools.product(sorted(FAMILIES), rotating_mixers())))
def test_converted_layers_have_the_scores_of_the_attention(model_type, mixer, recorder, monkeypatch):
    """Of q and k as they reach the mixer's memory, there of unit norm: normed, rotated or not as in that layer."""
    teacher = tiny_teacher(model_type, layers=4)
    student = convert_model(teacher, mixer, keep=[0, 2])
    module, received = sys.modules[MIXERS[mixer].scan.__module__], []
    ops = [name for name in vars(module) if name.startswith("chunk_")]
    assert len(ops) == 1, f"{module.__name__} imports {ops}; this test needs one chunk_... that gets q and k"
    op, real = ops[0], getattr(module, ops[0])
    monkeypatch.setattr(
        module, op, lambda q, k, *args, **kwargs: received.append((q, k)) or real(q, k, *args, **kwargs)
    )
    for layer in (1, 3):  # some families have no rotation in every fourth layer
        recorder.clear()
        seen = run_recorded(teacher, layer)
        with torch.no_grad():
            attention_module(student, layer)(seen["x"], position_embeddings=seen["rotary"])
        pairs = [tuple(t.transpose(1, 2) for t in received.pop()), recorder[layer][:2]]
        if FAMILIES[model_type].norm_last:  # only position 0 commutes
            pairs = [tuple(t[:, :, :1] for t in pair) for pair in pairs]
        scores = []
        for q, k in pairs:
            q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
            scores.append(q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_every_attention_tensor_has_a_source():
    for model_type in FAMILIES:
        teacher = tiny_teacher(model_type, layers=2)
        module = attention_module(teacher, 1)
        weights = extract_attention(teacher, 1)
        prefix = attention_prefix(teacher, 1)
        read = {name.removeprefix(prefix + ".") for names in weights.sources.values() for name in names}
        assert read == {name for name, _ in module.named_parameters()}
        assert set(weights.sources) == set(weights.tensors())


# a MusicGen without parts is refused by transformers 5.17
PARTS = {
    "musicgen": {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_decoder"},
    }
}


@pytest.mark.parametrize("kind", ["clip", "t5gemma", "musicgen", "qwen3_5"])
def test_a_part_that_cannot_be_converted_is_no_way_out(kind):
    """E.g. an encoder of text, a decoder that reads an encoder, and a language model with recurrent layers."""
    with pytest.raises(ValueError, match=f"'{kind}' is not supported; supported: .*llama"):
        family_of(AutoConfig.for_model(kind, **PARTS.get(kind, {})))


def test_unknown_family_and_unknown_tensor_are_refused():
    with pytest.raises(ValueError, match="'xglm' is not supported; supported: .*llama"):
        extract_attention(tiny_teacher("xglm"), 0)
    with pytest.raises(ValueError, match="'bloom' cannot be converted: its decoder does not pass padding"):
        extract_attention(tiny_teacher("bloom", num_key_value_heads=None), 0)
    assert not REFUSED.keys() & FAMILIES.keys()
    teacher = tiny_teacher("stablelm", qk_layernorm=True)
    with pytest.raises(ValueError, match="q_layernorm.*would be lost"):
        extract_attention(teacher, 0)
    with pytest.raises(ValueError, match="q_norm is not an RMSNorm"):
        extract_attention(tiny_teacher("cohere", use_qk_norm=True), 0)
    with pytest.raises(ValueError, match=r"clip_qkv=8.0 limits q, k and v, .* keep this layer as attention"):
        extract_attention(tiny_teacher("olmo", clip_qkv=8.0), 0)


@torch.no_grad()
def test_each_layer_keeps_its_own_scale_of_scores(tmp_path):
    """GPT-2 can divide the scores of layer i by i + 1; also where layers are converted one at a time."""
    teacher, ids = tiny_teacher("gpt2", scale_attn_by_inverse_layer_idx=True), torch.arange(3, 23)[None]
    teacher.save_pretrained(tmp_path / "teacher")
    convert_model(tmp_path / "teacher", "window", out=tmp_path / "student")
    expected = teacher(ids, use_cache=False).logits
    for student in (convert_model(teacher, "window"), load_model(tmp_path / "student")):
        torch.testing.assert_close(student(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_scale_of_q_by_position_is_told():
    """Of Ministral 3: nothing of it is in a converted layer."""
    teacher = tiny_teacher("ministral3")
    first = teacher.config.rope_parameters["original_max_position_embeddings"]
    with pytest.warns(UserWarning, match=f"from position {first} on, the teacher scales q"):
        convert_model(teacher, "window")
    teacher = tiny_teacher("ministral3", rope_parameters={**teacher.config.rope_parameters, "llama_4_scaling_beta": 0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_model(teacher, "window")
    assert not [line for line in caught if "scales q" in str(line.message)]


def test_extraction_copies():
    teacher = tiny_teacher("llama")
    weights = extract_attention(teacher, 0)
    before = attention_module(teacher, 0).q_proj.weight.detach().clone()
    weights.q_weight.zero_()
    torch.testing.assert_close(attention_module(teacher, 0).q_proj.weight, before, rtol=0, atol=0)
