"""What the forward of a base model was called with, and how its tokens lie: split over processes, packed, or in rows.

`MemMixModel.forward` takes its arguments apart with these functions. `lay_out` gives the arguments of the library's
forward, and the `TokenLayout` for the layers.

Shapes: B batch, T tokens of this forward, N packed sequences.
"""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import is_torchdynamo_compiling

from ._generation_hooks import CACHE
from .cache import adopt_cache, check_hidden, check_rows, static_length_of
from .context_parallel import current_group, split_of
from .errors import UserError
from .given_cache import cache_among
from .mixers import ATTENTION
from .padding import (
    PaddedRows,
    check_finite,
    check_new_mask,
    check_one_sequence,
    none_if_full,
    packing_of,
    padding_of,
    positions_from_the_first_token,
    positions_in,
)
from .swap import memory_mixers
from .token_layout import TokenLayout


class ModelInputs(NamedTuple):
    """The arguments of a forward that depend on each other."""

    tokens: Tensor  # ids [B, T] or embeddings [B, T, hidden]
    attention_mask: Tensor | None
    position_ids: Tensor | None
    cache: Cache | None
    use_cache: bool | None

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


# ---- single arguments


def take_cache(past_key_values: Cache | None, arguments: dict) -> Cache | None:
    """The cache that a forward got; it is taken out of the arguments.

    Raises:
        ValueError: it is given under both of its names.
        RuntimeError: it has a name that no layer would read.
    """
    if (named := arguments.pop("cache", None)) is not None:
        if past_key_values is not None:
            raise UserError("cache and past_key_values are two names of one argument: give one of them")
        past_key_values = named
    cache_among(arguments, (CACHE,))
    return past_key_values


def fit_cache(cache: Cache, config, batch: int, checkpoints: bool):
    """Make a cache fit the model and its `batch` rows, in place.

    Raises:
        ValueError: it does not fit, or activations are checkpointed.
    """
    if checkpoints:
        raise UserError(
            "gradient checkpointing in train mode runs the layers without their cache, which would neither be read nor"
            " filled: call model.eval() or model.gradient_checkpointing_disable(), or leave past_key_values out"
        )
    adopt_cache(cache, config)
    check_rows(cache, batch)


