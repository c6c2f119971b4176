"""How much of the output of an attention comes from outside a window.

    share_t = |sum_{s <= t - tokens, s >= first} p_ts v_s|^2 / |sum_s p_ts v_s|^2

p are the weights of the whole attention, and a vector has the channels of all heads. A token whose attention reads
only the last `tokens`, and the `first` ones of its document, has the share 0.

Shapes: B batch, H query heads, Hk key/value heads, T tokens, D head size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_memmix._transformers import MASKED_ATTENTION, attention_computed_by, attention_implementation
from hf_memmix.errors import UserError

ROWS = 128  # queries at a time: their scores with all keys are in memory


class Near(NamedTuple):
    """What a window reads: the last `tokens`, and the `first` tokens of the document."""

    tokens: int
    first: int = 0


@torch.no_grad()
def shares_from_outside(
    attention: nn.Module, args: tuple, kwargs: dict, near: Near, position_ids: Tensor | None = None
) -> Tensor:
    """The share [B, T] in fp32 of each token, of one attention of a transformer. It costs one more attention.

    args, kwargs: what the attention was called with, without a cache.
    position_ids: [B, T], from 0 in every packed document; None: each row is a document.

    Raises:
        UserError: the family computes its attention by itself, and not by transformers' attention functions, or the
            implementation has no masks.
    """
    check_far(attention)
    found = []

    def compute(module, query, key, value, attention_mask, **options):
        options.pop("position_ids", None)
        found.append(share_from_outside(query, key, value, attention_mask, near, position_ids, **options))
        return query.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value.shape[-1]), None

    with attention_computed_by(attention.config, compute):
        attention.forward(*args, **kwargs)
    if not found:
        raise UserError(
            f"{type(attention).__name__} computes its attention by itself, so what it takes from outside a window is"
            " not known; set far_weight to 0"
        )
    return found[0]


def check_far(attention: nn.Module) -> None:
    """Raise UserError if the attention of a transformer has no masks."""
    found = attention_implementation(attention.config) if hasattr(attention, "config") else ""
    if found not in MASKED_ATTENTION:
        raise UserError(
            f"far_weight reads the masks of the teacher's attention, which {found!r} does not have; load the teacher"
            " with attn_implementation sdpa, or set far_weight to 0"
        )


def share_from_outside(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    near: Near,
    position_ids: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_,
) -> Tensor:
    """The share [B, T] from q [B, H, T, D], k and v [B, Hk, T, D], which are rotated.

    Args:
        mask: [B or 1, H or 1, T, T], boolean (true is visible) or added to the scores; None: causal.
        position_ids: as `shares_from_outside` takes them.
        scaling: factor of the scores; None is D^-1/2.
        softcap, s_aux, position_bias: as transformers' attention functions take them: a cap of the scores, logits [H]
            of sinks, and a bias of the scores.
    """
    heads, length = query.shape[1:3]
    key, value = (t.repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    places = torch.arange(length, device=query.device)
    later = (places[None] if position_ids is None else position_ids) >= near.first
    shares = []
    for first in range(0, length, ROWS):
        seen = min(first + ROWS, length)
        ages = places[first:seen, None] - places[:seen]
        scores = (query[:, :, first:seen] @ key[:, :, :seen].mT).float() * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        for bias in (mask, position_bias):
            if bias is not None:
                part = bias[..., first:seen, :seen]
                scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        scores = scores.masked_fill(ages < 0, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., :seen].to(value.dtype)
        far = weights * ((ages >= near.tokens) & later[:, None, None, :seen])
        outside, whole = ((part @ value[:, :, :seen]).float().square().sum((1, 3)) for part in (far, weights))
        shares.append(outside / whole.clamp_min(1e-12))
    return torch.cat(shares, 1).clamp_max(1)
