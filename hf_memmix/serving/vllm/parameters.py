"""The parameters of a mixer in vLLM: its linear layers become vLLM's, the others get memory and a loader.

With tensor parallelism each rank holds what the mixer's plan says (`MemoryMixer.tp_plan`). Linear layers that read the
same input are computed in one product, because several small products take longer than one.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.model_executor.utils import set_weight_attrs

from ...mixers import FeedForward, MemoryMixer
from ...mixers.tp_plan import Cut, divide


def replace_parameters(module: MemoryMixer | FeedForward, prefix: str, dtype: torch.dtype, device):
    """Replace the parameters of a module that was made without memory, and give it the sizes of this rank.

    Args:
        prefix: the module's path in the model.
        dtype: of the model; `fp32_parameters` of a mixer stay in fp32.

    Raises:
        ValueError: the model is divided over several ranks, and the mixer has no plan or cannot be divided by it.
    """
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    styles, cuts = {}, {}
    if ranks > 1:
        plan = module.tp_plan(ranks)
        styles = dict.fromkeys(plan.columns, "colwise") | dict.fromkeys(plan.rows, "rowwise")
        cuts = plan.parameters
        divide(module, plan, average=lambda x: tensor_model_parallel_all_reduce(x) / ranks)
    for path, layer in list(module.named_modules()):
        # a linear layer that is cut in another way than by rows or columns is loaded as any other parameter
        if isinstance(layer, nn.Linear) and f"{path}.weight" not in cuts:
            style = styles.get(path, "replicate")
            new = replace_linear_class(layer, style, prefix=f"{prefix}.{path}")
            module.set_submodule(path, new)
    fp32 = getattr(module, "fp32_parameters", ())
    for path, old in list(module.named_parameters()):
        if not old.is_meta:
            continue
        shape, cut = list(old.shape), cuts.get(path)
        if cut is not None:
            shape[cut.dim] = cut.local_size()
        data = torch.empty(shape, dtype=torch.float32 if path in fp32 else dtype, device=device)
        new = nn.Parameter(data, requires_grad=False)
        set_weight_attrs(new, {"weight_loader": partial(_load, cut=cut, rank=rank, ranks=ranks)})
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, new)
    if isinstance(module, MemoryMixer):
        join_layers(module)


class JoinedLayers(nn.Module):
    """Linear layers of the same input as one product.

    Args:
        layers: by name, all with weights [features, hidden] of one dtype and device. Their parameters become views
            of the joined ones. So they are still loaded one by one.
    """

    def __init__(self, layers: dict[str, nn.Module]):
        super().__init__()
        self.sizes = {name: layer.weight.shape[0] for name, layer in layers.items()}
        biases = {name: layer.bias for name, layer in layers.items() if getattr(layer, "bias", None) is not None}
        some = next(iter(layers.values())).weight
        features, hidden = sum(self.sizes.values()), some.shape[1]
        # buffers that are not saved: the parameters are those of the layers
        self.register_buffer("weight", some.new_empty(features, hidden), persistent=False)
        self.register_buffer("bias", some.new_zeros(features) if biases else None, persistent=False)
        start = 0
        for name, layer in layers.items():
            end = start + self.sizes[name]
            layer.weight.data = self.weight[start:end]
            if name in biases:
                layer.bias.data = self.bias[start:end]
            start = end

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The outputs of the layers [..., features of the layer] by name, as parts of one tensor."""
        outputs = F.linear(x, self.weight, self.bias).split(list(self.sizes.values()), -1)
        return dict(zip(self.sizes, outputs, strict=True))


def join_layers(mixer: MemoryMixer):
    """Have `MemoryMixer.products` computed in one product, if there are several layers of one dtype."""
    layers = {name: getattr(mixer, name) for name in mixer.input_layers if hasattr(mixer, name)}
    if len(layers) > 1 and len({layer.weight.dtype for layer in layers.values()}) == 1:
        mixer.joined_layers = JoinedLayers(layers)


def mark_unloaded(model: nn.Module):
    """Fill the parameters of a model with NaN, by which `check_loaded` finds those that no checkpoint has filled.

    vLLM joins parameters of the checkpoint in one of the model, so names do not show which of them were loaded.
    """
    for parameter in _loaded_from_checkpoints(model).values():
        parameter.data.fill_(torch.nan)


def check_loaded(model: nn.Module):
    """Raise ValueError if a checkpoint has left a parameter, or a part of it, as `mark_unloaded` has made it."""
    parameters = _loaded_from_checkpoints(model)
    empty = [name for name, parameter in parameters.items() if parameter.detach().amin().isnan()]
    if empty:
        names = ", ".join(empty[:8]) + (", ..." if len(empty) > 8 else "")
        raise ValueError(
            f"the checkpoint lacks {len(empty)} parameters of the model, or parts of them, or has NaN there: {names}."
            " Load it with transformers to see which tensors are missing; save or download the model again"
        )


def _loaded_from_checkpoints(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with memory, by name, without scales and without experts that vLLM pads for a kernel."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and parameter.dim()
        and parameter.numel()
        and not parameter.is_meta
        and parameter.numel() == getattr(parameter, "weight_loader_numel", parameter.numel())
    }


def local_sizes(mixer: MemoryMixer, ranks: int) -> MemoryMixer:
    """The mixer with the sizes of one of `ranks` ranks, to ask for its states only. Raises ValueError as above."""
    if ranks > 1:
        divide(mixer, mixer.tp_plan(ranks), average=lambda x: x)
    return mixer


def _load(parameter: nn.Parameter, loaded: Tensor, cut: Cut | None, rank: int, ranks: int):
    local = loaded if cut is None else cut.local(loaded, rank, ranks)
    if local.shape != parameter.shape:
        raise ValueError(
            f"a parameter of the checkpoint is {list(loaded.shape)}, the model needs {list(parameter.shape)}"
        )
    parameter.data.copy_(local)
