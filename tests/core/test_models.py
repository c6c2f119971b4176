"""Families trained from scratch: presets, files, and the same checks as everybody."""

import functools
import itertools
import json
import pickle

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

import hf_memmix
from core.checks import CHECKS, check_assistant, check_gradient_checkpointing
from hf_memmix.models import FAMILIES as REGISTERED
from testing import MODELS, assert_same, build, every_third, family_fields, random_ids, randomize

every_family = pytest.mark.parametrize("name", MODELS)
LAYOUTS = [(name, layout) for name, row in MODELS.items() for layout in row["layouts"]]
PRESETS = [(name, preset) for name, row in MODELS.items() for preset in row["presets"]]


def tiny(name, layout=None):
    further = {} if layout is None else MODELS[name]["layouts"][layout]
    config = REGISTERED[name](**{**family_fields(name), **further})
    return randomize(getattr(hf_memmix, f"{name}ForCausalLM")(config)).eval()


@functools.cache
def tiny_in_float64(name, layout):
    return tiny(name, layout).double()


def rows_of_checks():
    """All pairs of a check and a family; the layouts of the family come in turn."""
    for (i, check), (j, name) in itertools.product(enumerate(CHECKS), enumerate(MODELS)):
        layouts = [*MODELS[name]["layouts"]]
        yield check, name, layouts[(i + j) % 4 % len(layouts)]


@every_third(("check", "name", "layout"), list(rows_of_checks()))
def test_check(check, name, layout):
    CHECKS[check](tiny_in_float64(name, layout))


@every_third(("name", "layout"), LAYOUTS)
def test_assistant(name, layout):
    model = tiny_in_float64(name, layout)
    check_assistant(model, build(model.config, seed=1, dtype=torch.float64))


@every_family
def test_gradient_checkpointing(name):
    check_gradient_checkpointing(tiny(name).double())


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_presets(name, preset):
    """Sizes of the paper; the number of parameters is near the stated one."""
    config = REGISTERED[name].preset(preset)
    layers, hidden, stated = MODELS[name]["presets"][preset]
    assert (config.num_hidden_layers, config.hidden_size) == (layers, hidden)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert 0.85 * stated < count < 1.2 * stated, f"{count / 1e9:.2f} B"
    config = REGISTERED[name].preset(preset, **family_fields(name), attention_layers=[2])
    assert config.hidden_size == 32
    assert config.mixer_types[2] == "attention"


def test_lattice_has_110m_parameters_pure_and_hybrid():
    """As the models of the paper's Table 2: the preset, its variants and hybrids, and the transformer of its shape."""
    config = hf_memmix.LatticeConfig
    shape = {name: value for name, value in config.presets["110m"].items() if name != "mixers"}
    configs = [config.preset("110m", attention_layers=kept) for kept in ([], [5], [2, 5, 8, 11], [*range(1, 12, 2)])]
    configs += [config.preset("110m", mixers={"lattice": {"variant": variant}}) for variant in ("enc", "sim")]
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(of) for of in [*configs, LlamaConfig(**shape)]]
    assert {round(model.num_parameters() / 1e6) for model in models} == {110}


def test_every_family_has_a_row():
    """And every preset."""
    presets = {name: row["presets"].keys() for name, row in MODELS.items()}
    assert {name: family.presets.keys() for name, family in REGISTERED.items()} == presets


@every_family
def test_refusals(name):
    config_class = REGISTERED[name]
    with pytest.raises(ValueError, match="'7t'.*" + min(config_class.presets)):
        config_class.preset("7t")
    with pytest.raises(ValueError, match=r"9.*3 layers"):
        config_class(**family_fields(name), attention_layers=[9])
    with pytest.raises(ValueError, match="no_mixer"):
        config_class(**family_fields(name), mixer_types=["no_mixer"] * 3)


@every_family
def test_default_initialisation(name):
    """The loss of an untrained model is that of a uniform guess."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(REGISTERED[name](**family_fields(name)))
    ids = random_ids(4, 20)
    loss = model(input_ids=ids, labels=ids).loss
    assert abs(loss.item() - torch.tensor(float(model.config.vocab_size)).log().item()) < 0.2


@torch.no_grad()
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_files(name, layout, tmp_path):
    """Each family has its own model type and classes, which Auto classes load and pickle supports."""
    model, ids = tiny(name, layout), random_ids(1, 7)
    base_class, model_class = (getattr(hf_memmix, name + head) for head in ("Model", "ForCausalLM"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == REGISTERED[name].model_type
    assert isinstance(AutoConfig.from_pretrained(tmp_path), REGISTERED[name])
    for kind in (AutoModelForCausalLM, model_class):
        again = kind.from_pretrained(tmp_path)
        assert type(again) is model_class
        assert isinstance(again.config, model_class.config_class)
        assert_same(again(ids).logits, model(ids).logits, tolerance=0)
    for kind in (AutoModel, base_class):
        assert type(kind.from_pretrained(tmp_path)) is base_class
    assert pickle.loads(pickle.dumps(model_class)) is model_class
