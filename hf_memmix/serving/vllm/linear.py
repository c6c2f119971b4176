"""The parameters of a mixer in vLLM: its linear layers become vLLM's, the others get memory and a loader."""

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.model_executor.utils import set_weight_attrs

from ...mixers import MemoryMixer


def replace_parameters(mixer: MemoryMixer, prefix: str, dtype: torch.dtype, device, quantization=None):
    """Replace the parameters of a mixer that was made without memory.

    Args:
        prefix: the mixer's path in the model, by which a quantisation finds its linear layers.
        dtype: of the model; `MemoryMixer.fp32_parameters` stay in fp32.
        quantization: vLLM's configuration of it, None without one.

    Raises:
        ValueError: the model is divided over several ranks.
    """
    if get_tensor_model_parallel_world_size() > 1:
        raise ValueError(f"{mixer.name} has no tensor-parallel plan; leave --tensor-parallel-size out")
    for path, module in list(mixer.named_modules()):
        if isinstance(module, nn.Linear):
            new = replace_linear_class(module, "replicate", quantization, prefix=f"{prefix}.{path}")
            mixer.set_submodule(path, new)
    for path, old in list(mixer.named_parameters()):
        if old.is_meta:
            kept = torch.float32 if path in mixer.fp32_parameters else dtype
            new = nn.Parameter(torch.empty(old.shape, dtype=kept, device=device), requires_grad=False)
            set_weight_attrs(new, {"weight_loader": default_weight_loader})
            owner, _, name = path.rpartition(".")
            setattr(mixer.get_submodule(owner), name, new)
