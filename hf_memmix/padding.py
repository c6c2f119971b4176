"""Translates padding and packing into the two forms that all mixers understand: rows with a length, and `cu_seqlens`.

A padding mask of any pattern (left, right, holes) becomes rows whose valid tokens come first, in order. Packing by
`cu_seq_lens_q`, `seq_idx` or position ids that start again becomes boundaries over the flattened batch.

Shapes: B batch, T tokens of this forward, N packed sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils import is_torchdynamo_compiling


class PaddedRows(NamedTuple):
    """A stable reordering of each row that puts its valid tokens first; shapes stay static.

    One object serves all layers of a forward. It is a tuple, so that code which moves arguments between devices
    moves its tensors too.
    """

    mask: Tensor  # [B, T], True at valid tokens
    order: Tensor  # [B, T]: position in the row of the i-th token of the reordered row
    inverse: Tensor  # [B, T]
    lengths: Tensor  # [B], number of valid tokens

    @classmethod
    def of(cls, mask: Tensor) -> "PaddedRows":
        """The reordering by a mask [B, T], True or 1 at valid tokens."""
        mask = mask.to(torch.bool)
        order = torch.argsort(mask.logical_not().to(torch.int8), dim=1, stable=True)
        return cls(mask, order, torch.argsort(order, dim=1), mask.sum(1))

    def valid_first(self, x: Tensor) -> Tensor:
        """[B, T, C] or [B, T] with the valid tokens of each row first."""
        return x.gather(1, self.order if x.dim() == 2 else self.order[..., None].expand(-1, -1, x.shape[-1]))

    def restore(self, x: Tensor) -> Tensor:
        """Undo `valid_first`. Pads become zero, so no gradient passes through them."""
        x = x.gather(1, self.inverse[..., None].expand(-1, -1, x.shape[-1]))
        return x * self.mask[..., None].to(x.dtype)

    def part(self, start: int, stop: int) -> "PaddedRows":
        """The reordering of the tokens from `start` to before `stop`."""
        return PaddedRows.of(self.mask[:, start:stop])

    def lengths_after(self, count: int) -> Tensor:
        """[B]: how many of the row's first `count` tokens, in their original order, are valid."""
        return self.mask[:, :count].sum(1)


def before_the_end(lengths: Tensor, length: int) -> Tensor:
    """[B, T]: True at the first `lengths` [B] tokens of each row. A mixer must not write or decay at the others."""
    return torch.arange(length, device=lengths.device) < lengths[:, None]


def padding_of(attention_mask, batch: int, length: int, seen, static: bool) -> Tensor | None:
    """The padding mask [B, T] of this forward's tokens, or None if there is no padding.

    Args:
        attention_mask: None or a 2D mask of all tokens so far, the cached ones first.
        batch, length: B and T.
        seen: number of tokens in the cache; a tensor if the cache is static.
        static: whether the cache is static. Its mask may be wider: one column per place in the cache.

    Raises:
        ValueError: the mask has another shape, or entries that are negative or NaN, as an additive one.
    """
    if attention_mask is None:
        return None
    if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
        _refuse_additive(attention_mask, "attention_mask")
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        shape = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask of shape {shape}: memory layers need the 2D padding mask [batch, tokens]; pass it as"
            " attention_mask, or as memmix_mask beside a mask of your own"
        )
    width = attention_mask.shape[1]
    # in a compiled graph the count of a static cache is a tensor, and a mask that is too short fails as a wrong index
    known = isinstance(seen, int) or not is_torchdynamo_compiling()
    end = int(seen) + length if known else length
    if attention_mask.shape[0] != batch or (width < end if static else width != end):
        raise ValueError(
            f"padding mask of shape {list(attention_mask.shape)}, expected [{batch}, {'at least ' * static}{end}]: one"
            " entry for each cached and each new token"
        )
    if known:
        mask = attention_mask[:, end - length : end]
    else:
        columns = seen.to(attention_mask.device) + torch.arange(length, device=attention_mask.device)
        mask = attention_mask.index_select(1, columns)
    return _refuse_additive(none_if_full(mask), "attention_mask")


