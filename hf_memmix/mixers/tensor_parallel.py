"""How a mixer is divided over the ranks of tensor parallelism: which part of which parameter each rank holds.

Each rank computes some heads (or channels) of every mixer. The linear layers before the memory are cut by output
features, the one after it by input features, and its outputs are summed over the ranks. A plan only says so; it knows
no library. transformers' own tensor parallelism (`hf_memmix.tensor_parallel`) and vLLM (`hf_memmix.serving.vllm`)
carry it out.

Shapes: R ranks, H heads, Hk key/value heads.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of a dimension, in equal pieces: rank r of R holds piece r * pieces // R.

    As many pieces as ranks: the stretch is divided. Fewer pieces: several ranks hold the same one, as they do with
    key/value heads of which there are fewer than ranks. One piece: all ranks hold all of it.
    """

    size: int
    pieces: int


@dataclasses.dataclass(frozen=True)
class Cut:
    """The dimension of a parameter that is divided. It holds one part, or several parts one after the other."""

    dim: int
    parts: tuple[Part, ...]

    def slices(self, rank: int, ranks: int) -> list[slice]:
        """Where the entries of a rank are in the whole dimension, in order."""
        found, start = [], 0
        for part in self.parts:
            width = part.size // part.pieces
            first = start + rank * part.pieces // ranks * width
            found.append(slice(first, first + width))
            start += part.size
        return found

    def local_size(self) -> int:
        """Entries of the dimension that a rank holds; it is the same for all ranks."""
        return sum(part.size // part.pieces for part in self.parts)

    def local(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """What a rank holds of the whole parameter: a view if it is one stretch, else a copy."""
        found = [whole[(slice(None),) * self.dim + (where,)] for where in self.slices(rank, ranks)]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def whole(self, locals: list[Tensor]) -> Tensor:
        """The whole parameter from what all ranks hold, in the order of the ranks."""
        shape = list(locals[0].shape)
        shape[self.dim] = sum(part.size for part in self.parts)
        whole = locals[0].new_empty(shape)
        for rank, local in enumerate(locals):
            places = self.slices(rank, len(locals))
            for where, piece in zip(places, local.split([s.stop - s.start for s in places], self.dim), strict=True):
                whole[(slice(None),) * self.dim + (where,)] = piece
        return whole

    def is_even(self, ranks: int) -> bool:
        """Whether the ranks hold equal stretches one after the other, without copies."""
        return len(self.parts) == 1 and self.parts[0].pieces == ranks


@dataclasses.dataclass(frozen=True)
class TensorParallelPlan:
    """What each rank holds of a module. Parameters that are not named are whole on every rank.

    Args:
        ranks: R, the tensor-parallel size.
        columns: nn.Linear layers whose weight and bias are cut evenly by output features ("colwise").
        rows: nn.Linear layers whose weight is cut evenly by input features ("rowwise"). The outputs are summed over
            the ranks; the bias is whole and is added once, after the sum.
        parameters: all other parameters that are cut, by their path.
        sizes: attributes of the module by their path, with the value on each rank. `divide` sets them.
        wide_norms: norms over all heads or channels, whose mean square is an average over the ranks.
    """

    ranks: int
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    parameters: dict[str, Cut] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    wide_norms: tuple[str, ...] = ()

    def cuts(self, module: nn.Module) -> dict[str, Cut]:
        """Every parameter that is cut, those of the linear layers too. `module` still has its whole parameters."""
        found = dict(self.parameters)
        for name in self.columns:
            for leaf, parameter in module.get_submodule(name).named_parameters(recurse=False):
                found[f"{name}.{leaf}"] = Cut(0, (Part(parameter.shape[0], self.ranks),))
        for name in self.rows:
            found[f"{name}.weight"] = Cut(1, (Part(module.get_submodule(name).weight.shape[1], self.ranks),))
        return found


def plan_of(
    module: nn.Module,
    ranks: int,
    pieces: Iterable[tuple[int, Iterable[str]]],
    rows: Iterable[str],
    sizes: dict[str, int],
    wide_norms: Iterable[str] = (),
    parameters: dict[str, Cut] | None = None,
) -> TensorParallelPlan:
    """The plan of a module whose parameters are cut along dimension 0; names that it does not have are left out.

    Args:
        pieces: pairs of a number of pieces and the names of linear layers, convolutions, norms and parameters that
            are cut into that many.
        rows, sizes, wide_norms: see `TensorParallelPlan`.
        parameters: further parameters by path, which are cut in another way.
    """
    columns, cut = [], dict(parameters or {})
    for count, names in pieces:
        for name in names:
            found = getattr(module, name, None)
            if isinstance(found, nn.Linear) and count == ranks:
                columns.append(name)
            elif isinstance(found, nn.Parameter):
                cut[name] = Cut(0, (Part(found.shape[0], count),))
            elif isinstance(found, nn.Module):
                for leaf, parameter in found.named_parameters():
                    cut[f"{name}.{leaf}"] = Cut(0, (Part(parameter.shape[0], count),))
    rows = tuple(name for name in rows if hasattr(module, name))
    return TensorParallelPlan(ranks, tuple(columns), rows, cut, sizes, tuple(wide_norms))


def divide(module: nn.Module, plan: TensorParallelPlan, average: Callable[[Tensor], Tensor] | None = None):
    """Give a module the sizes of one rank. Its parameters are not touched: whoever loads them cuts them.

    Args:
        average: the mean of a tensor over the ranks, differentiable if the module is trained.

    Raises:
        ValueError: the plan has norms over all ranks, and `average` is missing.
    """
    if plan.wide_norms and average is None:
        raise ValueError(
            f"{list(plan.wide_norms)} span all ranks: pass `average`, the mean of a tensor over the ranks"
        )
    for path, value in plan.sizes.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, value)
    for name in plan.wide_norms:
        module.get_submodule(name).average_over_ranks = average


def share(mixer, what: str, count: int, ranks: int, may_copy: bool = False) -> int:
    """How many of `count` heads or channels each rank computes.

    Args:
        what: what they are, for the error text.
        may_copy: fewer of them than ranks are possible; several ranks then hold the same one.

    Raises:
        ValueError: they cannot be shared out equally.
    """
    if count % ranks == 0:
        return count // ranks
    if may_copy and ranks % count == 0:
        return 1
    sizes = [n for n in range(1, 65) if count % n == 0 or (may_copy and n % count == 0)]
    raise ValueError(
        f"{mixer.name} of layer {mixer.layer_idx}: {count} {what} cannot be shared out equally over {ranks} ranks;"
        f" take a tensor-parallel size of {', '.join(map(str, sizes))}"
    )


def heads_plan(mixer, ranks: int, by_heads, by_kv_heads, wide_norms=(), **sizes: int) -> TensorParallelPlan:
    """The plan of a mixer that takes the place of attention: `heads`, `kv_heads` and a last linear layer `o_proj`.

    Args:
        by_heads, by_kv_heads: names of what is cut by query heads and by key/value heads.
        wide_norms: see `TensorParallelPlan`.
        sizes: further attributes with their value on each rank.

    Raises:
        ValueError: the heads cannot be shared out equally.
    """
    heads = share(mixer, "heads", mixer.heads, ranks)
    kv_heads = share(mixer, "key/value heads", mixer.kv_heads, ranks, may_copy=True)
    return plan_of(
        mixer,
        ranks,
        [(ranks, by_heads), (min(ranks, mixer.kv_heads), by_kv_heads)],
        rows=("o_proj",),
        sizes={"heads": heads, "kv_heads": kv_heads, **sizes},
        wide_norms=wide_norms,
    )
