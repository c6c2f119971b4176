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

from .._chunks import sequence_ids
from .._common import compute_dtype
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import Reach, Sizes, States, Tokens, Upstream

SMALLEST_BLOCK = 64  # queries; shorter blocks would waste the time of a matrix product

State = tuple[Tensor, Tensor, Tensor]  # keys, values, tokens so far


class Scores(NamedTuple):
    """What happens to the scores before the softmax.

    Args:
        scale: factor of q k.
        softcap: c in c tanh(scores / c); None for no cap.
        sink_logits: [H], a further logit per head that takes a share of the softmax and adds no value; None for none.
    """

    scale: float
    softcap: float | None
    sink_logits: Tensor | None


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
    logits = (q @ k.mT) * scores.scale
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


def is_causal(x: Tokens, reach: Reach) -> bool:
    """Whether this is causal attention of rows that begin here, as torch computes it best."""
    plain = reach.softcap is None and reach.sink_logits is None
    return plain and reach.cu_seqlens is None and reach.seen is None and x.q.shape[1] <= reach.window


def window_attention(x: Tokens, reach: Reach) -> Tensor:
    """y [B, T, H, D] of q [B, T, H, D] and k, v as `after_past` returns them; without states [B, T, Hk, D]."""
    q, cu_seqlens, window, sinks = x.q, reach.cu_seqlens, reach.window, reach.sinks
    if not q.shape[1]:
        return torch.empty_like(q)
    if cu_seqlens is not None and (sinks or reach.seen is not None):
        return _one_by_one(x, reach)
    if cu_seqlens is None and reach.seen is None and q.shape[1] <= window:
        scores = Scores(reach.scale, reach.softcap, reach.sink_logits)
        return attend(*(t.transpose(1, 2) for t in x), scores).transpose(1, 2)
    firsts_of, keys = [t[:, :sinks] for t in x[1:]], x[1:]
    if reach.seen is None:
        keys = [F.pad(t, (0, 0, 0, 0, window - 1, 0)) for t in keys]
    else:
        keys = [t[:, sinks:] for t in keys]
    firsts = None if cu_seqlens is None else cu_seqlens[sequence_ids(cu_seqlens, q.shape[1])].long()
    return _in_blocks(Tokens(q, *keys), reach, firsts_of, firsts)


def _one_by_one(x: Tokens, reach: Reach) -> Tensor:
    """`window_attention` of packed sequences with states or sinks."""
    past, outputs, start, at = 0 if reach.seen is None else reach.sinks + reach.window - 1, [], 0, 0
    for n, length in enumerate(reach.cu_seqlens.diff().tolist()):
        seen, end = None if reach.seen is None else reach.seen[n : n + 1], at + past + length
        part = Tokens(x.q[:, start : start + length], x.k[:, at:end], x.v[:, at:end])
        outputs.append(window_attention(part, reach._replace(cu_seqlens=None, seen=seen)))
        start, at = start + length, end
    return torch.cat(outputs, 1)


@flat(Tokens, Reach)
def window_fwd_torch(x: Tokens, reach: Reach) -> tuple[Tensor, Tensor]:
    """What `window_fwd_triton` computes, without the logarithms of the sums."""
    B, T, H, _ = x.q.shape
    return window_attention(x, reach).contiguous(), x.q.new_zeros(H, B * T, dtype=compute_dtype(x.q.dtype))


