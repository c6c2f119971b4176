"""A teacher that needs no second copy of the weights.

Student and teacher differ only in the attention of converted layers. With `share_weights`, the teacher uses all other
tensors of the student, which are frozen. `add_lora` adds low-rank corrections (LoRA, arXiv:2106.09685) to them, which
only the student uses. The corrections are added to the weights when the student is saved.
"""

import torch
from torch import Tensor, nn

from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.conversion.teacher_forcing import converted_layers

ADAPTER = "memmix"


@torch.no_grad()
def share_weights(student: nn.Module, teacher: nn.Module) -> int:
    """Let the teacher use the student's parameters outside the converted attention; returns their number.

    Raises:
        ValueError: the values of one of them differ, because more than the mixers of the student was trained.
    """
    teacher.to(student.dtype)
    replaced = tuple(attention_prefix(student, layer) + "." for layer in converted_layers(student))
    shared = 0
    for name, own in list(teacher.named_parameters(remove_duplicate=False)):
        if name.startswith(replaced):
            continue
        parent, _, key = name.rpartition(".")
        parameter = student.get_parameter(name)
        if not torch.equal(own, parameter):
            raise ValueError(
                f"{name} differs between student and teacher, so they cannot share it; use teacher: copy for a student"
                " of which more than the mixers was trained"
            )
        teacher.get_submodule(parent)._parameters[key] = parameter
        shared += 1
    return shared


@torch.no_grad()
def unshare_weights(student: nn.Module, teacher: nn.Module) -> None:
    """Give the teacher copies of the tensors that it shares with the student."""
    ours = {id(parameter) for parameter in student.parameters()}
    copies: dict[int, nn.Parameter] = {}  # tied tensors stay tied
    for module in teacher.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in ours:
                copy = copies.setdefault(id(parameter), nn.Parameter(parameter.clone(), requires_grad=False))
                module._parameters[key] = copy


def add_lora(student: nn.Module, rank: int, seed: int = 0) -> None:
    """Freeze everything except the mixers, and add a trainable correction of this rank to all other linear layers.

    The output projection gets no correction.
    """
    from peft import LoraConfig, inject_adapter_in_model

    mixers = {id(m) for layer in converted_layers(student) for m in attention_module(student, layer).modules()}
    head = student.get_output_embeddings()
    targets = [
        name
        for name, module in student.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and id(module) not in mixers and module is not head
    ]
    student.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
        inject_adapter_in_model(config, student, adapter_name=ADAPTER)
    for layer in converted_layers(student):
        attention_module(student, layer).requires_grad_(True)


def lora_layers(student: nn.Module) -> dict[str, nn.Module]:
    """The layers with a correction, by name."""
    return {name: m for name, m in student.named_modules() if ADAPTER in getattr(m, "lora_A", {})}


def without_lora(student: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a student, with its LoRA corrections, if there are any, added to the weights."""
    layers = lora_layers(student)
    if not layers:
        return state
    plain = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        module, _, kind = name.rpartition(".base_layer.")
        if module in layers and kind == "weight":
            a, b = (state[f"{module}.lora_{x}.{ADAPTER}.weight"] for x in "AB")
            delta = (b @ a) * layers[module].scaling[ADAPTER]
            tensor = tensor + (delta.T if layers[module].fan_in_fan_out else delta).to(tensor.dtype)
        plain[name.replace(".base_layer.", ".")] = tensor
    return plain


@torch.no_grad()
def merge_lora(student: nn.Module) -> None:
    """Add the corrections to the weights of the student, in place. The shared tensors of the teacher do not change."""
    state = without_lora(student, student.state_dict())
    for name, layer in lora_layers(student).items():
        parent, _, key = name.rpartition(".")
        layer.base_layer.weight = nn.Parameter(state[f"{name}.weight"])
        setattr(student.get_submodule(parent), key, layer.base_layer)
