"""The torch path of a window: softmax attention over the last tokens, and over the first tokens of the sequence.

    y_t = sum_s softmax(scale q_t k_s) v_s  over  t - window < s <= t  and  s < sinks

Time and memory are linear in the number of tokens. Long sequences are cut into blocks of queries, each of which reads
a short range of keys; torch's scaled dot product attention computes all blocks at once.

Shapes: B batch, T tokens, N packed sequences, H query heads, Hk key/value heads, D head size, S sinks, W window.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# not as an attribute of F: within torch's context parallelism that is attention over the tokens of all ranks, but the
# states of a window go from rank to rank
from torch.nn.functional import scaled_dot_product_attention

from .._common import compute_dtype
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import Reach, Sizes, States, Tokens, Upstream

SMALLEST_BLOCK = 64  # queries; shorter blocks would waste the time of a matrix product

State = tuple[Tensor, Tensor, Tensor]  # keys, values, tokens so far


class Scores(NamedTuple):
    """What happens to the scores before the softmax.

    Args:
        scale: factor of q k; None for D^-1/2.
        softcap: c in c tanh(scores / c); None for no cap.
        sink_logits: [H], a further logit per head that takes a share of the softmax and adds no value; None for none.
    """

    scale: float | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None


class Reads(NamedTuple):
    """Which keys a query reads, the last `window` ones and the first `sinks` ones, and how."""

    window: int
    sinks: int
    scores: Scores


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores, mask: Tensor | None = None) -> Tensor:
    """y [B, H, Tq, D] of q [B, H, Tq, D] and k, v [B, Hk, Tk, D].

    `mask`: bool, broadcast to [B, H, Tq, Tk]; true where a query reads a key, at least once per query. None: causal,
    and Tq = Tk.
    """
    grouped = q.shape[1] != k.shape[1]
    if scores.softcap is None and scores.sink_logits is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = (q @ k.mT) * (q.shape[-1] ** -0.5 if scores.scale is None else scores.scale)
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    wide = compute_dtype(logits.dtype)
    if scores.sink_logits is not None:
        sink = scores.sink_logits.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sink], -1).softmax(-1, dtype=wide)[..., :-1]
    else:
        weights = logits.softmax(-1, dtype=wide)
    return weights.to(v.dtype) @ v


def window_attention(
    x: Tokens, reads: Reads, state: State | None = None, after: State | None = None, firsts: Tensor | None = None
) -> Tensor:
    """y [B, T, H, D] of q [B, T, H, D] and k, v [B, T, Hk, D].

    Args:
        state: `window_states` before these tokens; None at the begin of the sequences.
        after: `window_states` after them; needed with `state`.
        firsts: [T], B = 1: the place of the first token of each token's packed sequence; without `state` and sinks.
    """
    (q, k, v), (window, sinks, scores) = x, reads
    batch, length = q.shape[:2]
    if not length:
        return torch.empty_like(q)
    if state is None and firsts is None and length <= window:
        return attend(*(t.transpose(1, 2) for t in x), scores).transpose(1, 2)
    if state is None:
        seen = q.new_zeros(1, dtype=torch.long)
        firsts_of = [x[:, :sinks] for x in (k, v)]
        before = [x.new_zeros(batch, window - 1, *x.shape[2:]) for x in (k, v)]
        same = firsts is None
    else:
        seen, same = state[2][:, 0], False
        firsts_of = [x[:, :sinks] for x in after[:2]]
        before = in_order(state, window, sinks)
    return _in_blocks(x, reads, before, firsts_of, seen, firsts, same)


@flat(Tokens, Reach)
def window_fwd_torch(x: Tokens, reach: Reach) -> tuple[Tensor, Tensor]:
    """What `window_fwd_triton` computes, without the logarithms of the sums."""
    (q, k, v), (firsts, window, scale, softcap) = x, reach
    reads, before = Reads(window, 0, Scores(scale, softcap)), k.shape[1] - q.shape[1]
    if not before:
        o = window_attention(x, reads, firsts=None if firsts is None else firsts[0])
    else:
        parts = [t.split([before, q.shape[1]], 1) for t in (k, v)]
        past, (k, v) = ([part[i] for part in parts] for i in (0, 1))
        seen = window - 1 - firsts[:, 0]
        o = _in_blocks(Tokens(q, k, v), reads, past, None, seen, None, False)
    return o.contiguous(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=compute_dtype(q.dtype))


@flat(Upstream, Tokens, Reach)
def window_bwd_torch(upstream: Upstream, x: Tokens, reach: Reach) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; the forward pass is computed again."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in x]
        o, _ = window_fwd_torch(*leaves, *reach)
        return torch.autograd.grad(o, leaves, upstream.do)


def _in_blocks(tokens: Tokens, reads: Reads, before, firsts_of, seen, firsts, same: bool) -> Tensor:
    """`window_attention` by blocks of queries.

    Args:
        before: keys and values [B, W - 1, Hk, D] before those of the queries.
        firsts_of: keys and values of the sinks [B, S, Hk, D].
        seen: how many tokens stand before the queries, [B] or [1].
        same: whether all blocks but the first have the same mask.
    """
    (q, k, v), (window, sinks, scores) = tokens, reads
    length, block = q.shape[1], max(window + sinks, SMALLEST_BLOCK)
    count = -(-length // block)
    fill = count * block - length
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, fill)) for x in (q, k, v))
    # a block of C queries reads the window - 1 tokens before it and its own
    q = q.unflatten(1, (count, block)).transpose(2, 3)
    k, v = (torch.cat(parts, 1).unfold(1, window - 1 + block, block).mT for parts in zip(before, (k, v), strict=True))
    if sinks:
        k, v = (
            torch.cat([x[:, None].expand(-1, count, -1, -1, -1).transpose(2, 3), blocks], 3)
            for x, blocks in zip(firsts_of, (k, v), strict=True)
        )
    starts = seen[:, None] + torch.arange(count, device=q.device) * block
    if same and count > 2:
        mask = _mask(starts[:, :2], block, window, sinks)
        outputs = [
            _attend_blocks(*(x[:, :1] for x in (q, k, v)), mask[:, :1], scores),
            _attend_blocks(*(x[:, 1:] for x in (q, k, v)), mask[:, 1:], scores),
        ]
        y = torch.cat(outputs, 1)
    else:
        y = _attend_blocks(q, k, v, _mask(starts, block, window, sinks, firsts), scores)
    return y.transpose(2, 3).flatten(1, 2)[:, :length]


def window_states(state: State | None, k: Tensor, v: Tensor, ends: Tensor, window: int, sinks: int) -> State:
    """The keys and values that later tokens can read, after the first `ends` [B] of the tokens k, v [B, T, Hk, D].

    Returns:
        keys and values [B, S + W, Hk, D], and the number of tokens so far [B, Hk], int64. The first S tokens of a
        sequence fill the first slots, then token p stands in slot S + (p - S) mod W.
    """
    slots = torch.arange(sinks + window, device=k.device)
    seen = torch.zeros_like(ends) if state is None else state[2][:, 0]
    after = (seen + ends)[:, None]
    # the last token that belongs to each slot, as its place among the new tokens; negative if that holds no new one
    token = torch.where(slots < sinks, slots, after - 1 - (after - 1 - slots) % window)
    exists = (token < after) & ((token < sinks) == (slots < sinks))
    place = torch.where(exists, token - seen[:, None], -1)
    old = (None, None) if state is None else state
    return _taken(old[0], k, place), _taken(old[1], v, place), after.expand(-1, k.shape[2]).contiguous()


def last_of_packed(k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int) -> State:
    """`window_states` [N, ...] at the end of packed sequences, without sinks; k, v [1, T, Hk, D]."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    slots = torch.arange(window, device=k.device)
    token = ends[:, None] - 1 - (ends[:, None] - 1 - slots) % window
    place = torch.where(token >= 0, starts[:, None] + token, -1).flatten()[None]
    keys, values = (_taken(None, x, place)[0].unflatten(0, (-1, window)) for x in (k, v))
    return keys, values, ends[:, None].expand(-1, k.shape[2]).contiguous()


