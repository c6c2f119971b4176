"""Options after a model was built, and the bounds of every field of a configuration."""

import copy
import json
import math
import pickle
import random

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_memmix import MIXERS as MIXER_CLASSES
from hf_memmix import MemMixConfig, memmix_config
from hf_memmix.frozen import FrozenDict
from hf_memmix.models import FAMILIES
from testing import (
    LAYERS,
    MIXERS,
    MODELS,
    assert_same,
    backbone_config,
    build,
    family_fields,
    mixer_types,
    mixers_of,
    random_ids,
    tiny_config,
)

# another value of every option that may be changed at inference
CHANGEABLE = {
    "gka": {"solver_phases": [2, 1], "chunk_size": 4},
    "mamba2": {"chunk_size": 32},
}
CHANGEABLE["gka_beside_window"] = CHANGEABLE["gka"]
OTHER_VALUES = {name: CHANGEABLE.get(name, {}) for name in MIXERS}


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_inference_option_has_another_value(mixer):
    options = set(MIXER_CLASSES[mixer].options_class.inference_options)
    assert options == set(OTHER_VALUES[mixer]), f"write a row of {mixer} in CHANGEABLE: a value for {sorted(options)}"


# ---- read-only once a model was built

EDITS = {
    "an option": lambda c: c.mixers["gka"].update(chunk_size=4),
    "an option by item": lambda c: c.mixers["gka"].__setitem__("chunk_size", 4),
    "the options of a mixer": lambda c: c.mixers.__setitem__("gka", {}),
    "all options": lambda c: setattr(c, "mixers", {}),
    "the kind of a layer": lambda c: c.mixer_types.__setitem__(0, "gka"),
    "the number of layers": lambda c: c.mixer_types.append("gka"),
    "all kinds": lambda c: setattr(c, "mixer_types", ["gka"]),
    "no options": lambda c: delattr(c, "mixers"),
    "no kinds": lambda c: delattr(c, "mixer_types"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_after_building_are_refused(edit):
    """Otherwise the saved configuration would differ from the layers."""
    model = build(tiny_config("llama", "odd"))
    before = model.config.to_dict()
    for config in (model.config, copy.deepcopy(model).config, pickle.loads(pickle.dumps(model.config))):
        with pytest.raises(ValueError, match=r"set_mixer_options"):
            EDITS[edit](config)
        assert config.to_dict() == before


def test_edits_before_building_and_of_plain_copies_are_allowed(tmp_path):
    config = tiny_config("llama", "odd")
    config.mixers["gka"]["chunk_size"] = 16
    assert mixers_of(build(config))[1].options.chunk_size == 16
    model = build(config)
    fields = model.config.to_dict()
    fields["mixers"]["gka"]["chunk_size"] = 32
    assert MemMixConfig.from_dict(fields).mixers["gka"]["chunk_size"] == 32
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mixers"] == config.to_dict()["mixers"]


# ---- set_mixer_options


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
def test_set_mixer_options(mixer, tmp_path):
    """Layers and configuration change together: what is saved is what runs."""
    model, ids = build(tiny_config("llama", "odd", mixer)), random_ids(1, 30)
    for name, value in OTHER_VALUES[mixer].items():
        model.set_mixer_options(**{name: value})
        assert model.config.mixers[mixer][name] == value
        assert all(getattr(m.options, name) == value for m in mixers_of(model).values())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.mixers == model.config.mixers
    assert_same(again(ids).logits, model(ids).logits, tolerance=0)


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
def test_options_given_on_loading(mixer, tmp_path):
    """Those that are not named keep their values in the folder, and do not get the defaults of the mixer."""
    model, ids = build(tiny_config("llama", "odd", mixer)), random_ids(1, 30)
    model.save_pretrained(tmp_path)
    model.set_mixer_options(**OTHER_VALUES[mixer])
    given = {mixer: OTHER_VALUES[mixer]}
    config = AutoConfig.from_pretrained(tmp_path, mixers=given)
    assert config.mixers == model.config.mixers == MemMixConfig.from_pretrained(tmp_path, mixers=given).mixers
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path, mixers=given),
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config),
    ):
        assert again.config.mixers == model.config.mixers
        assert_same(again.eval()(ids).logits, model(ids).logits, tolerance=0)
    with pytest.raises(ValueError, match="unknown options"):
        build(AutoConfig.from_pretrained(tmp_path, mixers={mixer: {"no_option": 7}}))


