"""transformers' tensor parallelism of a model with mixers: `from_pretrained(..., distributed_config=...)`.

The library shards single layers by name. A mixer is divided as a whole, by its own plan (`mixers.tensor_parallel`).
Its parameters become DTensors, its forward runs on what this rank holds, and two sums over the ranks make it one layer
again: the outputs of the last linear layer in forward, the gradient of the input in backward. Parameters that are
whole on every rank see this rank's heads alone, so their gradients are summed, too.

The mixers are set aside while the library shards the rest of the model, because its rules for attention, such as
"layers.*.self_attn.q_proj", would match them.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .mixers.tensor_parallel import Cut, divide


class _SumForward(torch.autograd.Function):
    """The sum over the ranks. The gradient of the sum is that of every term."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """The same tensor on all ranks, which use it in different ways: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumCopies(torch.autograd.Function):
    """A rank's part of a parameter whose parts overlap: an entry's gradient is the sum over the ranks that hold it."""

    @staticmethod
    def forward(ctx, local, cut, mesh):
        ctx.cut, ctx.mesh = cut, mesh
        return local.view_as(local)

    @staticmethod
    def backward(ctx, gradient):
        cut, mesh = ctx.cut, ctx.mesh
        # zeros everywhere else: every rank adds its own entries
        whole = cut.whole([torch.zeros_like(gradient)] * mesh.size())
        start = 0
        for where in cut.slices(mesh.get_local_rank(), mesh.size()):
            width = where.stop - where.start
            whole[(slice(None),) * cut.dim + (where,)] = gradient.narrow(cut.dim, start, width)
            start += width
        dist.all_reduce(whole, group=mesh.get_group())
        return cut.local(whole, mesh.get_local_rank(), mesh.size()), None, None


class DividedModule:
    """A mixer or feed-forward layer of which this rank holds a part. Made on the meta device, before loading.

    Args:
        module: the whole module, with a `tp_plan`.
        mesh: the mesh of one dimension over the ranks.

    Raises:
        ValueError: the module has no plan, or cannot be shared out equally.
    """

    def __init__(self, module: nn.Module, mesh):
        self.module, self.mesh, self.ranks, self.group = module, mesh, mesh.size(), mesh.get_group()
        plan = module.tp_plan(self.ranks)
        self.cuts: dict[str, Cut] = plan.cuts(module)
        # added after the sum over the ranks: their gradients are whole
        self.row_biases = {f"{name}.bias" for name in plan.rows}
        for path, cut in self.cuts.items():
            if cut.is_even(self.ranks):  # the others are loaded whole and cut in `finish`
                owner, leaf = self._owner(path)
                placed = distribute_tensor(owner._parameters[leaf], mesh, [Shard(cut.dim)], src_data_rank=None)
                owner._parameters[leaf] = nn.Parameter(placed)
        divide(module, plan, self._average)
        for name in plan.rows:
            self._sum_outputs(module.get_submodule(name))
        if self.cuts:
            self._run_locally(module)

    def finish(self):
        """After loading: cut what DTensor cannot describe before, parts that lie apart or are held by several ranks.

        As a DTensor, such a parameter is what the ranks hold, one after the other; `whole` puts it in order.
        """
        for path, cut in self.cuts.items():
            owner, leaf = self._owner(path)
            whole = owner._parameters[leaf]
            if isinstance(whole, DTensor):
                continue
            local = cut.local(whole.detach(), self.mesh.get_local_rank(), self.ranks).contiguous().clone()
            placed = DTensor.from_local(local, self.mesh, [Shard(cut.dim)], run_check=False)
            owner._parameters[leaf] = nn.Parameter(placed, requires_grad=whole.requires_grad)

    def whole(self, path: str, tensor: DTensor) -> Tensor:
        """The whole of a parameter, or of its gradient. All ranks must call it."""
        cut, gathered = self.cuts[path], tensor.full_tensor()
        return gathered if cut.is_even(self.ranks) else cut.whole(list(gathered.chunk(self.ranks, cut.dim)))

    @contextlib.contextmanager
    def local_parameters(self) -> Iterator[None]:
        """The module has plain tensors with what this rank holds in place of its parameters."""
        trains, swapped = torch.is_grad_enabled(), []
        for path, parameter in list(self.module.named_parameters()):
            cut = self.cuts.get(path)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if trains and parameter.requires_grad and path not in self.row_biases:
                if cut is None:
                    local = _SumBackward.apply(local, self.group)
                elif not cut.is_even(self.ranks):
                    local = _SumCopies.apply(local, cut, self.mesh)
            if local is not parameter:
                owner, leaf = self._owner(path)
                swapped.append((owner, leaf, parameter))
                owner._parameters[leaf] = local
        try:
            yield
        finally:
            for owner, leaf, parameter in swapped:
                owner._parameters[leaf] = parameter

    def _run_locally(self, module):
        whole_forward = module.forward

        def forward(x=None, *args, **kwargs):
            x = kwargs.pop("hidden_states", x)
            if x is not None and torch.is_grad_enabled():
                x = _SumBackward.apply(x, self.group)
            with self.local_parameters():
                return whole_forward(x, *args, **kwargs)

        module.forward = forward

    def _sum_outputs(self, linear: nn.Linear):
        """Its inputs are this rank's features: the products are summed over the ranks, then the bias is added."""

        def forward(x):
            y = _SumForward.apply(F.linear(x, linear.weight), self.group)
            return y if linear.bias is None else y + linear.bias

        linear.forward = forward

    def _average(self, x: Tensor) -> Tensor:
        """The mean over the ranks; every rank goes on with it in its own way."""
        return _SumBackward.apply(_SumForward.apply(x, self.group) / self.ranks, self.group)

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        owner, _, leaf = path.rpartition(".")
        return self.module.get_submodule(owner), leaf


def divided_modules(model: nn.Module) -> dict[str, DividedModule]:
    """The divided modules of a model by their path; empty without tensor parallelism."""
    modules = ((path, getattr(module, "memmix_divided", None)) for path, module in model.named_modules())
    return {path: divided for path, divided in modules if divided is not None}


@contextlib.contextmanager
def set_aside(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[dict[str, nn.Module]]:
    """The modules of these classes by their path; in the block, the model has empty ones in their place."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    for path in found:
        model.set_submodule(path, nn.Identity())
    try:
        yield found
    finally:
        for path, module in found.items():
            model.set_submodule(path, module)


def check_mesh(distributed_config):
    """Raise ValueError if tensor parallelism is to be combined with another kind."""
    for name in ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size"):
        size = getattr(distributed_config, name, None) or 1
        if size > 1:
            raise ValueError(
                f"tensor parallelism of a model with memory layers cannot be combined with {name}={size}; take"
                f" tp_size={distributed_config.tp_size} alone, or tp_size=1"
            )


def check_attention(config, ranks: int):
    """Raise ValueError if the heads of attention layers that were kept cannot be shared out over the ranks."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for what, count in (("heads", config.num_attention_heads), ("key/value heads", kv_heads)):
        if count % ranks:
            raise ValueError(
                f"attention layers: {count} {what} cannot be shared out equally over {ranks} ranks; take a"
                f" tensor-parallel size that divides {count}, or convert all layers"
            )


def whole_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a model, or their gradients, by name: DTensors become whole tensors. All ranks must call it."""
    divided, whole = divided_modules(model), {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            owner = next((path for path in divided if name.startswith(f"{path}.")), None)
            if owner is None:
                tensor = tensor.full_tensor()
            else:
                tensor = divided[owner].whole(name.removeprefix(f"{owner}."), tensor)
        whole[name] = tensor
    return whole