@torch.no_grad()
@flat(Tokens, States, Sizes)
def window_step_torch(x: Tokens, states: States, sizes: Sizes) -> Tensor:
    """o [B, 1, H, D] of one token; the states, or their pages, change in place."""
    (q, k, v), (window, sinks, scale, softcap) = x, sizes
    sink_logits, keys, values, seen, state_indices = states
    rows = read_pages(state_indices, keys, values, seen)
    count = rows[2][:, 0].clamp_min(0)  # a page of garbage may hold any number
    slot = torch.where(count < sinks, count, sinks + (count - sinks) % window)
    for old, x in zip(rows, (k, v), strict=False):
        old.scatter_(1, slot.view(-1, 1, 1, 1).expand_as(x), x.to(old.dtype))
    filled = torch.arange(sinks + window, device=q.device) <= count[:, None]
    rows[2].copy_((count + 1)[:, None].expand_as(rows[2]))
    own = (x.to(q.dtype).transpose(1, 2) for x in rows[:2])
    o = attend(q.transpose(1, 2), *own, Scores(scale, softcap, sink_logits), filled[:, None, None])
    write_pages(state_indices, (keys, values, seen), rows)
    return o.transpose(1, 2)


def _taken(old: Tensor | None, new: Tensor, place: Tensor) -> Tensor:
    """[B, slots, ...]: new[b, place[b, slot]]; at a negative place what `old` holds, or zero."""
    found = place.clamp_min(0)[..., None, None].expand(-1, -1, *new.shape[2:])
    kept = place.lt(0)[..., None, None]
    if new.shape[1] == 0:
        return old if old is not None else new.new_zeros(found.shape)
    found = new.gather(1, found)
    return found.masked_fill(kept, 0) if old is None else torch.where(kept, old.to(new.dtype), found)


