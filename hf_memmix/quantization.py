"""Quantised weights: the quantisers that can load a model with mixers, and the layers that are not quantised.

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))

A quantiser rounds the weights of linear layers. It leaves alone what each mixer declares in `steering_layers`, since
an error in a decay or a write strength is carried from token to token, and the parameters that are no linear layers:
`fp32_parameters`, convolutions and norms. `from_pretrained` writes the names of these layers into the quantisation
config, so that a saved model has them too.
"""

import copy

import torch
from torch import nn

from ._transformers import unquantized_by_default
from .errors import UserError
from .mixers import MemoryMixer

# quantisation method: the field of its config with the names of the modules that it leaves alone
QUANTIZERS = {"torchao": "modules_to_not_convert", "bitsandbytes": "llm_int8_skip_modules"}


def steering_names(model: nn.Module) -> list[str]:
    """Full names of the layers of a model that its mixers declare in `steering_layers`."""
    return [
        f"{path}.{name}".removeprefix(".")
        for path, mixer in model.named_modules()
        if isinstance(mixer, MemoryMixer)
        for name in mixer.steering_layers
        if isinstance(getattr(mixer, name, None), nn.Module)
    ]


def leave_steering_alone(quantization, model_class: type, config):
    """Return a copy of a quantisation config that also names the layers that are not to be quantised.

    Args:
        quantization: a config of transformers, e.g. `BitsAndBytesConfig`, or a dictionary with its fields.
        model_class, config: the class of the model and its configuration.

    Raises:
        ValueError: the quantiser is not in `QUANTIZERS`.
    """
    field = QUANTIZERS[check_quantizer(quantization)]
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    as_dict = isinstance(quantization, dict)
    quantization = copy.deepcopy(quantization)
    given = quantization.get(field) if as_dict else getattr(quantization, field, None)
    names = sorted({*(unquantized_by_default(model) if given is None else given), *steering_names(model)})
    if as_dict:
        quantization[field] = names
    else:
        setattr(quantization, field, names)
    return quantization


def check_quantizer(quantization) -> str:
    """The method of a quantisation config. Raises ValueError unless it is in `QUANTIZERS`."""
    as_dict = isinstance(quantization, dict)
    method = quantization.get("quant_method") if as_dict else getattr(quantization, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method not in QUANTIZERS:
        raise UserError(
            f"the quantiser {method!r} is not supported for models with mixers, because it may round layers that"
            f" steer a memory; use {' or '.join(QUANTIZERS)}"
        )
    return method


def quantizer_of(model: nn.Module) -> str | None:
    """The method by which a loaded model is quantised, or None."""
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    if found is None or not getattr(model, "is_quantized", getattr(model, "hf_quantizer", None)):
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def refuse_quantized(model: nn.Module, name: str, remedy: str) -> None:
    """Raise ValueError if a model is quantised. `name`: of the model; `remedy`: what to do instead."""
    if method := quantizer_of(model):
        raise UserError(f"{name} is quantised by {method}, so its weights cannot be changed; {remedy}")