def tokens_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The tokens [B, T] or [B, T, hidden]. Raises ValueError unless exactly one is given, with finite tokens in it."""
    if inputs_embeds is not None:
        check_finite(inputs_embeds)
    if (input_ids is None) == (inputs_embeds is None):
        raise UserError("give either input_ids or inputs_embeds")
    tokens = input_ids if input_ids is not None else inputs_embeds
    batch, length = tokens.shape[:2]
    # of split sequences a process may have no token, and all processes must raise the error: `split_of`
    if batch == 0 or (length == 0 and current_group() is None):
        raise UserError(f"the input has no tokens: {batch} rows of {length}; give at least one row of one token")
    return tokens


def mask_of(inputs: ModelInputs, config, arguments: dict) -> Tensor | None:
    """The padding mask [B, T] of the tokens, or None if all are real; `memmix_mask` is taken out of the arguments.

    Raises:
        ValueError: it has a wrong shape, or hides other tokens of the cache than those that were pads.
    """
    batch, length = inputs.batch, inputs.length
    if "memmix_mask" in arguments:
        return check_new_mask(arguments.pop("memmix_mask"), batch, length)
    given, cache = inputs.attention_mask, inputs.cache
    seen = 0 if cache is None else cache.get_seq_length()
    mask = padding_of(given, batch, length, seen, static_length_of(cache) is not None)
    # states never contain pads, but attention layers would read the pads if the mask is missing
    if given is not None or ATTENTION in config.mixer_types:
        check_hidden(cache, given)
    return mask


# ---- how the tokens lie


def lay_out(inputs: ModelInputs, mask: Tensor | None, model, arguments: dict) -> tuple[ModelInputs, TokenLayout]:
    """The inputs for the library's forward, and the layout for the layers; `seq_idx` is taken out of the arguments.

    Args:
        mask: from `mask_of`.
        model: the base model.
        arguments: may have `cu_seq_lens_q` [N + 1] and `seq_idx` [B, T].

    Raises:
        ValueError: mask, positions, packing, cache and context parallelism do not fit together.
    """
    cu_seq_lens_q, seq_idx = arguments.get("cu_seq_lens_q"), arguments.pop("seq_idx", None)
    if (group := current_group()) is not None:
        if inputs.cache is not None or inputs.use_cache or cu_seq_lens_q is not None or seq_idx is not None:
            raise UserError(
                "context parallelism cannot be combined with packed sequences or a cache: give one sequence per row,"
                " with use_cache=False, and call generate() outside of its context"
            )
        return _split(inputs, mask, model, group)
    may_be_packed = any(given is not None for given in (inputs.position_ids, cu_seq_lens_q, seq_idx))
    if is_torchdynamo_compiling() and may_be_packed and inputs.cache is None and inputs.length > 1:
        mask = none_if_full(mask, always=True)  # beside a mask of ones they are read
    anew = mask is None and inputs.cache is None  # positions may describe packing
    if inputs.length > 1 and not anew:
        check_one_sequence(inputs.position_ids, mask, inputs.cache is not None)
    positions = inputs.position_ids if anew else None
    boundaries = packing_of(cu_seq_lens_q, seq_idx, positions, inputs.batch, inputs.length)
    return _in_rows(inputs, mask, model.config) if boundaries is None else _packed(inputs, mask, boundaries)


def _split(
    inputs: ModelInputs, mask: Tensor | None, model, group: dist.ProcessGroup
) -> tuple[ModelInputs, TokenLayout]:
    if _is_own(inputs.attention_mask):
        raise UserError(
            "context parallelism cannot split an attention_mask of your own: give the 2D padding mask, or none"
        )
    mixers, positions = memory_mixers(model).values(), inputs.position_ids
    ranks = split_of(group, model.config, mixers, positions, inputs.length, mask is not None)
    # without a mask, the library takes positions that jump for packed sequences and makes a mask of [T, T]
    every_token = positions.new_ones(inputs.batch, inputs.length)
    rows = None if mask is None else PaddedRows.of(mask)
    return ModelInputs(inputs.tokens, every_token, positions, None, False), TokenLayout(rows, ranks=ranks)


def _packed(inputs: ModelInputs, mask: Tensor | None, boundaries: Tensor) -> tuple[ModelInputs, TokenLayout]:
    own = inputs.attention_mask if _is_own(inputs.attention_mask) else None
    if own is None and mask is None:  # it may have pads beside a `memmix_mask` without any
        mask = none_if_full(inputs.attention_mask, always=True)
    if mask is not None or inputs.cache is not None or inputs.use_cache:
        what = "a padding mask" if mask is not None else "a cache"
        raise UserError(f"packed sequences cannot be combined with {what}; drop one of the two")
    positions = inputs.position_ids
    if positions is None:  # by which kept attention layers recognise packed sequences
        positions = positions_in(boundaries, inputs.batch, inputs.length)
    return ModelInputs(inputs.tokens, own, positions, None, False), TokenLayout(cu_seqlens=boundaries)


def _is_own(mask) -> bool:
    """Whether the user has made the mask of the attention layers; a padding mask [B, tokens] is for all layers."""
    return mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2)


def _in_rows(inputs: ModelInputs, mask: Tensor | None, config) -> tuple[ModelInputs, TokenLayout]:
    positions = inputs.position_ids
    if positions is None and config.memory_layers:
        layer = None if inputs.cache is None else inputs.cache.memmix.layer
        positions = positions_from_the_first_token(mask, layer, inputs.tokens)
    rows = None if mask is None else PaddedRows.of(mask)  # sorted once for all layers
    inputs = ModelInputs(inputs.tokens, inputs.attention_mask, positions, inputs.cache, inputs.use_cache)
    return inputs, TokenLayout(rows)
