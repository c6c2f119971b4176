"""The parameters of a mixer in vLLM: its linear layers become vLLM's, the others get memory and a loader.

With tensor parallelism each rank holds what the mixer's plan says (`MemoryMixer.tp_plan`).
"""

import torch
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
from .joined import join_layers, load_part


def replace_parameters(module: MemoryMixer | FeedForward, prefix: str, dtype: torch.dtype, device, join: bool):
    """Replace the parameters of a module that was made without memory, and give it the sizes of this rank.

    Args:
        prefix: the module's path in the model.
        dtype: of the model; `fp32_parameters` of a mixer stay in fp32.
        join: compute the linear layers that read a mixer's input in one product. vLLM's LoRA needs each by itself.

    Raises:
        ValueError: the model is divided over several ranks, and the mixer has no plan or cannot be divided by it.
    """
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    styles, cuts, all_cuts = {}, {}, {}
    if ranks > 1:
        plan = module.tp_plan(ranks)
        styles = dict.fromkeys(plan.columns, "colwise") | dict.fromkeys(plan.rows, "rowwise")
        cuts, all_cuts = plan.parameters, plan.cuts(module)
        divide(module, plan, average=lambda x: tensor_model_parallel_all_reduce(x) / ranks)
    for path, part in list(module.named_modules()):
        if join and isinstance(part, MemoryMixer):  # the module itself, or the two mixers of a layer with a window
            inside = f"{path}." if path else ""
            cuts_inside = {k.removeprefix(inside): cut for k, cut in all_cuts.items() if k.startswith(inside)}
            join_layers(part, cuts_inside, rank, ranks, dtype, device)
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
        set_weight_attrs(new, {"weight_loader": _loader(cut, rank, ranks)})
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, new)


def local_sizes(mixer: MemoryMixer, ranks: int) -> MemoryMixer:
    """The mixer with the sizes of one of `ranks` ranks, to ask for its states only. Raises ValueError as above."""
    if ranks > 1:
        divide(mixer, mixer.tp_plan(ranks), average=lambda x: x)
    return mixer


def _loader(cut: Cut | None, rank: int, ranks: int):
    """A function that loads a parameter; vLLM's reload of weights asks for its name and for its argument `param`."""

    def load(param: nn.Parameter, loaded_weight: Tensor):
        load_part(param, loaded_weight, cut, rank, ranks)

    return load
