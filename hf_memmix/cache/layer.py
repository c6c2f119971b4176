"""One layer of a recurrent cache: named states of fixed size, a token count, and exact rollback.

A mixer calls `get`, `put` and `advance`; transformers calls the other methods. While the layer records its past, it
keeps a stack with one entry per forward: the states before it, its number of tokens, and a function that computes the
states after a prefix of these tokens. So `crop` is exact: it removes whole forwards, and computes the last one again
for the prefix that stays.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.utils import is_torchdynamo_compiling

from ..padding import leading_pads

States = dict[str, Tensor]
Replay = Callable[[States | None, int], States]


class Recorded(NamedTuple):
    """A forward that `crop` can undo: the states before it, and a function that replays a prefix of it."""

    states: States | None
    hidden: Tensor | None
    tokens: int
    mask: Tensor | None
    replay: Replay


class RowsOfStates(NamedTuple):
    """A copy of the states of some rows after `seen` tokens."""

    rows: list[int]
    states: States
    seen: int


HIDDEN_NUMBERS = 4  # those of `count_hidden`, and the pads before the first token of the row
_FACTORS = ((0x2C1B3C6D, 0x297A2D39), (0x3D4D51CB, 0x1B56C4E9))  # odd, below 2^30


def count_hidden(mask: Tensor, start) -> Tensor:
    """[B, 3]: how many tokens a mask [B, T] hides, and two sums of hashes of their positions.

    Two masks that hide different tokens have equal numbers with a chance of about 2^-62. The numbers of consecutive
    parts of a mask can be added, and need the same memory whatever the length.
    `start`: the number of tokens before the first column, an integer or a tensor.
    """
    hidden = mask == 0
    place = start + torch.arange(1, mask.shape[1] + 1, device=mask.device)
    hashes = [_hash(place, factors) for factors in _FACTORS]
    return torch.stack([hidden.sum(1), *((hidden * one).sum(1) for one in hashes)], 1)


def _hash(place: Tensor, factors: tuple[int, int]) -> Tensor:
    """A number in [0, 2^31) for each place below 2^31, another one for each. No product exceeds 64 bits."""
    for factor in factors:
        place = ((place ^ (place >> 15)) * factor) & 0x7FFFFFFF
    return place ^ (place >> 16)


class RecurrentLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """Named states of one memory layer.

    Both base classes are needed. The library skips linear-attention layers when it looks for the layer that gives the
    size of the causal mask. As a `CacheLayerMixin` the layer has `get_seq_length` and `get_mask_sizes`, which a cache
    without attention layers needs too.

    Args:
        static: keep the states at one address and the token count on the device, so that a decode step can be
            compiled and replayed as a CUDA graph.
        mask_length: key length of the causal masks in a static cache with attention layers; any integer in a dynamic
            one. None if the model has no attention layers: then a mask need not include past tokens.
    """

    is_sliding = False
    supports_early_init = False
    of_beams = False  # whether beam search has filled it, so that its rows are not those of the returned sequences
    virtual_tokens = 0  # how many tokens that are not in the prompt PEFT's prompt tuning has put in front of it

    def __init__(self, static: bool = False, mask_length: int | None = None):
        LinearAttentionCacheLayerMixin.__init__(self, 1)
        self.keys = self.values = None  # read by Cache.__iter__ and DataParallel
        self.is_initialized = False
        self.static = static
        self.mask_length = mask_length
        self.states: States = {}
        self.seen = torch.zeros((), dtype=torch.long) if static else 0
        # [B, 4], `HIDDEN_NUMBERS` of the tokens that are not in the states (pads); None: all tokens are in the states
        self.hidden: Tensor | None = None
        self._past: list[Recorded] = []

    def __repr__(self):
        shapes = {name: tuple(state.shape) for name, state in self.states.items()}
        return f"{type(self).__name__}({'static' if self.static else 'dynamic'}, {shapes})"

    # ---- for mixers

    def get(self) -> States | None:
        """The states by name, which a one-token step may change in place.

        None before the first token, even if a static cache has allocated them: an initial state need not be zero.
        """
        if not self.is_initialized:
            return None
        self.prefetch()
        if not self.static and not is_torchdynamo_compiling() and self._left_inference_mode():
            self._map(Tensor.clone)
        return self.states

    def put(self, new: States, tokens: int, replay: Replay, mask: Tensor | None = None):
        """Store the states after `tokens` more tokens, of which `mask` [B, tokens] hides the pads.

        `replay(before, m)` must return the states after the first m of these tokens, 1 <= m < tokens, given the
        states before them; it is kept only while the past is recorded.
        """
        if self.record_past:
            self._past.append(Recorded(self.states or None, self.hidden, tokens, mask, replay))
        if not self.static:
            self.states = dict(new)
        else:
            if not self.states:
                self.allocate({name: torch.zeros_like(state) for name, state in new.items()})
            for name, state in self.states.items():
                state.copy_(new[name])
        if mask is not None:
            self.hide(mask, self.seen)
        self.advance(tokens)

    def advance(self, tokens: int):
        """Count `tokens` more tokens, whose states are in place already."""
        self.is_initialized = True
        self.has_previous_state[0] = True
        if self.static:
            self.seen.add_(tokens)
        else:
            self.seen += tokens

    def allocate(self, states: States):
        """Set the tensors that hold the states. In a static cache their addresses do not change afterwards.

        Args:
            states: tensors [B, ...] by name, at least one, with shapes and dtypes of the mixer's `state_shapes`.
        """
        self.states = states
        self.device = next(iter(states.values())).device
        if self.static:
            self.seen = self.seen.to(self.device)
            self.hidden = torch.zeros(self.batch_size, HIDDEN_NUMBERS, dtype=torch.long, device=self.device)
            fix_addresses(*states.values(), self.seen, self.hidden)

    def hide(self, mask: Tensor, start):
        """Count the pads of a mask [B, T], `start` tokens after the first one."""
        before = None if self.hidden is None else self.hidden[:, 3:].to(mask.device)
        self.add_hidden(torch.cat([count_hidden(mask, start), leading_pads(mask, start, before)], 1))

    def add_hidden(self, numbers: Tensor):
        """Add the `HIDDEN_NUMBERS` [B, 4] of more tokens."""
        if self.static:
            self.hidden.add_(numbers.to(self.hidden.device))
        else:  # a new tensor: the old one may be recorded
            self.hidden = numbers if self.hidden is None else self.hidden + numbers.to(self.hidden.device)

    # ---- for generate(), whose finished rows go through the model as pads

    def copy_rows(self, rows: list[int]) -> RowsOfStates:
        """The states of some rows as they are now."""
        return RowsOfStates(rows, {name: state[rows] for name, state in self.states.items()}, int(self.seen))

    def restore_rows(self, kept: RowsOfStates):
        """Put copied rows back in place. They forget the tokens that came after the copy; other rows do not change."""
        since = int(self.seen) - kept.seen
        if since <= 0:
            return
        for name, state in self.states.items():
            state[kept.rows] = kept.states[name]
        mask = torch.ones(self.batch_size, since, dtype=torch.bool, device=next(iter(self.states.values())).device)
        mask[kept.rows] = False
        self.hide(mask, kept.seen)
        self._past = []  # it would roll back to the rows as they were

    # ---- for the library: size and masks

    @property
    def is_compileable(self) -> bool:
        return self.static

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    @property
    def max_cache_len(self) -> int:
        return -1 if self.mask_length is None else self.mask_length

    @property
    def batch_size(self) -> int:
        if not self.states:
            raise AttributeError("an empty memory layer has no batch size yet")
        return next(iter(self.states.values())).shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(state.nbytes for state in self.states.values())

    def get_seq_length(self):
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset of a mask. In a static cache the length is fixed, so that nothing is recompiled."""
        if self.mask_length is None:
            return query_length, 0
        return (self.mask_length if self.static else self.seen + query_length), 0

    # ---- for the library: rows

    def reorder_cache(self, beam_idx: Tensor):
        self._change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int):
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor):
        self._change_rows(lambda rows: rows[indices.to(rows.device)])

    # ---- for a model of another dtype

    def cast(self, dtypes: dict[str, torch.dtype]):
        """Cast the states by name. Recorded forwards are deleted."""
        self.states = {name: state.to(dtypes[name]) for name, state in self.states.items()}
        self._past = []
        if self.static:
            fix_addresses(*self.states.values())

    # ---- for the library: time

    def reset(self):
        """Forget all tokens; in a static cache the addresses of the states stay."""
        if not self.static:
            self.states, self.seen, self.hidden = {}, 0, None
        else:
            self.seen.zero_()
            if self.hidden is not None:
                self.hidden.zero_()
        self.is_initialized = self.has_previous_state[0] = self.of_beams = False
        self.virtual_tokens = 0
        self._past = []

    def activate_past_recording(self):
        if self.static:
            raise ValueError(
                "a static cache cannot be rolled back; use a dynamic one (no cache_implementation) for assisted or"
                " prompt-lookup decoding"
            )
        self.record_past = True

    def stop_past_recording(self):
        self.record_past, self._past = False, []

    @property
    def recorded(self) -> int:
        """Number of last tokens that `crop` can take back."""
        return sum(forward.tokens for forward in self._past)

    def check_crop(self, tokens: int):
        """Raise ValueError if `crop(tokens)` would."""
        if tokens > 0:
            raise ValueError(f"crop({tokens}): give the number of tokens to forget as a negative number")
        if -tokens > self.recorded:
            raise ValueError(
                f"crop({tokens}): only the last {self.recorded} tokens of this memory layer are recorded. Call"
                " cache.activate_past_recording() before the forwards that may be taken back"
            )

    def crop(self, tokens: int):
        """Forget the last `-tokens` tokens. All recorded forwards are deleted."""
        tokens = int(tokens)
        self.check_crop(tokens)
        remaining = -tokens
        self.seen -= remaining
        while remaining:
            forward = self._past.pop()
            self.states, self.hidden = dict(forward.states or {}), forward.hidden
            kept = max(forward.tokens - remaining, 0)
            remaining -= forward.tokens - kept
            if kept:
                with torch.no_grad():
                    self.states = dict(forward.replay(forward.states, kept))
                if forward.mask is not None:
                    self.hide(forward.mask[:, :kept], self.seen - kept)
        self.is_initialized = self.has_previous_state[0] = bool(self.states)
        self._past = []

    # ---- for the library: devices

    def offload(self):
        """Move the states to the CPU; `prefetch` or the next use brings them back."""
        if self.states:
            self.device = next(iter(self.states.values())).device if self.device is None else self.device
            self._map(lambda state: state.to("cpu"))

    def prefetch(self):
        """Bring offloaded states back to the device they were on."""
        states = self.states.values()
        if self.device is not None and any(state.device != self.device for state in states):
            self._map(lambda state: state.to(self.device))

    # ---- what the library's base classes ask for and a memory layer does not have

    def lazy_initialization(self, *args, **kwargs):
        """Nothing to do: states are made by the first `put`."""

    def update(self, key_states, value_states, *args, **kwargs):
        if key_states is None:  # a call by which the library only tests the method
            return None, None
        raise ValueError(
            "this layer of the cache holds recurrent states, not keys and values: the cache belongs to another model;"
            " use the cache of this model, or an empty one"
        )

    def update_conv_state(self, *args, **kwargs):
        """The library's own recurrent layers call this; here it raises ValueError, because states have names."""
        raise ValueError("this layer keeps named states: use put()")

    update_recurrent_state = update_conv_state

    # ---- helpers

    def _map(self, change: Callable[[Tensor], Tensor]):
        self.states = {name: change(state) for name, state in self.states.items()}
        if self.static:
            fix_addresses(*self.states.values())

    def _change_rows(self, change: Callable[[Tensor], Tensor]):
        self._map(change)
        if self.hidden is not None:
            self.hidden = change(self.hidden)
            if self.static:
                fix_addresses(self.hidden)
        self._past = []  # it would roll back to the rows as they were

    def _left_inference_mode(self) -> bool:
        """States made under inference_mode may not be changed in place outside it."""
        return not torch.is_inference_mode_enabled() and next(iter(self.states.values())).is_inference()


def memory_layers_of(cache: Cache) -> list[RecurrentLayer]:
    """The memory layers of a cache."""
    return [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]


def fix_addresses(*tensors: Tensor):
    """Promise torch.compile that the addresses of these tensors do not change, as CUDA graphs require."""
    if not is_torchdynamo_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)
