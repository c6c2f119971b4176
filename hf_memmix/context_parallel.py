"""Context parallelism: the tokens of every sequence are split over several processes.

The door is the library's own: `ParallelismConfig(cp_size=...)` of accelerate, or torch's `context_parallel`, in whose
context a model with mixers finds the process group. Kept attention layers are torch's ring attention there. Mixers
pass their states on, see `mixers.ranks`. How the tokens are split is read from `position_ids`, which count over the
whole sequence.
"""

import functools
import sys
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._transformers import attention_implementation
from .backbones import window_of
from .errors import UserError
from .mixers import ATTENTION, MemoryMixer
from .mixers.ranks import Piece, Pieces, current_group

__all__ = [
    "current_group",
    "keep_fp32_weights",
    "keep_masks",
    "keep_order",
    "refuse_pooling",
    "refuse_sequence_parallelism",
    "split_loss",
    "split_of",
]

MAX_PIECES = 2  # of one rank; torch's balance for causal attention gives a rank its part from the front and the end
NO_TOKENS = -1  # told in place of the number of pieces
# the hook of accelerate that drops masks, and the modules to which it is attached
_DROPS_MASKS, _HOOKED = "_self_attn_pre_forward_hook", "self_attn"
# where DeepSpeed keeps the group of its sequence parallelism: a module, and its variable
_ULYSSES, _ULYSSES_GROUP = "deepspeed.runtime.sequence_parallel.parallel_state_sp", "_SEQUENCE_PARALLEL_GROUP"

_ONE_SEQUENCE = (
    "split position_ids of the whole sequence like input_ids, and give one sequence per row: packed sequences cannot"
    " be split over processes"
)


def keep_order(keep: bool = True):
    """Let torch give every rank one stretch of consecutive tokens (or not, with False).

    By default, rank r of R holds the parts r and 2 R - 1 - r of 2 R, which balances causal attention. For mixers that
    work in turn (Lattice, COFFEE, SKA) one stretch is faster, and nothing is to be balanced in a model without
    attention. Call it once in every process.
    """
    from torch.distributed.tensor.experimental import _attention

    _attention._cp_options.enable_load_balance = not keep


class InsideOnly:
    """accelerate's hook of an attention module, which drops its mask: inside of the context only, never of a mixer.

    accelerate attaches its hook once, in `prepare`. Outside of the context, kept attention layers would then attend to
    padding, across packed sequences and to later tokens. A mixer never needs it: it would lose how its tokens lie,
    which some families hand over in place of the mask (`layout_hooks`).
    """

    def __init__(self, hook: Callable):
        self.hook = hook

    def __call__(self, module, args, kwargs):
        if isinstance(module, MemoryMixer) or current_group() is None:
            return None  # the arguments stay as they are
        return self.hook(module, args, kwargs)


def keep_masks(layers: Iterable[nn.Module]):
    """Wrap the hooks with which accelerate drops the masks of decoder layers in `InsideOnly`."""
    for layer in layers:
        attention = getattr(layer, _HOOKED, None)
        hooks = () if attention is None else attention._forward_pre_hooks
        for key in list(hooks):
            if getattr(hooks[key], "__name__", "") == _DROPS_MASKS:  # a hook may be an object without a name
                _wrap(hooks, key)


@torch.compiler.disable  # torch.compile cannot trace a change of the hooks; it traces the changed ones after this
def _wrap(hooks, key):
    hooks[key] = InsideOnly(hooks[key])


def refuse_sequence_parallelism():
    """Raise ValueError if DeepSpeed splits the sequences of training (`ParallelismConfig(sp_size=...)`).

    Its attention gathers all tokens, but every mixer would begin anew in each process.
    """
    state = sys.modules.get(_ULYSSES)
    group = getattr(state, _ULYSSES_GROUP, None)
    if group is not None and (size := group.size()) > 1:
        raise UserError(
            f"sequence parallelism of DeepSpeed (sp_size={size}) splits sequences, and a mixer would begin anew in"
            f" each process; give ParallelismConfig(cp_size={size}) instead, with FSDP"
        )


def keep_fp32_weights(accelerator):
    """Let FSDP2 give the forward the fp32 weights that it holds; autocast still multiplies matrices in bf16.

    With mixed precision, accelerate tells FSDP2 to cast all weights for the forward, and all gradients, to bf16. That
    rounds the decays of a memory, which a mixer declares to need fp32 (`fp32_parameters`). Call it after the
    `Accelerator` or the `Trainer` (`trainer.accelerator`) is made, and before training. Without FSDP2 it does nothing.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2:
        plugin.mixed_precision_policy = None


def split_loss(loss):
    """The loss function of a causal language model, for labels that are split like the tokens.

    The library would shift the labels of each part, so the last token of a part would have no label or a wrong one.
    """

    @functools.wraps(loss)
    def checked(*args, **kwargs):
        if kwargs.get("shift_labels") is None:
            raise UserError(
                "labels are split over several processes, so the label of the last token of a part is in another"
                " part: shift the whole labels by one token, give them as shift_labels beside labels, and name both"
                " among the buffers of the context"
            )
        return loss(*args, **kwargs)

    return checked


def refuse_pooling(model, args):
    """Hook of a model that gives one answer for a whole sequence: raise ValueError where the sequences are split."""
    if current_group() is not None:
        raise UserError(
            f"{type(model).__name__} gives one answer for a sequence, of which no process has all tokens under context"
            " parallelism; call it outside of its context, or split the sequences of a causal language model"
        )


def check_attention(config):
    """Raise ValueError if kept attention layers would not become torch's ring attention, and see one part only."""
    found = attention_implementation(config)
    if ATTENTION in config.mixer_types and found != "sdpa":
        raise UserError(
            f"kept attention layers with attn_implementation={found!r} see only the tokens of their own process under"
            " context parallelism; load the model with attn_implementation='sdpa', or convert all layers"
        )


