"""Sequences that are split over several processes: states go from the rank of a piece to the rank of the next piece.

A rank holds one piece of every sequence, or several, each a stretch of consecutive tokens. A mixer that is linear in
its memory gathers what every piece writes, and all ranks run their scans at the same time (`Pieces.gather`). Any other
mixer scans the pieces in turn (`scan_in_turn`): while a rank scans a layer, the rank before it is already in the next
layer, so R ranks and L layers take the time of L + R - 1 layers.

Both are differentiable: a gradient takes the same way back. A layer that is computed again in backward (gradient
checkpointing) uses the states of the first time and sends nothing.

Shapes: B batch, T tokens of a piece, P pieces on all ranks, in the order of their tokens.
"""

import dataclasses
import types
from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hf_memmix_kernels import chunk_gla
from hf_memmix_kernels._common import compute_dtype, without_autocast

from ..errors import UserError

# messages that may be under way: each holds a state, and more than the number of ranks do not help
MAX_UNDER_WAY = 8
WIDEST_KEYS = 256  # of `chunk_gla`
# the module in which torch defines its context parallelism
_TORCH = "torch.distributed.tensor.experimental"
_under_way: deque[tuple[object, Tensor]] = deque()


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of the split sequences."""

    start: int  # index of the first token in the tensors of its rank
    stop: int
    rank: int


@dataclasses.dataclass
class Pieces:
    """How the sequences of one forward are split, and the states that this rank has received.

    Args:
        group: the process group of the ranks.
        pieces: all pieces on all ranks, in the order of their tokens.
        padded: whether some rank has padding.
    """

    group: dist.ProcessGroup
    pieces: tuple[Piece, ...]
    padded: bool = False
    received: dict[tuple, Tensor] = dataclasses.field(default_factory=dict)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def own(self) -> list[int]:
        """Places in `pieces` of this rank's pieces."""
        return [place for place, piece in enumerate(self.pieces) if piece.rank == self.rank]

    def shortest(self) -> int:
        """Tokens of the shortest piece."""
        return min(piece.stop - piece.start for piece in self.pieces)

    def tokens(self) -> int:
        """Tokens of all pieces: of a whole row."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def rank_at(self, place: int) -> int | None:
        """The rank that holds the piece at a place; None before the first and after the last piece."""
        return self.pieces[place].rank if 0 <= place < len(self.pieces) else None

    def gather(self, key: tuple, values: list[Tensor], trains: bool) -> Tensor:
        """[P, ...]: the values of all pieces, from those of this rank's pieces (`own`), which have one shape.

        Args:
            key: names the values, and is unique in this forward.
            trains: whether gradients may flow into the values; the same on all ranks.
        """
        own, counts = self.own(), [sum(p.rank == rank for p in self.pieces) for rank in range(self.group.size())]
        rows = torch.stack(values + [torch.zeros_like(values[0])] * (max(counts) - len(own)))
        gathered = _Gather.apply(rows, _anchor(rows, trains), self, key)
        # the place of each piece among the rows of all ranks
        places, seen = [], [0] * len(counts)
        for piece in self.pieces:
            places.append(piece.rank * max(counts) + seen[piece.rank])
            seen[piece.rank] += 1
        return gathered[torch.tensor(places, device=gathered.device)]

    def receive(self, key: tuple, like: Tensor, source: int) -> Tensor:
        """The tensor that rank `source` has sent, with the shape of `like`, which is overwritten. A second call with
        the same key gives it again.
        """
        if key not in self.received:
            dist.recv(like, dist.get_global_rank(self.group, source), group=self.group)
            self.received[key] = like
        return self.received[key]

    def send(self, tensor: Tensor, target: int):
        """Send a tensor, which must not change any more, without waiting for its arrival."""
        while len(_under_way) >= MAX_UNDER_WAY:
            _under_way.popleft()[0].wait()
        work = dist.isend(tensor, dist.get_global_rank(self.group, target), group=self.group)
        _under_way.append((work, tensor))


def current_group() -> dist.ProcessGroup | None:
    """The process group over which torch's `context_parallel` splits sequences now; None outside its context.

    Raises:
        ValueError: this version of torch keeps the group elsewhere.
    """
    # in its context, torch replaces this function by a wrapper that knows the mesh
    attention = F.scaled_dot_product_attention
    if not isinstance(attention, types.FunctionType) or not (attention.__module__ or "").startswith(_TORCH):
        return None
    cells = [cell.cell_contents for cell in attention.__closure__ or ()]
    meshes = [found for found in cells if isinstance(found, dist.device_mesh.DeviceMesh)]
    if not meshes:
        raise UserError(f"torch {torch.__version__} splits sequences in a way that is not known; use 2.11 to 2.13")
    return meshes[0].get_group()


def scan_in_turn(mixer, parts: list[tuple[dict[str, Tensor], Tensor | None]], ranks: Pieces) -> list[Tensor]:
    """The outputs of a mixer's scan for this rank's pieces, one after the other.

    Args:
        parts: tokens and lengths of each piece, the arguments of `MemoryMixer.scan`.
    """
    outputs = []
    for place, (tokens, lengths) in zip(ranks.own(), parts, strict=True):
        some = next(iter(tokens.values()))
        layout = StateLayout.of(mixer, some.shape[0], some.dtype)
        anchor, states = _anchor(some, trains(mixer, tokens)), None
        source, target = ranks.rank_at(place - 1), ranks.rank_at(place + 1)
        if source is not None:
            # a learned first state gets the gradient zero here, not none: wrappers wait for all gradients
            first = layout.pack(mixer.initial_states(some.shape[0], some.device, some.dtype))
            states = layout.unpack(_Receive.apply(first, anchor, ranks, (mixer.layer_idx, place), source))
        y, new = mixer.scan(tokens, states, lengths=lengths)
        if target is not None:
            y = _Send.apply(y, layout.pack(new), anchor, ranks, (mixer.layer_idx, place, "sent"), target)
        outputs.append(y)
    return outputs


def trains(mixer, tokens: dict[str, Tensor]) -> bool:
    """Whether a gradient may flow through the layer. All ranks give the same answer, also where it does not reach."""
    tensors = (*tokens.values(), *mixer.parameters())
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The states of a layer as one flat tensor, in which a single message takes them to another rank."""

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, mixer, batch: int, dtype: torch.dtype) -> "StateLayout":
        """Of the states of `batch` sequences, with activations of `dtype`."""
        return cls(mixer.state_shapes(batch, dtype))

    @property
    def dtype(self) -> torch.dtype:
        """One that holds the values of all states exactly."""
        found = torch.float32
        for _, dtype in self.shapes.values():
            found = torch.promote_types(found, dtype)
        return found

    def pack(self, states: dict[str, Tensor]) -> Tensor:
        return torch.cat([states[name].reshape(-1).to(self.dtype) for name in self.shapes])

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [torch.Size(shape).numel() for shape, _ in self.shapes.values()]
        parts = zip(self.shapes.items(), flat.split(sizes), strict=True)
        return {name: part.view(shape).to(dtype) for (name, (shape, dtype)), part in parts}


