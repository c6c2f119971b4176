"""The plan of tensor parallelism for a mixer: which part of each parameter each rank holds.

Each rank computes some heads (or channels) of every mixer. The linear layers before the memory are cut by output
features. The linear layer after the memory is cut by input features, and its outputs are summed over the ranks. A plan
is only data and depends on no library. transformers' own tensor parallelism (`hf_memmix.tensor_parallel`) and vLLM
(`hf_memmix.serving.vllm`) divide the modules by it.

Shapes: R ranks, H heads, Hk key/value heads.
"""

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..errors import UserError


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of a dimension in equal pieces; rank r of R holds piece r * pieces // R.

    With as many pieces as ranks, every rank holds another piece. With fewer pieces, several ranks hold the same piece;
    so it is for key/value heads if there are fewer heads than ranks. With one piece, every rank holds the whole range.
    """

    size: int
    pieces: int


@dataclasses.dataclass(frozen=True)
class Cut:
    """The dimension of a parameter that is divided. It holds one part, or several parts one after the other."""

    dim: int
    parts: tuple[Part, ...]

    def slices(self, rank: int, ranks: int) -> list[slice]:
        """The ranges of the whole dimension that a rank holds, in order."""
        found, start = [], 0
        for part in self.parts:
            width = part.size // part.pieces
            first = start + rank * part.pieces // ranks * width
            found.append(slice(first, first + width))
            start += part.size
        return found

    def local_size(self) -> int:
        """The number of entries of the dimension that a rank holds; it is the same for all ranks."""
        return sum(part.size // part.pieces for part in self.parts)

    def local(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """The part of the whole parameter that a rank holds: a view if it is one range, else a copy."""
        found = [whole[(slice(None),) * self.dim + (where,)] for where in self.slices(rank, ranks)]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def whole(self, locals: list[Tensor]) -> Tensor:
        """The whole parameter from the parts of all ranks, given in the order of the ranks."""
        shape = list(locals[0].shape)
        shape[self.dim] = sum(part.size for part in self.parts)
        whole = locals[0].new_empty(shape)
        for rank, local in enumerate(locals):
            places = self.slices(rank, len(locals))
            for where, piece in zip(places, local.split([s.stop - s.start for s in places], self.dim), strict=True):
                whole[(slice(None),) * self.dim + (where,)] = piece
        return whole

    def is_even(self, ranks: int) -> bool:
        """Whether the ranks hold equal ranges one after the other, and no entry is held twice."""
        return len(self.parts) == 1 and self.parts[0].pieces == ranks


@dataclasses.dataclass(frozen=True)
class TensorParallelPlan:
    """The part of a module that each rank holds. Every rank holds the parameters that are not named here as a whole.

    Args:
        ranks: R, the tensor-parallel size.
        columns: nn.Linear layers whose weight and bias are cut evenly by output features ("colwise").
        rows: nn.Linear layers whose weight is cut evenly by input features ("rowwise"). The outputs are summed over
            the ranks; the bias is whole and is added once, after the sum.
        parameters: the cuts of all other divided parameters, by their path.
        sizes: the values on each rank of attributes of the module, by their path. `divide` sets them.
        wide_norms: norms over all heads or channels, whose mean square is an average over the ranks.
        after_sums: whole parameters that act on the sum over the ranks, so each rank has their complete gradients. The
            biases of `rows` are such parameters without being named.
    """

    ranks: int
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    parameters: dict[str, Cut] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    wide_norms: tuple[str, ...] = ()
    after_sums: tuple[str, ...] = ()

    def cuts(self, module: nn.Module) -> dict[str, Cut]:
        """The cuts of all divided parameters, also of the linear layers. `module` still has its whole parameters."""
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
    """The plan of a module whose parameters are cut along dimension 0. Names that the module does not have are
    ignored.

    Args:
        pieces: pairs of a number of pieces and the names of the linear layers, convolutions, norms and parameters that
            are cut into this number of pieces.
        rows, sizes, wide_norms: see `TensorParallelPlan`.
        parameters: the cuts of parameters that are cut in another way, by their path.
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
    """Set the sizes of a module to those of one rank. Its parameters stay as they are; the loader cuts them.

    Args:
        average: the mean of a tensor over the ranks, differentiable if the module is trained.

    Raises:
        ValueError: the plan has norms over all ranks, and `average` is missing.
    """
    if plan.wide_norms and average is None:
        raise UserError(f"{list(plan.wide_norms)} span all ranks: pass `average`, the mean of a tensor over the ranks")
    for path, value in plan.sizes.items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, value)
    for name in plan.wide_norms:
        module.get_submodule(name).average_over_ranks = average


def share(mixer, what: str, count: int, ranks: int, may_copy: bool = False) -> int:
    """The number of `count` heads or channels that each rank computes.

    Args:
        what: the name of these heads or channels in the error text.
        may_copy: whether there may be fewer of them than ranks; several ranks then hold the same one.

    Raises:
        ValueError: they cannot be divided equally among the ranks.
    """
    if count % ranks == 0:
        return count // ranks
    if may_copy and ranks % count == 0:
        return 1
    sizes = [n for n in range(1, 65) if count % n == 0 or (may_copy and n % count == 0)]
    raise UserError(
        f"{mixer.name} of layer {mixer.layer_idx}: {count} {what} cannot be divided equally among {ranks} ranks;"
        f" use a tensor-parallel size of {', '.join(map(str, sizes))}"
    )


def heads_plan(mixer, ranks: int, by_heads, by_kv_heads, wide_norms=(), **sizes: int) -> TensorParallelPlan:
    """The plan of a mixer that takes the place of attention: `heads`, `kv_heads` and a last linear layer `o_proj`.

    Args:
        by_heads, by_kv_heads: names of the layers and parameters that are cut by query heads and by key/value heads.
        wide_norms: see `TensorParallelPlan`.
        sizes: further attributes with their value on each rank.

    Raises:
        ValueError: the heads cannot be divided equally among the ranks.
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