@pytest.mark.parametrize("mixer", [mixer for mixer in MIXERS if OTHER_VALUES[mixer]])
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_models_of_one_configuration_have_options_of_their_own(auto, mixer):
    config = tiny_config("llama", "odd", mixer)
    models = [auto.from_config(config), AutoModelForCausalLM.from_config(config), auto.from_config(config)]
    ((name, value), *_) = OTHER_VALUES[mixer].items()
    unchanged = MIXERS[mixer].get(name, getattr(MIXER_CLASSES[mixer].options_class(), name))
    expected = [unchanged] * 3
    for i in (2, 0):
        models[i].set_mixer_options(**{name: value})
        expected[i] = value
        for model, wanted in zip(models, expected, strict=True):
            assert model.config.mixers[mixer][name] == model.base_model.config.mixers[mixer][name] == wanted
            assert all(getattr(m.options, name) == wanted for m in mixers_of(model).values())
    assert all(type(model.config.mixers) is FrozenDict for model in models)


@torch.no_grad()
def test_a_change_of_the_schedule_reaches_the_outputs():
    model, ids = build(tiny_config("llama", "odd")), random_ids(1, 30)
    before = model(ids).logits
    model.set_mixer_options("gka", solver_phases=[1])
    assert model.config.mixers["gka"]["solver_phases"] == [1]
    assert (model(ids).logits - before).abs().max() > 1e-4


@pytest.mark.parametrize("mixer", MIXERS)
def test_options_that_are_part_of_the_model_are_refused(mixer):
    """The error names the option, and nothing is changed."""
    model = build(tiny_config("llama", "odd", mixer))
    before, options_class = model.config.to_dict(), MIXER_CLASSES[mixer].options_class
    fixed = set(options_class().to_dict()) - set(options_class.inference_options)
    for name in fixed:
        with pytest.raises(ValueError, match=f"{name} of {mixer} is part of the model"):
            model.set_mixer_options(**OTHER_VALUES[mixer], **{name: model.config.mixers[mixer][name]})
    with pytest.raises(ValueError, match="no_such"):
        model.set_mixer_options(no_such=1)
    with pytest.raises(ValueError, match="no mixer 'other'"):
        model.set_mixer_options("other", chunk_size=4)
    for name in OTHER_VALUES[mixer]:
        with pytest.raises(ValueError, match=f"{name}={{}}"):
            model.set_mixer_options(**{name: {}})
    assert model.config.to_dict() == before


def test_one_option_of_two_mixers():
    kinds = ["gka", "mamba2", "attention", "lattice"]
    model = build(
        memmix_config(backbone_config("llama"), kinds, {name: MIXERS[name] for name in set(kinds) & set(MIXERS)})
    )
    model.set_mixer_options(chunk_size=32)
    assert [mixers_of(model)[i].options.chunk_size for i in (0, 1)] == [32, 32]
    model.set_mixer_options("gka", chunk_size=8)
    assert [model.config.mixers[name]["chunk_size"] for name in ("gka", "mamba2")] == [8, 32]


# ---- layers without a kind


@pytest.mark.parametrize("value", ("missing", None))
def test_a_file_that_does_not_name_the_mixers_is_refused(value, tmp_path):
    """Otherwise the model would load with attention in all layers."""
    tiny_config("llama", "odd").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    fields.pop("mixer_types") if value == "missing" else fields.update(mixer_types=value)
    file.write_text(json.dumps(fields))
    for kind in (AutoConfig, MemMixConfig):
        with pytest.raises(ValueError, match="mixer_types is (missing|null)"):
            kind.from_pretrained(tmp_path)


def test_no_kinds_in_memmix_config_are_written_out(tmp_path):
    config = memmix_config(backbone_config("llama"))
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mixer_types"] == ["attention"] * LAYERS


# ---- bounds