@flat(Upstream, Tokens, Reach)
def window_bwd_torch(upstream: Upstream, x: Tokens, reach: Reach) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsink_logits, which is empty without sink logits; the forward pass is computed again."""
    given = [*x] if reach.sink_logits is None else [*x, reach.sink_logits]
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in given]
        reach = reach._replace(sink_logits=None if reach.sink_logits is None else leaves[3])
        grads = torch.autograd.grad(window_attention(Tokens(*leaves[:3]), reach), leaves, upstream.do)
    wide = compute_dtype(x.q.dtype)
    dsink_logits = x.q.new_empty(0, dtype=wide) if reach.sink_logits is None else grads[3].to(wide)
    return *(t.contiguous() for t in grads[:3]), dsink_logits


def _in_blocks(x: Tokens, reach: Reach, firsts_of: list[Tensor], firsts: Tensor | None) -> Tensor:
    """`window_attention` by blocks of queries.

    Args:
        x: k and v with the W - 1 places before those of the queries.
        firsts_of: keys and values of the sinks [B, S, Hk, D].
        firsts: [T], B = 1: the place of the first token of each token's packed sequence; without states and sinks.
    """
    (q, k, v), window, sinks = x, reach.window, reach.sinks
    scores = Scores(reach.scale, reach.softcap, reach.sink_logits)
    length, block = q.shape[1], max(-(-(window + sinks) // 2), SMALLEST_BLOCK)
    count = -(-length // block)
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, count * block - length)) for t in x)
    # a block of C queries reads the window - 1 tokens before it and its own
    q = q.unflatten(1, (count, block)).transpose(2, 3)
    k, v = (t.unfold(1, window - 1 + block, block).mT for t in (k, v))
    if sinks:
        k, v = (
            torch.cat([t[:, None].expand(-1, count, -1, -1, -1).transpose(2, 3), blocks], 3)
            for t, blocks in zip(firsts_of, (k, v), strict=True)
        )
    seen = torch.zeros(1, dtype=torch.long, device=q.device) if reach.seen is None else reach.seen
    starts = seen[:, None] + torch.arange(count, device=q.device) * block
    if reach.seen is None and firsts is None and count > 3:  # all blocks but the first two have the same mask
        mask = _mask(starts[:, :3], block, window, sinks)
        outputs = [
            _attend_blocks(*(t[:, :2] for t in (q, k, v)), mask[:, :2], scores),
            _attend_blocks(*(t[:, 2:] for t in (q, k, v)), mask[:, 2:], scores),
        ]
        y = torch.cat(outputs, 1)
    else:
        y = _attend_blocks(q, k, v, _mask(starts, block, window, sinks, firsts), scores)
    return y.transpose(2, 3).flatten(1, 2)[:, :length]


def window_states(state: State | None, k: Tensor, v: Tensor, reach: Reach, lengths: Tensor | None = None) -> State:
    """The keys and values that later tokens can read, after the tokens k, v [B, T, Hk, D] or the first `lengths` [B].

    Returns:
        keys and values [N, S + W, Hk, D], and the number of tokens so far [N, Hk], int64. The first S tokens of a
        sequence fill the first slots, then token p stands in slot S + (p - S) mod W.
    """
    (B, T, heads), device, bounds = k.shape[:3], k.device, reach.cu_seqlens
    if state is None and bounds is None and lengths is None and not torch.compiler.is_compiling():
        return _states_of_whole_rows(k, v, reach.window, reach.sinks)
    if bounds is not None:
        ends = bounds.diff().long()
    else:
        ends = torch.full((B,), T, device=device) if lengths is None else lengths.long()
    slots = torch.arange(reach.sinks + reach.window, device=device)
    seen = torch.zeros_like(ends) if state is None else reach.seen
    after = (seen + ends)[:, None]
    # the last token that belongs to each slot, as its place among the new tokens; negative if that holds no new one
    token = torch.where(slots < reach.sinks, slots, after - 1 - (after - 1 - slots) % reach.window)
    exists = (token < after) & ((token < reach.sinks) == (slots < reach.sinks))
    place = torch.where(exists, token - seen[:, None], -1)
    starts = None if bounds is None else bounds[:-1].long()
    old = (None, None) if state is None else state
    keys, values = (_taken(past, new, place, starts) for past, new in zip(old, (k, v), strict=False))
    return keys, values, after.expand(-1, heads).contiguous()


def _states_of_whole_rows(k: Tensor, v: Tensor, window: int, sinks: int) -> State:
    """`window_states` of rows that begin and end here: all places are known without the device, which saves most
    operators.
    """
    B, T, heads, _ = k.shape
    oldest = max(sinks, T - window)  # of the ring
    before_turn = window - (oldest - sinks) % window

    def slots(x: Tensor) -> Tensor:
        ring = x[:, oldest:]
        x = torch.cat([x[:, :sinks], ring[:, before_turn:], ring[:, :before_turn]], 1)
        return F.pad(x, (0, 0, 0, 0, 0, sinks + window - x.shape[1]))

    return slots(k), slots(v), torch.full((B, heads), T, device=k.device)


def after_past(state: State, after: State | None, k: Tensor, v: Tensor, reach: Reach) -> list[Tensor]:
    """Keys and values with those of the state before the first token of each sequence: [B, S + W - 1 + T, Hk, D], or
    packed [1, N (S + W - 1) + T, Hk, D].

    The sinks come first, from the state after the tokens, which `reach.sinks` needs, and then the last W - 1 tokens
    of the ring, the oldest first. What stands at the places of tokens that do not exist is undefined.
    """
    past = _in_order(state, reach.window, reach.sinks)
    if reach.sinks:
        past = [torch.cat([t[:, : reach.sinks], ring.to(t.dtype)], 1) for t, ring in zip(after, past, strict=False)]
    past = [t.to(x.dtype) for t, x in zip(past, (k, v), strict=True)]
    if reach.cu_seqlens is None:
        return [torch.cat(parts, 1) for parts in zip(past, (k, v), strict=True)]
    sequences, places = past[0].shape[:2]
    bounds = reach.cu_seqlens.long() + places * torch.arange(sequences + 1, device=k.device)
    place = torch.arange(k.shape[1] + sequences * places, device=k.device)
    sequence = sequence_ids(bounds, len(place))
    own, first = place - bounds[sequence], (sequence + 1) * places
    source = torch.where(own < places, sequence * places + own, sequences * places + place - first)
    parts = [torch.cat([t.flatten(0, 1), x[0]]) for t, x in zip(past, (k, v), strict=True)]
    return [t.index_select(0, source)[None] for t in parts]


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


def _taken(old: Tensor | None, new: Tensor, place: Tensor, starts: Tensor | None) -> Tensor:
    """[N, slots, ...]: new[n, place[n, slot]], or new[0, starts[n] + place[n, slot]] of packed sequences; at a
    negative place what `old` holds, or zero.
    """
    kept = place.lt(0)[..., None, None]
    if new.shape[1] == 0:
        return old if old is not None else new.new_zeros(*place.shape, *new.shape[2:])
    found = place.clamp_min(0)
    if starts is None:
        found = new.gather(1, found[..., None, None].expand(-1, -1, *new.shape[2:]))
    else:
        found = torch.where(place < 0, 0, starts[:, None] + place)
        found = new[0].index_select(0, found.flatten()).unflatten(0, place.shape)
    return found.masked_fill(kept, 0) if old is None else torch.where(kept, old.to(new.dtype), found)


def _in_order(state: State, window: int, sinks: int) -> list[Tensor]:
    """The last W - 1 tokens of the ring, keys and values [N, W - 1, Hk, D], the oldest first."""
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
