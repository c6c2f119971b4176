"""MemMixConfig and what it refuses."""

import json
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_memmix
from hf_memmix import MemMixConfig, MemMixForCausalLM, MemMixModel, memmix_config
from hf_memmix.mixers import MIXERS as MIXER_CLASSES
from testing import (
    FAMILIES,
    LAYERS,
    MIXERS,
    assert_same,
    backbone_config,
    build,
    mixer_types,
    mixers_of,
    random_ids,
    tiny_config,
    tiny_model,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, tmp_path):
    """config.json is the backbone's fields, flat, plus three; reading it gives the same configuration."""
    config = tiny_config(family, "odd")
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "memmix"
    assert fields["backbone_model_type"] == family
    assert fields["mixer_types"] == ["attention", "gka", "attention", "gka"]
    assert fields["mixers"]["gka"].items() >= MIXERS["gka"].items()
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    own = {"auto_map": None, "_name_or_path": None}
    assert again.to_dict() | own == config.to_dict() | own
    assert isinstance(again, type(backbone_config(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_model_stays_the_family_s_own(family):
    """A generated model is an instance of the native class, with the mixers where they belong and nowhere else."""
    model, native = tiny_model(family, "odd"), tiny_model(family, None)
    assert isinstance(model, type(native))
    assert isinstance(model, MemMixForCausalLM)
    assert sorted(mixers_of(model)) == [1, 3]
    replaced = [f".{i}." for i in (1, 3)]
    kept = {name for name in native.state_dict() if not any(r in name for r in replaced)}
    assert kept <= set(model.state_dict())


def test_no_layer_replaced_is_the_native_model():
    native = tiny_model("qwen3", None)
    config = memmix_config(native.config, mixer_types=["attention"] * LAYERS)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(native.state_dict())
    model.double().eval()
    assert_same(model(random_ids(1, 7)).logits, native(random_ids(1, 7)).logits, tolerance=0)


def test_generic_entry_points(tmp_path):
    model = build(tiny_config("llama", "odd"))
    model.save_pretrained(tmp_path)
    ids = random_ids(1, 5)
    assert isinstance(MemMixConfig.from_pretrained(tmp_path), LlamaConfig)
    loaded = MemMixForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LlamaForCausalLM)
    assert_same(loaded(ids).logits, model(ids).logits, tolerance=0)
    hidden = [kind.from_pretrained(tmp_path)(ids).last_hidden_state for kind in (MemMixModel, AutoModel)]
    assert_same(*hidden, tolerance=0)


@pytest.mark.parametrize(
    ("named", "phases"),
    [
        ({}, [12, 10]),
        ({"solver_phases": [7]}, [7]),
        ({"solver_phases": [5, 4]}, [5, 4]),
    ],
)
def test_schedule_of_the_solver(named, phases):
    """Read from a keyword as from a file."""
    config = memmix_config(backbone_config("llama"), mixer_types=mixer_types("first"), mixers={"gka": dict(named)})
    again = memmix_config(config, mixer_types=mixer_types("first"), mixers=json.loads(json.dumps(config.mixers)))
    for one in (config, again):
        assert one.mixers["gka"]["solver_phases"] == phases
        assert mixers_of(build(one))[0]._solver()["refinement"] == tuple(phases)


def test_public_names():
    assert not [name for name in hf_memmix.__all__ if not hasattr(hf_memmix, name)]
    with pytest.raises(AttributeError, match="no_such"):
        _ = hf_memmix.no_such


def test_a_mixer_without_parameters_of_its_own_is_initialised():
    """The library takes it for initialised; deterministic mode fills fresh memory with NaN."""
    config = tiny_config("llama", "all", options={"use_decay": False})
    torch.use_deterministic_algorithms(True)
    try:
        model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name


@pytest.mark.parametrize("family", ("llama", "gpt2", "gpt_neox"))
def test_generated_classes_pickle(family):
    model = tiny_model(family, "first")
    for value in (type(model), type(model.config)):
        assert pickle.loads(pickle.dumps(value)) is value
    config = pickle.loads(pickle.dumps(model.config))
    assert config.to_dict() == model.config.to_dict()
    fresh = build(model.config)  # hooks that a request for hidden states leaves behind do not pickle
    again = pickle.loads(pickle.dumps(fresh))
    assert_same(again(random_ids(1, 5)).logits, fresh(random_ids(1, 5)).logits, tolerance=0)


# ---- refusals: the message names the value and the way out


def refuses(match, **kwargs):
    with pytest.raises(ValueError, match=match):
        memmix_config(**{"backbone_config": backbone_config("llama"), "mixer_types": mixer_types("first"), **kwargs})


def test_unknown_names():
    refuses(r"'gkaa'.*'gka'", mixer_types=["gkaa", *["attention"] * 3])
    refuses(r"'gkaa'.*'gka'", mixers={"gkaa": {}})
    refuses(r"solver_phase'.*solver_phases", mixers={"gka": {"solver_phase": [30]}})
    refuses("options are 5", mixers={"gka": 5})


def test_options_of_a_window_beside_a_memory_are_saved(tmp_path):
    """A default that changes later does not change a saved model."""
    for given, sinks in (({}, 1), ({"window": {"sinks": 0}}, 0)):
        config = memmix_config(backbone_config("llama"), ["gka"] * LAYERS, {"gka": {"local_window": 4}} | given)
        config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["mixers"]["window"]["sinks"] == sinks
        (window, *_) = (mixer.window for mixer in mixers_of(AutoModelForCausalLM.from_config(config)).values())
        assert (window.options.sinks, window.options.window) == (sinks, 4)


def test_options_of_a_mixer_that_no_layer_has():
    """They are checked and completed, as a later model of the same configuration may use them."""
    config = memmix_config(backbone_config("llama"), ["gka"] * LAYERS, {"lattice": {"slots": 5}})
    assert config.mixers["lattice"] == MIXER_CLASSES["lattice"].options_class(slots=5).to_dict()
    refuses(r"mixers\['lattice'\].*gamma_max", mixers={"lattice": {"gamma_max": -1.0}})
    refuses(r"mixers\['lattice'\].*no_option", mixers={"lattice": {"no_option": 1}})


@pytest.mark.parametrize(
    ("mixer", "fields", "match"),
    [
        ("gka", {"head_dim": 512}, "512.*256"),
        ("ska", {"head_dim": 264}, "head size 264 of layer 0 is over the limit of ska, 256"),
        ("gka", {"head_dim": 8, "num_key_value_heads": 3}, "4.*3"),
    ],
)
def test_heads_that_a_mixer_cannot_have(mixer, fields, match):
    with pytest.raises(ValueError, match=match):
        build(tiny_config("llama", "first", mixer, **fields))


@pytest.mark.parametrize("kind", ("t5", "bert", "clip", "mamba", "mamba2", "qwen3_next", "gemma3", "bamba", "rwkv"))
def test_backbones_that_are_not_supported(kind):
    """Encoders, encoder-decoders, multimodal wrappers, models that are recurrent already."""
    config = AutoConfig.for_model(kind)
    layers = getattr(config, "num_hidden_layers", 2)
    with pytest.raises(ValueError, match="(?i)" + kind.replace("_", "_?") + ".*not supported"), torch.device("meta"):
        AutoModelForCausalLM.from_config(memmix_config(config, mixer_types=["gka"] * layers))


@pytest.mark.parametrize(
    ("kind", "field", "reason"),
    [
        ("llama", "is_causal", "each token also reads the tokens after it"),
        ("gemma3_text", "use_bidirectional_attention", "each token also reads the tokens after it"),
        ("gpt2", "add_cross_attention", "its layers also read the output of an encoder"),
    ],
)
def test_decoders_that_read_more_than_the_tokens_before_are_refused(kind, field, reason):
    """E.g. EmbeddingGemma, an encoder made from a decoder, and the decoder of an encoder-decoder model."""
    types = mixer_types("first")
    with pytest.raises(ValueError, match=reason):
        memmix_config(backbone_config(kind, **{field: field != "is_causal"}), mixer_types=types)
    assert memmix_config(backbone_config(kind, **{field: field == "is_causal"}), mixer_types=types)


def test_config_without_backbone():
    with pytest.raises(ValueError, match="backbone_model_type"):
        MemMixConfig.from_dict({"model_type": "memmix"})
    with pytest.raises(ValueError, match=r"backbone_model_type.*no_such"):
        MemMixConfig.from_dict({"model_type": "memmix", "backbone_model_type": "no_such"})
    with pytest.raises(ValueError, match=r"backbone_model_type.*llama"):
        MemMixConfig.from_dict({"model_type": "memmix", "backbone_model_type": ["llama"]})


def test_edited_config_json(tmp_path):
    tiny_config("llama", "first").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"mixer_types": ["gka"] * 3}))
    with pytest.raises(ValueError, match="3 entries.*4 layers"):
        AutoConfig.from_pretrained(tmp_path)