def scan_at_once(mixer, parts: list[tuple[dict[str, Tensor], Tensor | None]], ranks: Pieces) -> list[Tensor]:
    """As `scan_in_turn`, for a mixer that is `linear` and pieces without padding.

    The states of the short convolutions are gathered first, because what a piece writes depends on them. The states
    before a piece follow from what all earlier pieces write, without a scan.
    """
    needs_grad = [trains(mixer, tokens) for tokens, _ in parts]
    ends = [_ends(mixer, tokens) for tokens, _ in parts]
    flat = [torch.cat([end.flatten() for end in found.values()]) for found in ends]
    gathered = ranks.gather((mixer.layer_idx, "ends"), flat, any(needs_grad))
    previous = torch.cat([torch.zeros_like(gathered[:1]), gathered[:-1]])
    before, writes = [], []
    for place, (tokens, _), found in zip(ranks.own(), parts, ends, strict=True):
        sizes = [end.numel() for end in found.values()]
        values = zip(found.items(), previous[place].split(sizes), strict=True)
        before.append({name: value.view_as(end) for (name, end), value in values})
        written, log_decay = mixer.piece_writes(tokens, before[-1])
        writes.append(torch.cat([written.flatten(2), log_decay[..., None].to(written.dtype)], -1))
    gathered = ranks.gather((mixer.layer_idx, "writes"), writes, any(needs_grad))
    memories = states_before(gathered[..., :-1].unflatten(-1, written.shape[2:]), gathered[..., -1])
    outputs = []
    for place, (tokens, _), states in zip(ranks.own(), parts, before, strict=True):
        outputs.append(mixer.scan(tokens, states | mixer.memory_states(memories[place]))[0])
    return outputs