BAD = {
    "norm_eps": (0, math.nan, 1.0, -1e-6, "x", None),
    "conv_size": (0, 1, 17, 2.5, None, True),
    "chunk_size": (0, -1, 10**9, 64.0, "64", None, True),
    "ridge": (0, math.inf, math.nan, -1.0, [0.02]),
    "solver_phases": ([], [0], [10**9, 1], 8, [1.5], ["3"], [True], [1] * 9, None),
    "gamma_max": (0, 1e308, math.nan, None),
    "l1": (-1, 2.0, math.inf),
    "slots": (0, 129, 2.5, "all"),
    "states": (0, 65, True),
    "inner_size": (0, 10**12, 2.5),
    "rank": (0, 129, None),
    "power": (-1, 9),
    "eps": (0, math.inf, math.nan),
    "sigma_floor": (0, 1.1),
    "state_size": (0, 257),
    "head_dim": (0, 257),
    "expand": (0, math.inf, math.nan, 1e9),
    "n_groups": (0, 10**9),
    "half_lives": ([1], [2.0, 1.0], [0, 4], [1, math.inf], "x", ["a", "b"], 64),
    "time_step_limit": ([1], [2.0, 1.0], [0, math.inf], "x", ["a", "b"]),
    "refresh_every": (0, 7, "x"),
    "conv_activation": ("tanh", 5, {}),
    "qk_norm": ("all", 1, True),
    "rope_layout": ("other", None, []),
    "variant": ("other", None),
    "step_size": ("other", 0.1),
    "method": ("fast", None),
    "normalization": ("none", None),
    "sketch_dim": (0, -1, 2.5, "half"),
    "window": (0, 65537, 2.5, True),
    "local_window": (-1, 65537, 2.5, None, True),
    "sinks": (-1, 65, 2.5),
    "scale": (0, -1.0, math.inf, math.nan, "x"),
    "softcap": (0, -1.0, math.inf, math.nan),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_option_has_bounds(mixer):
    """Each option refuses what it cannot be, in one line with its name and value; flags take nothing but flags."""
    options_class = MIXER_CLASSES[mixer].options_class
    for name, default in options_class().to_dict().items():
        assert isinstance(default, bool) or name in BAD, f"write values that {name!r} must refuse in BAD"
        values = (0, 1, "yes", None) if isinstance(default, bool) else BAD[name]
        for value in values:
            with pytest.raises(ValueError) as caught:
                options_class.from_dict({name: value})
            message = str(caught.value)
            assert name in message and "\n" not in message and repr(value) in message, message


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("lattice", {"qk_norm": "head"}, "set share_qk to False"),
        (
            "gka",
            {"half_lives": [1, 2], "use_decay": False},
            r"half_lives=\[1, 2\] needs the forget gate",
        ),
        ("lattice", {"slots": 9}, "9 slots of size 8 cannot start orthogonal"),
        ("gka", {"sketch_dim": 9}, "layer 0: sketch_dim=9 is larger than the head size 8; set it to at most 8"),
        ("ska", {"refresh_every": 8}, "refresh_every=8 must be None, 1 or chunk_size=64"),
        ("ska", {"refresh_every": 1, "normalization": "sequence_max"}, "refresh_every=1 needs"),
        ("ska", {"rank": 7, "use_cg_lift": True}, "rank=7 must be even"),
        ("mamba2", {"chunk_size": 48}, r"chunk_size=48.*\(16, 32, 64, 128\)"),
        ("mamba2", {"head_dim": 48}, "layer 0: expand=.* features"),
        ("mamba2", {"n_groups": 3}, "layer 0: expand=.* features"),
        ("mamba2", {"expand": 0.01}, "layer 0: expand=.* features"),
    ],
)
def test_options_that_do_not_go_together(mixer, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        MIXER_CLASSES[mixer](memmix_config(backbone_config("llama"), mixer_types("first", mixer), {mixer: options}), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("hidden_size", 0),
        ("vocab_size", -1),
        ("intermediate_size", 0),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", math.nan),
        ("hidden_act", "sulu"),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 10000.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0.0}),
    ],
)
def test_sizes_of_a_family(name, field, value):
    """A configuration that no model can be built from is refused with the field's name, by either way to make it."""
    fields = {**family_fields(name), field: value}
    for make in (lambda: FAMILIES[name](**fields), lambda: FAMILIES[name].from_dict(fields)):
        with pytest.raises(ValueError, match=f"{field}") as caught:
            make()
        assert "\n" not in str(caught.value)


JUNK = (0, -1, 10**9, 1.5, math.nan, math.inf, 1e308, "", "x", None, True, [], [0], [10**9, 1], {}, {"x": 1}, [None])


def mutated(fields, rng):
    """A copy of a configuration's fields with one or two of them changed, and the names of those."""
    fields = copy.deepcopy(fields)
    names = []
    for _ in range(rng.choice((1, 1, 2))):
        options = [value for value in fields["mixers"].values() if isinstance(value, dict)]
        place = rng.choice(options) if options and rng.random() < 0.6 else fields
        names.append(rng.choice(sorted(set(place) - LEFT_ALONE)))
        place[names[-1]] = copy.deepcopy(rng.choice(JUNK))
        if names[-1] == "mixers":
            break
    return fields, names


# they choose the class that reads the rest; the library itself reads id2label, with a message of its own
LEFT_ALONE = {
    "id2label",
    "model_type",
    "backbone_model_type",
    "transformers_version",
    "auto_map",
    "architectures",
    "dtype",
}


def test_mutated_configurations_load_or_name_the_field():
    """1,000 configurations with wrong values: each loads or raises a ValueError of one line that names the field."""
    rng, refused = random.Random(0), 0
    valid = [tiny_config("llama", "odd", mixer).to_dict() for mixer in MIXERS]
    valid += [FAMILIES[name](**family_fields(name)).to_dict() for name in MODELS]
    for number in range(1000):
        fields, names = mutated(rng.choice(valid), rng)
        kind = (
            MemMixConfig if fields["model_type"] == "memmix" else AutoConfig.for_model(fields["model_type"]).__class__
        )
        try:
            kind.from_dict(fields)
        except ValueError as error:
            refused += 1
            message = str(error)
            assert any(name in message for name in names), f"{number}: {names}: {message}"
            assert "\n" not in message, f"{number}: {message}"
    assert refused > 400, "most of these are wrong"
