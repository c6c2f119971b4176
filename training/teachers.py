"""A teacher that needs no second copy of the weights.

Student and teacher differ only in the memory layers. With `share_weights`, the teacher uses all other
tensors of the student, which are frozen. `add_lora` adds low-rank corrections (LoRA, arXiv:2106.09685) to them, which
only the student uses. The corrections are added to the weights when the student is saved. Between the two,
`quantize_frozen` can hold the frozen matrices in 4 or 8 bit.
"""

import torch
from torch import Tensor, nn

from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.errors import UserError
from hf_memmix.training.quantized import is_quantized, plain_weight, quantized_linear

ADAPTER = "memmix"
LINEAR = ("Linear", "Linear4bit", "Conv1D")  # classes of linear layers; the last one is that of GPT-2


@torch.no_grad()
def share_weights(student: nn.Module, teacher: nn.Module) -> int:
    """Let the teacher use the student's parameters outside the converted attention; returns their number.

    Raises:
        ValueError: the values of one of them differ, because more than the mixers of the student was trained.
    """
    teacher.to(student.dtype)
    replaced = tuple(attention_prefix(student, layer) + "." for layer in student.config.memory_layers)
    shared = 0
    for name, own in list(teacher.named_parameters(remove_duplicate=False)):
        if name.startswith(replaced):
            continue
        parent, _, key = name.rpartition(".")
        parameter = student.get_parameter(name)
        if not torch.equal(own, parameter):
            raise UserError(
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


def quantize_frozen(
    student: nn.Module,
    teacher: nn.Module,
    quantize: str,
    compute_dtype: torch.dtype,
    mixers: bool = False,
    device: torch.device | None = None,
) -> int:
    """Hold the frozen matrices in 4 or 8 bit: those that student and teacher share, and the teacher's own attention.

    Call it after `share_weights`. Both models then use the same quantised layers. Embeddings and the output projection
    keep their dtype.

    Args:
        quantize: "4bit" or "8bit".
        compute_dtype: in which the layers compute, e.g. torch.bfloat16.
        mixers: also the student's matrices that `add_lora(mixers=True)` corrects.
        device: where the matrices are rounded and stay, by default where they are.

    Returns the number of quantised layers. Raises ValueError if the family has no nn.Linear layers.
    """
    quantized: dict[int, nn.Module] = {}  # by the id of the weight, which both models hold
    frozen = {id(student.get_submodule(name)) for name in lora_names(student, mixers)}
    for model in (student, teacher):
        head = model.get_output_embeddings()
        for name, layer in list(model.named_modules()):
            if type(layer) is not nn.Linear or layer is head or (model is student and id(layer) not in frozen):
                continue
            if id(layer.weight) not in quantized:
                quantized[id(layer.weight)] = quantized_linear(layer, quantize, compute_dtype, device)
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, quantized[id(layer.weight)])
    if not quantized:
        raise UserError(
            f"quantize is {quantize!r}, but {student.config.backbone_model_type} has no nn.Linear layers, which alone"
            " can be quantised; set quantize to none"
        )
    return len(quantized)


def lora_names(student: nn.Module, mixers: bool = False) -> list[str]:
    """Names of the linear layers that `add_lora` corrects: all outside the mixers but the output projection.

    `mixers`: also those of the mixers, except their `steering_layers`.
    """
    inside, steering = set(), set()
    for layer in student.config.memory_layers:
        mixer = attention_module(student, layer)
        inside |= {id(module) for module in mixer.modules()}
        steering |= {id(getattr(mixer, name)) for name in mixer.steering_layers if hasattr(mixer, name)}
    left = steering if mixers else inside
    head = student.get_output_embeddings()
    return [
        name
        for name, module in student.named_modules()
        if type(module).__name__ in LINEAR and id(module) not in left and module is not head
    ]


def add_lora(student: nn.Module, rank: int, seed: int = 0, mixers: bool = False) -> None:
    """Freeze everything except the mixers, and add a trainable correction of this rank to all other linear layers.

    The output projection gets no correction. `mixers`: the mixers' linear layers are frozen and corrected too, except
    their `steering_layers`; their other parameters are trained as a whole.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = lora_names(student, mixers)
    corrected = {id(p) for name in targets for p in student.get_submodule(name).parameters()}
    student.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
        inject_adapter_in_model(config, student, adapter_name=ADAPTER)
    for layer in student.config.memory_layers:
        for parameter in attention_module(student, layer).parameters():
            parameter.requires_grad_(id(parameter) not in corrected)
    for layer in lora_layers(student).values():  # the corrections are fp32, whatever the dtype of the weights is
        for part in (layer.lora_A, layer.lora_B):
            part.float()


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
        if module in layers and kind.startswith("weight."):  # scales of a quantised weight
            continue
        if module in layers and kind == "weight":
            a, b = (state[f"{module}.lora_{x}.{ADAPTER}.weight"] for x in "AB")
            tensor = _corrected(layers[module], tensor, a, b)
        plain[name.replace(".base_layer.", ".")] = tensor
    return plain


def _corrected(layer: nn.Module, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The weight of a layer with its correction, in the dtype that the weight has, or had before its quantisation."""
    if is_quantized(layer.base_layer):
        weight = plain_weight(layer.base_layer).to(a.device)
    delta = (b @ a) * layer.scaling[ADAPTER]
    return (weight + (delta.T if layer.fan_in_fan_out else delta)).to(weight.dtype)


@torch.no_grad()
def merge_lora(student: nn.Module) -> None:
    """Add the corrections to the weights of the student, in place. The shared tensors of the teacher do not change.

    Layers with a quantised weight become plain ones, with the values that it stands for.
    """
    for name, layer in lora_layers(student).items():
        base = layer.base_layer
        a, b = (getattr(layer, f"lora_{x}")[ADAPTER].weight for x in "AB")
        weight = nn.Parameter(_corrected(layer, base.weight.detach(), a, b))
        if is_quantized(base):
            bias, base = base.bias, nn.Linear(*reversed(weight.shape), base.bias is not None, device="meta")
            base.bias = bias
        base.weight = weight
        parent, _, key = name.rpartition(".")
        setattr(student.get_submodule(parent), key, base)
