"""A model that is loaded in 16 bits keeps exactly those parameters in fp32 that its mixers declare."""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hf_memmix
from hf_memmix.mixers import MemoryMixer
from hf_memmix.models import FAMILIES
from hf_memmix.swap import fp32_parameter_names
from testing import LAYERS, MIXERS, MODELS, build, family_fields, mixers_of, random_ids, tiny_config

# an option that adds a parameter in fp32
OPTIONS = {"coffee": {"use_output_filter": True}}


def converted(mixer):
    return build(tiny_config("llama", "odd", mixer, OPTIONS.get(mixer)))


def from_scratch(name):
    return build(FAMILIES[name](**family_fields(name)))


# a mixer without such parameters has nothing to keep
WITH_FP32 = [mixer for mixer in MIXERS if hf_memmix.MIXERS[mixer].fp32_parameters]
MODELS_BY_NAME = {f"converted-{mixer}": (converted, mixer) for mixer in WITH_FP32} | {
    f"scratch-{name}": (from_scratch, name) for name in MODELS
}


def declared(model):
    """Full names of the parameters that the mixers declare fp32, found by walking the modules."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, MemoryMixer)
        for name in module.fp32_parameters
        if hasattr(module, name)
    }


@torch.no_grad()
@pytest.mark.parametrize("which", MODELS_BY_NAME)
def test_exactly_the_declared_parameters_stay_in_fp32(which, tmp_path):
    """Loaded in 16 bits, saved in bf16, and loaded again as it was saved or in either 16-bit type."""
    make, name = MODELS_BY_NAME[which]
    model = make(name)
    expected, ids = declared(model), random_ids(1, 5)
    assert expected, "no mixer of this model has a parameter that its fp32_parameters names"
    model.save_pretrained(tmp_path / "fp32")
    model_class = type(model)
    model_class.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    loads = [(AutoModelForCausalLM, "auto"), (AutoModelForCausalLM, torch.float16), (model_class, torch.bfloat16)]
    for loader, dtype in loads:
        again = loader.from_pretrained(tmp_path / "bf16", dtype=dtype)
        wanted = torch.bfloat16 if dtype == "auto" else dtype
        wrong = {
            name: parameter.dtype
            for name, parameter in again.named_parameters()
            if parameter.dtype != (torch.float32 if name in expected else wanted)
        }
        assert not wrong, f"dtype={dtype}"
        for name in expected:
            assert torch.equal(again.get_parameter(name), model.get_parameter(name)), f"{name} was rounded"
        assert fp32_parameter_names(again) == expected
        assert again.dtype == wanted
        assert torch.isfinite(again(ids).logits).all()


def test_the_filter_of_coffee_is_declared():
    """It exists by option, and is as sensitive as the other parameters of the recurrence."""
    for used in (True, False):
        model = build(tiny_config("llama", "odd", "coffee", {"use_output_filter": used}))
        filters = {name for name in fp32_parameter_names(model) if name.endswith("w_filter")}
        assert len(filters) == (2 if used else 0)
    with_others = hf_memmix.memmix_config(tiny_config("llama").backbone_config(), ["coffee", *["gka"] * (LAYERS - 1)])
    names = fp32_parameter_names(build(with_others))
    assert {name.rpartition(".")[2] for name in names if ".0." in name} == {"lam_logit", "w", "C"}
    assert {name.rpartition(".")[2] for name in names if ".1." in name} == {"A_log", "dt_bias"}


def test_names_of_a_base_model_and_of_a_wrapper():
    """The names are those of the module that was asked about."""
    model = converted("ska")
    assert fp32_parameter_names(model.model) == {name.removeprefix("model.") for name in declared(model)}
    wrapper = torch.nn.ModuleDict({"student": model})
    assert fp32_parameter_names(wrapper) == {f"student.{name}" for name in declared(model)}
    mixer = mixers_of(model)[1]
    assert fp32_parameter_names(mixer) == {"gamma", "eta"}


CASTS = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to("cpu", torch.bfloat16),
    "wrapper": lambda model: get_peft_model(model, LoraConfig(target_modules=["lm_head"])).to(torch.float16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("mixer", WITH_FP32)
def test_a_cast_that_rounds_them_is_a_warning(mixer, cast):
    """torch casts all parameters; the result is another model than `from_pretrained(dtype=...)` gives."""
    model = converted(mixer)
    name = next(iter(declared(model))).rpartition(".")[2]
    with pytest.warns(UserWarning, match=rf"{name}.* rounded to torch\.(b?float16).*from_pretrained\(folder, dtype="):
        CASTS[cast](model)


def test_casts_that_round_nothing_are_silent(tmp_path):
    model = converted("gka")
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.double().float().to("cpu")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        loaded.to("cpu").float()
