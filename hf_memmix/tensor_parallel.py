"""transformers' tensor parallelism of a model with mixers: `from_pretrained(..., distributed_config=...)`.

The library shards single layers by name. A mixer is divided as a whole, by its own plan (`mixers.tensor_parallel`).
Its parameters become DTensors, and its forward runs on the parts that this rank holds. Two sums over the ranks
complete the layer: in forward the outputs of the last linear layer are summed, in backward the gradients of the input.
A parameter that every rank holds as a whole gets its gradient from the heads of this rank only, so these gradients are
summed, too.

The model has empty modules in place of the mixers while the library shards the rest of it, because the library's rules
for attention, such as "layers.*.self_attn.q_proj", would match the mixers.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ._model_hooks import DistributionHooks
from ._transformers import drop_unmatched_rules, name_in_plan, tensor_parallel_size
from .backbones import backbone_of
from .errors import UserError
from .mixers import ATTENTION, FeedForward, MemoryMixer
from .mixers.tp_plan import Cut, divide
from .swap import modules_of

if dist.is_available():  # it is not in every build of torch
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class _SumForward(torch.autograd.Function):
    """The sum of a tensor over the ranks. In backward, every term gets the gradient of the sum."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """A tensor that is equal on all ranks and used differently by each rank. Its gradient is the sum over
    the ranks.
    """

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
    """A rank's part of a parameter of which several ranks hold the same entries. The gradient of an entry is the sum
    over the ranks that hold it.
    """

    @staticmethod
    def forward(ctx, local, cut, mesh):
        ctx.cut, ctx.mesh = cut, mesh
        return local.view_as(local)

    @staticmethod
    def backward(ctx, gradient):
        cut, mesh = ctx.cut, ctx.mesh
        # a rank fills its own entries and leaves the others zero, so the sum adds the gradients of every entry
        whole = cut.whole([torch.zeros_like(gradient)] * mesh.size())
        start = 0
        for where in cut.slices(mesh.get_local_rank(), mesh.size()):
            width = where.stop - where.start
            whole[(slice(None),) * cut.dim + (where,)] = gradient.narrow(cut.dim, start, width)
            start += width
        dist.all_reduce(whole, group=mesh.get_group())
        return cut.local(whole, mesh.get_local_rank(), mesh.size()), None, None


class DividedModule:
    """A mixer or feed-forward layer of which this rank holds a part. It is made on the meta device, before loading.

    Args:
        module: the whole module, with a `tp_plan`.
        mesh: the mesh of one dimension over the ranks.

    Raises:
        ValueError: the module has no plan, or cannot be divided equally among the ranks.
    """

    def __init__(self, module: nn.Module, mesh):
        self.module, self.mesh, self.ranks, self.group = module, mesh, mesh.size(), mesh.get_group()
        plan = module.tp_plan(self.ranks)
        self.cuts: dict[str, Cut] = plan.cuts(module)
        # the parameters that forward replaces; not those that act after the sum and therefore have complete gradients
        complete = {*plan.after_sums, *(f"{name}.bias" for name in plan.rows)}
        paths = [path for path, _ in module.named_parameters() if path not in complete]
        self.parameters = [(*self._owner(path), self.cuts.get(path)) for path in paths]
        for path, cut in self.cuts.items():
            if cut.is_even(self.ranks):  # the other parameters are loaded as a whole, and `finish` cuts them
                owner, leaf = self._owner(path)
                placed = distribute_tensor(owner._parameters[leaf], mesh, [Shard(cut.dim)], src_data_rank=None)
                owner._parameters[leaf] = nn.Parameter(placed)
        divide(module, plan, self._average)
        for name in plan.rows:
            self._sum_outputs(module.get_submodule(name))
        if self.cuts:
            self._run_locally(module)

    def finish(self):
        """After loading, cut the parameters of which a rank holds several ranges or several ranks hold the same range.

        A DTensor cannot describe such a cut while the weights are loaded. Afterwards, the DTensor of such a parameter
        is the concatenation of the ranks' parts; `whole` restores the order of the whole parameter.
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
        """A whole parameter, or its whole gradient. All ranks must call this function."""
        cut, gathered = self.cuts[path], tensor.full_tensor()
        return gathered if cut.is_even(self.ranks) else cut.whole(list(gathered.chunk(self.ranks, cut.dim)))

    @contextlib.contextmanager
    def local_parameters(self) -> Iterator[None]:
        """In this block, the parameters of the module are plain tensors with the parts that this rank holds."""
        trains, swapped = torch.is_grad_enabled(), []
        for owner, leaf, cut in self.parameters:
            if cut is None and not trains:
                continue
            parameter = owner._parameters[leaf]
            local = parameter if cut is None else parameter.to_local()
            if trains and parameter.requires_grad:
                if cut is None:
                    local = _SumBackward.apply(local, self.group)
                elif not cut.is_even(self.ranks):
                    local = _SumCopies.apply(local, cut, self.mesh)
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
        """Make a linear layer that gets the features of this rank sum its products over the ranks, then add
        the bias.
        """

        def forward(x):
            y = _SumForward.apply(F.linear(x, linear.weight), self.group)
            return y if linear.bias is None else y + linear.bias

        linear.forward = forward

    def _average(self, x: Tensor) -> Tensor:
        """The mean over the ranks. Every rank uses it differently, so its gradients are summed over the ranks."""
        return _SumBackward.apply(_SumForward.apply(x, self.group) / self.ranks, self.group)

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        owner, _, leaf = path.rpartition(".")
        return self.module.get_submodule(owner), leaf


