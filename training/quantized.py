"""Frozen matrices in 4 or 8 bit, for students that learn low-rank corrections of them (QLoRA, arXiv:2305.14314).

4 bit is NF4 of bitsandbytes, with quantised scales; 8 bit is int8 of torchao with one scale per row. Only `nn.Linear`
layers are quantised. Their outputs are differentiable in the input, their weights are not trained.
"""

import importlib.util

import torch
from torch import Tensor, nn

from hf_memmix.errors import UserError

PACKAGES = {"4bit": "bitsandbytes", "8bit": "torchao"}
# bytes per weight: NF4 has a scale per 64 weights, in 8 bit, and an fp32 scale of 256 scales; int8 has one per row
BYTES_PER_WEIGHT = {"4bit": 0.5 + 1 / 64 + 4 / (64 * 256), "8bit": 1.0}


def check_installed(quantize: str) -> None:
    """Raise ValueError if the package that "4bit" or "8bit" needs is missing; "none" needs none."""
    package = PACKAGES.get(quantize)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"quantize is {quantize!r}, which {package} computes, and it is missing; pip install {package}"
        )


def quantized_linear(
    layer: nn.Linear, quantize: str, compute_dtype: torch.dtype, device: torch.device | None = None
) -> nn.Module:
    """A frozen layer that computes what `layer` does with rounded weights; the weights of `layer` do not change.

    device: where the weights are rounded and stay, by default that of `layer`. A CPU takes minutes for the 4-bit
        weights of an 8B model, a GPU seconds.
    """
    device = layer.weight.device if device is None else device
    if quantize == "4bit":
        import bitsandbytes

        out, into = layer.weight.shape
        with torch.device("meta"):
            new = bitsandbytes.nn.Linear4bit(into, out, layer.bias is not None, compute_dtype, quant_type="nf4")
        # on a CPU with bf16 instructions, a layer of the teacher would replace its weights, which the student shares,
        # by a format that has other scales and no gradient of the input
        new.support_avx512bf16_for_cpu = False
        new.weight = bitsandbytes.nn.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4")
        new.bias = layer.bias
        return new.to(device)  # this quantises the weight
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    new = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    new.weight = nn.Parameter(layer.weight.detach().to(device, copy=True), requires_grad=False)
    new.bias = layer.bias
    quantize_(new.to(device), Int8WeightOnlyConfig())
    return new


def is_quantized(layer: nn.Module) -> bool:
    """Whether `quantized_linear` has made the layer."""
    weight = getattr(layer, "weight", None)
    return hasattr(weight, "quant_state") or hasattr(weight, "dequantize") and type(weight) is not nn.Parameter


@torch.no_grad()
def plain_weight(layer: nn.Module) -> Tensor:
    """The weight [out, in] of a layer; of a quantised one the values that it stands for, in its former dtype."""
    if hasattr(layer.weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return layer.weight.dequantize() if is_quantized(layer) else layer.weight.detach()
