"""Weight decay spares the parameters that steer a memory, under recipes and under the Trainer."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_memmix import no_weight_decay_names, spare_from_decay
from hf_memmix.mixers import KoopmanMLP
from hf_memmix.models.coffee_core import CoffeeCore
from hf_memmix.swap import fp32_parameter_names, memory_mixers
from hf_memmix.training.groups import optimizer_groups, parameter_rates
from hf_memmix.training.recipe import Recipe
from testing import MIXERS, build, tiny_config

# parameters of a mixer that are neither matrices of a layer nor its norms, biases and taps
STEERING = {
    "gka": {"A_log", "dt_bias"},
    "ska": {"gamma", "eta"},
    "coffee": {"lam_logit", "w", "C"},
    "lattice": {"S0"},
    "mamba2": {"A_log", "D", "dt_bias"},
    "gated_delta": {"A_log", "dt_bias"},
    "kda": {"A_log", "dt_bias"},
}


@pytest.fixture(params=MIXERS)
def model(request):
    options = {"sink_logits": True} if request.param == "window" else {}  # else it has no parameter that steers
    return build(tiny_config("llama", (0, 1), request.param, options))


def marked(model):
    return {name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}


def test_steering_parameters_are_spared(model):
    names = no_weight_decay_names(model)
    for mixer in memory_mixers(model).values():
        own = {name for name, parameter in mixer.named_parameters() if "." not in name and name != "sketch"}
        assert own == STEERING.get(mixer.name, own) and own == set(mixer.no_weight_decay) & {*mixer._parameters}
    assert fp32_parameter_names(model) <= names


def test_the_mark_lasts(model, tmp_path):
    names = no_weight_decay_names(model)
    model.save_pretrained(tmp_path)
    config = model.config
    with torch.device("meta"):
        empty = type(model)(config)
    for other in (
        model,
        AutoModelForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        empty,
        empty.to_empty(device="cpu"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(memory_mixers(model)[0])),
        copy.deepcopy(model).to(torch.float64),
    ):
        assert marked(other) == no_weight_decay_names(other) != set()
        assert other is not model or marked(other) == names


def test_a_recipe_decays_the_other_parameters(model):
    names = no_weight_decay_names(model)
    rates = parameter_rates(model, Recipe(stage="distill", weight_decay=0.1))
    assert {name: decay for name, (_, decay) in rates.items()} == {name: 0.1 * (name not in names) for name in rates}
    groups = optimizer_groups(model, list(model.parameters()), rates)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for name, p in model.named_parameters() if name not in names}
    rows = [{"match": names.copy().pop().rpartition(".")[2] + "$", "weight_decay": 0.2}]
    rates = parameter_rates(model, Recipe(stage="distill", weight_decay=0.1, groups=rows))
    assert any(decay == 0.2 and name in names for name, (_, decay) in rates.items()), "a group that names it decides"


def test_the_trainer_decays_what_it_did_but_the_memory(model, tmp_path):
    names = no_weight_decay_names(model)
    arguments = TrainingArguments(tmp_path, weight_decay=0.1, report_to="none", use_cpu=True)
    before = {*Trainer(model, arguments).get_decay_parameter_names(model)}
    trainer = spare_from_decay(Trainer(model, arguments))
    assert {*trainer.get_decay_parameter_names(model)} == before - names and before & names
    optimizer = trainer.create_optimizer()
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    by_name = dict(model.named_parameters())
    assert decayed == {id(by_name[name]) for name in before - names}
    with pytest.raises(ValueError, match="has an optimizer already; call spare_from_decay before train"):
        spare_from_decay(trainer)


def test_modules_outside_the_mixers():
    assert no_weight_decay_names(KoopmanMLP(8, 4)) == {"spectrum"}
    core = CoffeeCore(symbols=5, dim=2, states=1, output_filter=True)
    assert no_weight_decay_names(core) == marked(core) == {"lam", "w", "C", "w_filter"}
