"""Learning rate and weight decay of every parameter, by the recipe's patterns for the names of the parameters."""

import re

from torch import nn

from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.conversion.mixer_layout import WINDOW
from hf_memmix.errors import UserError
from hf_memmix.mixers.weight_decay import no_weight_decay_names
from hf_memmix.training.recipe import Recipe


def parameter_rates(student: nn.Module, recipe: Recipe) -> dict[str, tuple[float, float]]:
    """`{parameter name: (learning rate, weight decay)}`. Raises ValueError if a pattern decides for no parameter.

    Parameters that steer a memory (`no_weight_decay_names`) have no weight decay, unless a group gives them one.
    """
    spared = no_weight_decay_names(student)
    mixers = {}
    for layer in student.config.memory_layers:
        factor = recipe.window_rate if student.config.mixer_types[layer] == WINDOW else 1.0
        mixers |= {id(p): factor * recipe.learning_rate for p in attention_module(student, layer).parameters()}
    used, result = set(), {}
    for name, parameter in student.named_parameters():
        values = {
            "learning_rate": mixers.get(id(parameter), recipe.rest_learning_rate),
            "weight_decay": 0.0 if name in spared else recipe.weight_decay,
        }
        for row in recipe.groups:
            if re.search(row["match"], name):
                used.add(row["match"])
                values |= {key: value for key, value in row.items() if key != "match"}
                break
        result[name] = values["learning_rate"], values["weight_decay"]
    if unused := [row["match"] for row in recipe.groups if row["match"] not in used]:
        raise UserError(
            f"group {unused[0]!r} matches no parameter, or only those that earlier groups match; names look like"
            f" {', '.join(list(result)[:3])}"
        )
    return result


def freeze_by_rate(student: nn.Module, recipe: Recipe) -> dict[str, tuple[float, float]]:
    """`parameter_rates`; parameters with learning rate 0 are frozen. Raises ValueError if all are frozen."""
    result = parameter_rates(student, recipe)
    for name, parameter in student.named_parameters():
        if result[name][0] == 0:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise UserError("every learning rate of the recipe is 0; nothing would be trained")
    return result


def check_each_is_trained(student: nn.Module, layers: list[int], recipe: Recipe) -> None:
    """Raise ValueError if the mixer of one of these layers would not be trained at all."""
    rates = parameter_rates(student, recipe)
    for layer in layers:
        own = attention_module(student, layer).named_parameters(attention_prefix(student, layer))
        if not any(rates[name][0] for name, _ in own):
            raise UserError(
                f"every learning rate of layer {layer} is 0, so its mixer would not be trained; leave the layer out"
                " (layers), or correct the rates and groups of the recipe"
            )


def refuse_shared(student: nn.Module, teacher: nn.Module) -> None:
    """Raise ValueError if a parameter that is trained is also used by the teacher."""
    theirs = {id(parameter) for parameter in teacher.parameters()}
    for name, parameter in student.named_parameters():
        if parameter.requires_grad and id(parameter) in theirs:
            raise UserError(
                f"a group trains {name}, but the teacher uses the same tensor; give it the rate 0.0, or set teacher to"
                " lora"
            )


def optimizer_groups(student: nn.Module, parameters: list[nn.Parameter], by_name: dict) -> list[dict]:
    """Parameter groups of an optimizer for those of `parameters` that are trained, with the largest rate first."""
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    groups: dict[tuple[float, float], list] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(by_name[names[id(parameter)]], []).append(parameter)
    return [
        {"params": params, "lr": rate, "weight_decay": decay}
        for (rate, decay), params in sorted(groups.items(), reverse=True, key=lambda item: item[0])
    ]