def divided_modules(model: nn.Module) -> dict[str, DividedModule]:
    """The divided modules of a model by their path; empty without tensor parallelism."""
    modules = ((path, getattr(module, "memmix_divided", None)) for path, module in model.named_modules())
    return {path: divided for path, divided in modules if divided is not None}


@contextlib.contextmanager
def replaced_by_identity(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[dict[str, nn.Module]]:
    """In this block, the model has nn.Identity in place of its modules of these classes. Yields them by their path."""
    found = modules_of(model, kinds)
    for path in found:
        model.set_submodule(path, nn.Identity())
    try:
        yield found
    finally:
        for path, module in found.items():
            model.set_submodule(path, module)


def check_mesh(distributed_config):
    """Raise ValueError if the configuration combines tensor parallelism with another kind of parallelism."""
    for name in ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size"):
        size = getattr(distributed_config, name, None) or 1
        if size > 1:
            raise UserError(
                f"tensor parallelism of a model with memory layers cannot be combined with {name}={size}; use"
                f" tp_size={distributed_config.tp_size} alone, or tp_size=1"
            )


def check_distributed_checkpoint(model: nn.Module):
    """Raise ValueError if the entries of a DTensor are not in the order of the whole parameter."""
    for path, divided in divided_modules(model).items():
        for name, cut in divided.cuts.items():
            if not cut.is_even(divided.ranks):
                raise UserError(
                    f"a distributed checkpoint cannot hold {path}.{name}, of which a rank holds several parts or"
                    " several ranks hold the same part; save without distributed_checkpoint=True, which writes whole"
                    " weights"
                )


def check_adapters(model: nn.Module, *inputs):
    """Raise ValueError if PEFT has put adapters into the layers of a divided model; a hook before its forward.

    An adapter has the sizes of a whole layer. PEFT divides adapters by the library's plan, which does not describe
    mixers.
    """
    if names := list(getattr(model, "peft_config", None) or ()):
        ranks = tensor_parallel_size(model.config)
        raise UserError(
            f"PEFT's adapters {names} do not fit into layers that are divided over {ranks} ranks (tp_size={ranks});"
            " train them without tensor parallelism (data parallelism or FSDP), merge them (merge_and_unload) and load"
            " the merged model with tp_size"
        )


def check_attention(config, plan: dict[str, str], ranks: int):
    """Raise ValueError if the family's plan divides kept attention layers by heads and the heads cannot be divided."""
    names = backbone_of(config).attention
    by_heads = any(style == "colwise" and {*rule.split(".")[:-1]} & {*names} for rule, style in plan.items())
    if ATTENTION not in config.mixer_types or not by_heads:
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for what, count in (("heads", config.num_attention_heads), ("key/value heads", kv_heads)):
        if count % ranks:
            raise UserError(
                f"attention layers: {count} {what} cannot be divided equally among {ranks} ranks; use a"
                f" tensor-parallel size that divides {count}, or convert all layers"
            )


def whole_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a model or their gradients by name, in which DTensors are replaced by whole tensors.

    All ranks must call this function.
    """
    divided, whole = divided_modules(model), {}
    if not divided:
        return tensors
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            owner = next((path for path in divided if name.startswith(f"{path}.")), None)
            if owner is None:
                tensor = tensor.full_tensor()
            else:
                tensor = divided[owner].whole(name.removeprefix(f"{owner}."), tensor)
        whole[name] = tensor
    return whole


class TensorParallelModel(DistributionHooks):
    """Mixin for a model whose mixers and feed-forward layers are divided by their own plans.

    It stands before the native class among the base classes.
    """

    @contextlib.contextmanager
    def sharding(self, ranks: int):
        check_mesh(self.config.distributed_config)
        check_attention(self.config, self.tp_plan, ranks)
        self.register_forward_pre_hook(check_adapters)
        with replaced_by_identity(self, (MemoryMixer, FeedForward)) as modules:
            drop_unmatched_rules(self)

            def divide_modules(mesh):
                for module in modules.values():
                    module.memmix_divided = DividedModule(module, mesh)
                name_in_plan(self, modules)

            yield divide_modules

    def ready_mixers(self) -> Iterator[MemoryMixer]:
        """Yield the mixers after loading. Until the next one is yielded, the parameters of a mixer are
        plain tensors.
        """
        divided = divided_modules(self)
        for module in divided.values():
            module.finish()
        for path, module in modules_of(self, (MemoryMixer,)).items():
            with divided[path].local_parameters() if path in divided else contextlib.nullcontext():
                yield module

    def whole_tensors(self, tensors):
        return whole_tensors(self, tensors)

    def check_distributed_checkpoint(self):
        check_distributed_checkpoint(self)