def _ends(mixer, tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """The states [B, C, taps - 1] of the short convolutions after a piece: its last inputs."""
    return {name: x[:, x.shape[1] - taps :].mT for name, (x, taps) in mixer.convolved(tokens).items()}


@without_autocast
def states_before(written: Tensor, log_decays: Tensor) -> Tensor:
    """[P, B, H, K, V]: the state before each piece of S <- e^g S + W.

    Args:
        written: W [P, B, H, K, V], the state after each piece if the state before it is zero.
        log_decays: g <= 0 [P, B, H], the log of a piece's whole decay.
    """
    places = torch.arange(len(written), device=written.device)
    piece, earlier, between = places[:, None, None], places[:, None], places
    # each sum of its own terms: a difference of two long sums would round
    decays = ((earlier < between) & (between < piece)).to(log_decays.dtype)  # [piece, earlier, between]
    spans = torch.einsum("psu,ubh->psbh", decays, log_decays)
    weights = torch.where((earlier < piece)[..., None], spans.exp(), 0.0)
    return torch.einsum("psbh,sbhkv->pbhkv", weights, written)


@without_autocast
def decayed_sum(k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the tokens write, sum_t e^(g_{t+1} + ... + g_T) strength_t k_t v_t^T [B, H, K, V], and the whole decay
    g_1 + ... + g_T [B, H], in fp32 (fp64 for fp64). It is the last state of `chunk_gla`, whose outputs are not used.

    Args:
        k, v: [B, T, Hk, K] and [B, T, Hv, V], V <= 256; Hk divides H, and Hv is Hk or H. Head h reads key head
            h // (H / Hk), and so on.
        log_decay, strength: [B, T, H].
    """
    heads = log_decay.shape[2] if v.shape[2] == k.shape[2] else k.shape[2]  # of queries, as `chunk_gla` asks for them
    written = []
    for part in k.split(WIDEST_KEYS, -1):
        q = part.new_zeros(*part.shape[:2], heads, part.shape[3])
        written.append(chunk_gla(q, part.contiguous(), v, log_decay, strength)[1])
    return torch.cat(written, 2), log_decay.to(compute_dtype(k.dtype)).sum(1)


def _anchor(like: Tensor, trains: bool) -> Tensor:
    """An input for an autograd function, whose backward runs if `trains`, on all ranks alike."""
    return torch.zeros((), dtype=compute_dtype(like.dtype), device=like.device, requires_grad=trains)


class _Receive(torch.autograd.Function):
    """The states from the rank before, in the place of `first`; in backward their gradient goes to that rank."""

    @staticmethod
    def forward(ctx, first, anchor, ranks, key, source):
        ctx.ranks, ctx.source = ranks, source
        return ranks.receive(key, torch.empty_like(first), source).clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.ranks.send(grad.contiguous(), ctx.source)
        return torch.zeros_like(grad), None, None, None, None


class _Send(torch.autograd.Function):
    """y itself; the states go to the rank after, and in backward their gradient comes from it."""

    @staticmethod
    def forward(ctx, y, states, anchor, ranks, key, target):
        ctx.ranks, ctx.target = ranks, target
        ctx.states = {"size": states.shape, "dtype": states.dtype, "device": states.device}
        if key not in ranks.received:
            ranks.send(states.detach(), target)
            ranks.received[key] = states.new_empty(0)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        of_states = torch.empty(**ctx.states)
        dist.recv(of_states, dist.get_global_rank(ctx.ranks.group, ctx.target), group=ctx.ranks.group)
        return grad, of_states, None, None, None, None


class _Gather(torch.autograd.Function):
    """[ranks x rows, ...] from the rows [rows, ...] of each rank; in backward the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx, rows, anchor, ranks, key):
        ctx.ranks, ctx.rows = ranks, len(rows)
        if key not in ranks.received:
            parts = [torch.empty_like(rows) for _ in range(ranks.group.size())]
            dist.all_gather(parts, rows.contiguous(), group=ranks.group)
            ranks.received[key] = torch.cat(parts)
        return ranks.received[key].clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.ranks.group)
        return grad[ctx.ranks.rank * ctx.rows :][: ctx.rows], None, None, None