def check_windows(config, tokens: int):
    """Raise ValueError if a kept attention layer has a window, which ring attention ignores, below `tokens`."""
    for i, kind in enumerate(config.mixer_types):
        window = window_of(config, i) if kind == ATTENTION else None
        if window is not None and window < tokens:
            raise UserError(
                f"the kept attention of layer {i} has a sliding window of {window} tokens, which ring attention"
                f" ignores, and the sequences have {tokens}; give at most {window}, or convert the layer"
            )


def split_of(
    group: dist.ProcessGroup,
    config,
    mixers: Iterable[MemoryMixer],
    position_ids: Tensor | None,
    length: int,
    padded: bool,
) -> Pieces:
    """How the sequences of this forward are split. All ranks call it, and raise the same errors.

    Args:
        config: the configuration of the model, `mixers` its mixers.
        position_ids: positions [B or 1, T] of this rank's tokens in the whole sequence.
        length: T.
        padded: whether there are pads among this rank's tokens.

    Raises:
        ValueError: position_ids are missing, do not count over one whole sequence, or differ between the rows; a rank
            has no tokens, or not in their order; a layer cannot be split; there is padding and a kept attention layer,
            which would read it.
    """
    for mixer in mixers:
        mixer.check_split()
    check_attention(config)
    if position_ids is None or position_ids.ndim != 2:
        raise UserError(
            "context parallelism needs position_ids [B, T] of the whole sequence, split like input_ids: the order of"
            " the tokens is read from them"
        )
    runs = _runs(position_ids, length)
    every_rank = _tell(group, [len(runs) if length else NO_TOKENS, int(padded)], runs, position_ids.device)
    padded = any(found[1] for found in every_rank)
    if padded and ATTENTION in config.mixer_types:
        raise UserError(
            "the sequences have padding, which the ring attention of the kept attention layers cannot hide; give rows"
            " without padding, or convert all layers"
        )
    placed = [pair for rank, found in enumerate(every_rank) for pair in _pieces_of(rank, found, group.size())]
    placed.sort(key=lambda pair: pair[0])
    _check_order(placed)
    check_windows(config, sum(piece.stop - piece.start for _, piece in placed))
    return Pieces(group, tuple(piece for _, piece in placed), padded)


def _tell(group: dist.ProcessGroup, head: list[int], runs: list[tuple[int, int]], device) -> list[list[int]]:
    """What every rank tells: the two numbers of `head`, and then first position and tokens of its runs, with zeros."""
    numbers = [*head, *(number for run in runs[:MAX_PIECES] for number in run)]
    numbers += [0] * (2 + 2 * MAX_PIECES - len(numbers))
    mine = torch.tensor(numbers, device=device)
    every_rank = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every_rank, mine, group=group)
    return [found.tolist() for found in every_rank]


def _pieces_of(rank: int, told: list[int], ranks: int) -> list[tuple[int, Piece]]:
    """The pieces of a rank, each with its first position in the sequence, from what the rank has told."""
    count, numbers = told[0], told[2:]
    if count == NO_TOKENS:
        raise UserError(
            f"rank {rank} has no tokens: the sequences are too short to be split over {ranks} processes; pad them or"
            " use fewer processes"
        )
    if not 1 <= count <= MAX_PIECES:
        raise UserError(f"position_ids of rank {rank} start again, or differ between the rows; {_ONE_SEQUENCE}")
    firsts = numbers[0 : 2 * count : 2]
    if firsts != sorted(firsts):
        raise UserError(
            f"position_ids of rank {rank} go back to {firsts[1]} after a part from {firsts[0]}; give the tokens in the"
            f" order of the sequence, and {_ONE_SEQUENCE}"
        )
    pieces, start = [], 0
    for first, tokens in zip(firsts, numbers[1 : 2 * count : 2], strict=True):
        pieces.append((first, Piece(start, start + tokens, rank)))
        start += tokens
    return pieces


def _check_order(placed: list[tuple[int, Piece]]):
    """Raise ValueError unless pieces, in the order of their first positions, cover one sequence without a gap."""
    for (first, piece), (following, _) in zip(placed, placed[1:], strict=False):
        if first + piece.stop - piece.start != following:
            raise UserError(
                f"position_ids of the ranks do not follow each other: {piece.stop - piece.start} tokens from position"
                f" {first}, and then position {following}; {_ONE_SEQUENCE}"
            )


def _runs(position_ids: Tensor, length: int) -> list[tuple[int, int]]:
    """First position and number of tokens of every stretch of consecutive positions; none if the rows differ."""
    if length == 0 or position_ids.shape[1] != length or bool((position_ids != position_ids[:1]).any()):
        return []
    positions = position_ids[0]
    starts = [0, *((positions.diff() != 1).nonzero()[:, 0] + 1).tolist()]
    ends = [*starts[1:], length]
    return [(int(positions[start]), end - start) for start, end in zip(starts, ends, strict=True)]