def _refuse_additive(mask: Tensor | None, name: str) -> Tensor | None:
    """The mask. Raises ValueError if an entry is negative or NaN: 0 would be a token then. Compiled graphs skip it."""
    if (
        mask is not None
        and mask.dtype != torch.bool
        and not is_torchdynamo_compiling()
        and not bool((mask >= 0).all())
    ):
        raise ValueError(f"{name} has negative entries or NaN: give the padding mask, 1 at tokens and 0 at pads")
    return mask


def check_new_mask(mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """A mask [B, T] of this forward's tokens, None if it is full. Raises ValueError as `padding_of`."""
    if mask is not None and mask.shape != (batch, length):
        raise ValueError(
            f"memmix_mask has shape {list(mask.shape)}, expected [{batch}, {length}]: one entry for each new token,"
            " none for the cached ones"
        )
    return _refuse_additive(none_if_full(mask), "memmix_mask")


def check_finite(inputs_embeds: Tensor):
    """Raise ValueError if an embedding [B, T, hidden] is NaN or infinite. Compiled graphs skip this check."""
    if is_torchdynamo_compiling() or bool(torch.isfinite(inputs_embeds).all()):
        return
    row, token = torch.isfinite(inputs_embeds).all(-1).logical_not().nonzero()[0].tolist()
    raise ValueError(
        f"inputs_embeds has NaN or infinite entries, the first in row {row} at token {token}: a memory would carry"
        " them to every later token. Check how the embeddings were computed"
    )


def none_if_full(mask: Tensor | None, always: bool = False) -> Tensor | None:
    """None for a mask without pads, because this common case is faster. In a compiled graph the mask is returned.

    always: also in a compiled graph, which breaks there or fails with fullgraph=True, because it depends on values.
    """
    if mask is None or ((always or not is_torchdynamo_compiling()) and _is_full(mask)):
        return None
    return mask


def _is_full(mask: Tensor) -> bool:
    """Whether all are tokens. Negative entries, as of an additive mask, are not, so that they are seen and refused."""
    return bool((mask if mask.dtype == torch.bool else mask > 0).all())


def packing_of(cu_seq_lens_q, seq_idx, position_ids, batch: int, length: int) -> Tensor | None:
    """Boundaries [N + 1] over the B * T flattened tokens, or None if every row is one sequence.

    Args:
        cu_seq_lens_q: boundaries [N + 1], as the flattening data collators make them.
        seq_idx: index of the sequence of each token [B, T].
        position_ids: [B or 1, T]; a position that does not follow its predecessor starts a sequence. Give None if
            they do not describe packing (with a cache or a padding mask).

    Raises:
        ValueError: `cu_seq_lens_q` does not rise from 0 to B * T over the starts of all rows, or `seq_idx` has another
            shape.
    """
    if cu_seq_lens_q is not None:
        if not is_torchdynamo_compiling():
            bounds, tokens = cu_seq_lens_q.flatten().tolist(), batch * length
            rows = range(0, tokens + 1, max(length, 1))
            if cu_seq_lens_q.ndim != 1 or bounds != sorted(bounds) or bounds[-1:] != [tokens] or {*rows} - {*bounds}:
                shown = bounds if len(bounds) < 10 else [*bounds[:3], "...", *bounds[-3:]]
                raise ValueError(
                    f"cu_seq_lens_q is {shown}, but there are {batch} x {length} tokens; it must be one-dimensional,"
                    " start at 0, hold the start of every row and packed sequence in order, and end at the number of"
                    " tokens"
                )
        return cu_seq_lens_q
    if seq_idx is not None:
        if seq_idx.shape != (batch, length):
            raise ValueError(f"seq_idx has shape {list(seq_idx.shape)}, expected [{batch}, {length}]")
        return _boundaries(seq_idx.diff(dim=1) != 0)
    if position_ids is not None and position_ids.ndim == 2 and length > 1:
        starts = position_ids.expand(batch, -1).diff(dim=1) != 1
        # depends on values: torch.compile breaks the graph here, or fails with fullgraph=True, but no sequence leaks
        # silently
        if bool(starts.any()):
            return _boundaries(starts)
    return None


def check_one_sequence(position_ids, mask: Tensor | None, cached: bool):
    """Raise ValueError if `position_ids` describe packed sequences beside a padding mask or a cache.

    Pads may have any position. With a cache, positions may leave some out, but not start again. Compiled graphs with a
    cache skip this check.

    Args:
        position_ids: [B or 1, T], or None.
        mask: the padding mask [B, T], or None.
        cached: whether there is a cache.
    """
    if position_ids is None or position_ids.ndim != 2 or (cached and is_torchdynamo_compiling()):
        return
    steps = position_ids.diff(dim=1)
    starts = steps <= 0 if cached else steps != 1
    if mask is not None:
        valid = mask.to(starts.device, torch.bool)
        starts = starts & valid[:, 1:] & valid[:, :-1]
    if not bool(starts.any()):
        return
    row, token = starts.nonzero()[0].tolist()
    before, here = position_ids[min(row, len(position_ids) - 1), token : token + 2].tolist()
    raise ValueError(
        f"position_ids of row {row} go from {before} to {here} at token {token + 1}, which starts a packed sequence,"
        f" and packed sequences cannot be combined with {'a cache' if cached else 'a padding mask'}: drop one of the"
        " two, or give positions that rise by one over the tokens of a row"
    )


def leading_pads(mask: Tensor, start, before: Tensor | None) -> Tensor:
    """[B, 1]: how many more pads lie before the first token of a row, by the mask [B, T] of the tokens after `start`.

    Args:
        start: the number of tokens before the first column, an integer or a tensor.
        before: [B, 1], how many of these are pads before the first token of the row; None: none.
    """
    pads = (mask.bool().cumsum(1) == 0).sum(1, keepdim=True)
    before = torch.zeros_like(pads) if before is None else before
    return torch.where(before == start, pads, 0)  # after a token, no pad is before the first one


def positions_from_the_first_token(mask: Tensor | None, layer, tokens: Tensor) -> Tensor | None:
    """Position ids [B, T] that count from the first token of each row, or None if there are no pads.

    The library's forward counts from the first column. To attention with rotary embeddings this makes no difference,
    but the start of a memory may have a place: the learned first state of Lattice does not turn with the keys. Pads
    after the first token are counted, as the library does. The cache of a model without memory layers does not count
    its pads, so such a model must leave the positions to the library.

    Args:
        mask: the padding mask [B, T] of this forward's tokens, or None.
        layer: a memory layer of the cache, or None if there is no cache.
        tokens: ids [B, T] or embeddings [B, T, hidden]; the positions are on their device.
    """
    hidden = None if layer is None else layer.hidden
    if mask is None and hidden is None:
        return None
    device = tokens.device  # layers, and so their counts, may be on another one
    seen = 0 if layer is None else layer.seen
    seen = seen.to(device) if isinstance(seen, Tensor) else seen
    before = None if hidden is None else hidden[:, 3:].to(device)
    pads = 0 if before is None else before
    if mask is not None:
        pads = pads + leading_pads(mask.to(device), seen, before)
    return (seen + torch.arange(tokens.shape[1], device=device) - pads).clamp_min(0)


def _boundaries(starts: Tensor) -> Tensor:
    """Boundaries from [B, T - 1] flags of the tokens that start a sequence; every row starts one."""
    starts = torch.nn.functional.pad(starts, (1, 0), value=True).flatten()
    first = starts.nonzero()[:, 0]
    return torch.cat([first, first.new_tensor([starts.numel()])]).to(torch.int32)


def positions_in(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Position ids [B, T] that start at 0 in every packed sequence."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return (tokens - cu_seqlens[sequence]).view(batch, length).long()