# ---- forward


def boundaries(*places):
    return torch.tensor(places, dtype=torch.int32)


def first_is_zero(*shape):
    return torch.ones(shape, dtype=torch.long).index_fill(-1, torch.tensor(0), 0)


@pytest.mark.parametrize(
    ("rows", "inputs", "match"),
    [
        *(
            (2, {"memmix_mask": first_is_zero(*s)}, r"memmix_mask.*expected \[2, 6\]")
            for s in ((2, 1), (2, 5), (1, 6))
        ),
        *(
            (2, {name: torch.zeros(2, 6).index_fill(1, torch.tensor(0), hidden).to(dtype)}, f"{name} has negative")
            for name in ("attention_mask", "memmix_mask")
            for hidden, dtype in ((-torch.inf, torch.float32), (torch.nan, torch.float32), (-10_000, torch.long))
        ),
        # without a zero, as of one decoded token
        *((2, {name: torch.full((2, 6), -1)}, f"{name} has negative") for name in ("attention_mask", "memmix_mask")),
        (2, {"cu_seq_lens_q": boundaries(0, 12)}, "start of every row"),
        (1, {"cu_seq_lens_q": boundaries(0, 2, 5)}, "cu_seq_lens_q.*5"),
        (1, {"cu_seq_lens_q": boundaries(1, 2, 6)}, "cu_seq_lens_q.*1"),
        (1, {"cu_seq_lens_q": boundaries(0, 4, 2, 6)}, "cu_seq_lens_q"),
        (1, {"cu_seq_lens_q": boundaries()}, "cu_seq_lens_q"),
        (1, {"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}, "seq_idx.*5.*6"),
        (1, {"input_ids": None}, "either input_ids or inputs_embeds"),
    ],
)
def test_wrong_inputs(rows, inputs, match):
    with pytest.raises(ValueError, match=match):
        tiny_model("llama", "all")(**{"input_ids": random_ids(rows, 6), "use_cache": False, **inputs})


@pytest.mark.parametrize("layout", ("first", "all"))
def test_inputs_of_the_wrong_shape(layout):
    model, ids = tiny_model("llama", layout), random_ids(2, 6)
    for shape in ((2, 5), (2, 7), (3, 6), (1, 6), (2, 6, 6)):
        for mask in (torch.ones(shape, dtype=torch.long), torch.ones(shape, dtype=torch.long).triu()):
            with pytest.raises(ValueError, match=r"(?i)mask.*\D" + str(shape[0])):
                model(ids, attention_mask=mask)
    for rows, tokens in ((0, 5), (2, 0), (0, 0)):
        with pytest.raises(ValueError, match=f"has no tokens: {rows} rows of {tokens}"):
            model(torch.zeros(rows, tokens, dtype=torch.long))
    # with a cache the mask covers what is cached, too
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"(?i)mask.*3.*9"):
        model(ids[:, :3], attention_mask=first_is_zero(2, 3), past_key_values=cache)


@pytest.mark.parametrize("attention", ("eager", "sdpa"))
def test_positions_that_contradict_the_boundaries(attention):
    """The mixers would follow `cu_seq_lens_q`, the attention that was kept the positions."""
    model = tiny_model("llama", "odd", fresh=True)
    model.set_attn_implementation(attention)
    packed = {"use_cache": False, "cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32)}
    model(random_ids(1, 6), **packed)
    with pytest.raises(ValueError, match="across packed sequences"):
        model(random_ids(1, 6), position_ids=torch.arange(6)[None], **packed)


def test_decoder_that_drops_keyword_arguments(monkeypatch):
    """Its mixers would silently take pads for tokens."""
    model = tiny_model("llama", "all", fresh=True)
    layer = type(model.model.layers[0])
    forward = layer.__call__
    monkeypatch.setattr(layer, "__call__", lambda self, x, memmix_layout, **kwargs: forward(self, x, **kwargs))
    with pytest.raises(ValueError, match="drops further keyword arguments"):
        model(random_ids(1, 6))


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_input_that_is_not_finite(value):
    """A memory would carry it to the end of the text, and a saved state beyond."""
    model = tiny_model("llama", "first")
    embeds = model.get_input_embeddings()(random_ids(2, 6)).detach()
    embeds[1, 4, 3] = value
    with pytest.raises(ValueError, match=r"inputs_embeds.*row 1.*token 4"):
        model(inputs_embeds=embeds)