def in_order(state: State, window: int, sinks: int) -> list[Tensor]:
    """The last W - 1 tokens of the ring, keys and values [B, W - 1, Hk, D], the oldest first.

    What stands at the places of tokens that do not exist, or that are sinks, is undefined.
    """
    *tensors, seen = state
    token = seen[:, :1] - window + 1 + torch.arange(window - 1, device=seen.device)
    slot = sinks + (token - sinks) % window
    return [x.gather(1, slot[..., None, None].expand(-1, -1, *x.shape[2:])) for x in tensors]


def _mask(starts: Tensor, block: int, window: int, sinks: int, firsts: Tensor | None = None) -> Tensor:
    """Which keys the queries of blocks read: bool [B, n, C, S + W - 1 + C].

    `starts` [B, n]: how many tokens stand before each block. A token among the first S is read at its own place only.
    """
    query = torch.arange(block, device=starts.device)[:, None]
    key = torch.arange(window - 1 + block, device=starts.device)
    band = (key >= query) & (key < query + window)
    keys = starts[..., None] - (window - 1) + key
    mask = band & (keys >= sinks)[:, :, None]
    if firsts is not None:
        first = F.pad(firsts, (0, starts.shape[1] * block - len(firsts))).view(1, -1, block)
        mask = mask & (keys[:, :, None] >= first[..., None])
    if sinks:
        queries = starts[..., None] + query[:, 0]
        mask = torch.cat([torch.arange(sinks, device=starts.device) <= queries[..., None], mask], -1)
    return mask


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """`attend` of blocks: q [B, n, H, C, D], k and v [B, n, Hk, L, D], mask [1 or B, 1 or n, C, L]."""
    shape = q.shape[:2]
    if mask.shape[:2] != (1, 1):
        mask = mask.expand(*shape, -1, -1)
    mask = mask.flatten(0, 1)[:, None]
    return attend(*(x.flatten(0, 1) for x in (q, k, v)), scores, mask).unflatten(0, shape)
