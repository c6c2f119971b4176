"""The forward of a mixer in the place of an attention module: one method for each way in which its tokens may lie.

    split over several processes     `_over_ranks`
    packed sequences                 `_packed`
    one more token for a cache       `_step`, which updates the states in place
    everything else                  `_scan_rows`: rows with or without padding, with or without a cache

Shapes: B batch, T tokens of this forward, d size of the rotary embedding.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hf_memmix_kernels.short_conv.op import MAX_TAPS

from ..errors import UserError
from ..given_cache import cache_among
from ..padding import PaddedRows
from ..token_layout import TokenLayout
from ..versions import moved
from .ranks import current_group, scan_at_once, scan_in_turn

Result = TypeVar("Result")
WHOLE_ROWS = TokenLayout()


class LayerInputs(NamedTuple):
    """What a mixer computes its tokens from."""

    x: Tensor  # the layer's normed input [B, T, hidden]
    rotary: tuple[Tensor, ...]  # cos and sin [B, T, d]; () in a backbone without rotary embeddings
    given: dict[str, Tensor]  # `token_arguments` of the mixer [B, T], by name

    def changed(self, change: Callable[[Tensor], Tensor]) -> "LayerInputs":
        """`change` of every tensor."""
        given = {name: change(tensor) for name, tensor in self.given.items()}
        return LayerInputs(change(self.x), tuple([change(tensor) for tensor in self.rotary]), given)

    def in_one_row(self) -> "LayerInputs":
        """[1, B T, ...]"""
        return self.changed(lambda tensor: tensor.flatten(0, 1)[None])

    def part(self, start: int, stop: int) -> "LayerInputs":
        """The tokens from `start` to before `stop`."""
        return self.changed(lambda tensor: tensor[:, start:stop])

    def valid_first(self, rows: PaddedRows | None) -> "LayerInputs":
        """The tokens of each row in the order of `rows`."""
        return self if rows is None else self.changed(rows.valid_first)


class MixerForward(nn.Module):
    """Base class of `MemoryMixer`, whose `project`, `scan`, `step` and `readout` it calls."""

    token_arguments: ClassVar[tuple[str, ...]] = ()  # arguments [B, T] of the model that `scan` gets among its tokens
    # where the states live in a server's memory, it runs the layer: f(hidden_states, position_embeddings) -> output
    server: Callable | None = None

    def forward(
        self,
        hidden_states: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Any = None,
        memmix_layout: TokenLayout | None = None,
        memmix_compute: Callable[[], Any] | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Mix [B, T, hidden] over time.

        Args:
            hidden_states: the layer's normed input [B, T, hidden].
            position_embeddings: cos and sin [B or 1, T, d].
            attention_mask: ignored, except if it is the `TokenLayout` that `layout_hooks` puts there for families
                whose decoder layer drops further keyword arguments.
            memmix_layout: how the tokens lie; by default every row is one whole sequence.
            memmix_compute: see `computed_inside`; everything else is ignored then.
            kwargs: the cache as `past_key_values`, `cache` or `layer_past`, which depends on the family and on
                transformers; `token_arguments` of the mixer, for the tokens of this forward; all others are ignored.

        Returns:
            The output [B, T, hidden], and None in the place of attention weights.

        Raises:
            ValueError: a token argument has a wrong shape, or there are both packed sequences and a cache.
            RuntimeError: the model has a cache, and it does not arrive here under a known name.
        """
        if self.server is not None:
            return self.server(hidden_states, position_embeddings), None
        if memmix_compute is not None:
            return memmix_compute(), None
        layout = attention_mask if isinstance(attention_mask, TokenLayout) else memmix_layout or WHOLE_ROWS
        if layout.ranks is None and current_group() is not None:
            raise UserError(
                f"layer {self.layer_idx} does not receive how its sequences are split over the processes: context"
                " parallelism needs the whole model, in a family that passes further keyword arguments to its layers"
            )
        layer = self._cache_layer(layout, kwargs)
        inputs = self._inputs(hidden_states, position_embeddings, kwargs)
        return self._mix(inputs, layout, layer), None

    def computed_inside(self, compute: Callable[[], Result]) -> Result:
        """compute(), called by this module's forward: only there are its parameters loaded where a hook moves them
        (offload, sharding).
        """
        return self(memmix_compute=compute)[0]

    def project_rows(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **token_arguments
    ) -> dict[str, Tensor]:
        """The tokens of `scan` and `step` from what a decoder layer gets.

        Args:
            x: the layer's normed input [B, T, hidden]; [1, T, hidden] with tokens of several sequences in one row.
            position_embeddings: cos and sin [B or 1, T, d], or None in a backbone without rotary embeddings.
            token_arguments: `token_arguments` of the mixer [B, T]; all others are ignored.

        Raises:
            ValueError: a token argument has another shape.
        """
        return self._tokens(self._inputs(x, position_embeddings, token_arguments))

    # ---- one method for each layout

    def _mix(self, inputs: LayerInputs, layout: TokenLayout, layer) -> Tensor:
        """The output for tokens that lie as `layout` says; `layer` of the cache, or None, is advanced."""
        if layout.ranks is not None:
            return self._over_ranks(inputs, layout)
        if layout.cu_seqlens is not None:
            return self._packed(inputs, layout.cu_seqlens, layer)
        states = None if layer is None else layer.get()
        one_token = inputs.x.shape[1] == 1 and layout.rows is None and states is not None
        if one_token and not (layer.record_past or torch.is_grad_enabled()):
            return self._step(inputs, states, layer)
        return self._scan_rows(inputs, layout.rows, states, layer)

    def _step(self, inputs: LayerInputs, states: dict[str, Tensor], layer) -> Tensor:
        out = None if inputs.given else self.layer_step(inputs.x, inputs.rotary or None, states)
        if out is None:
            out = self.readout(self.step(self._tokens(inputs), states), inputs.x)
        layer.advance(1)
        return out

    def _scan_rows(self, inputs: LayerInputs, rows: PaddedRows | None, states, layer) -> Tensor:
        inputs = inputs.valid_first(rows)
        tokens, lengths = self._tokens(inputs), None if rows is None else rows.lengths
        y, new = self.scan(tokens, states, lengths=lengths)
        if layer is not None:
            layer.put(new, inputs.x.shape[1], self._replay_of(tokens, rows), None if rows is None else rows.mask)
        out = self.readout(y, inputs.x)
        return out if rows is None else rows.restore(out)

    def _packed(self, inputs: LayerInputs, cu_seqlens: Tensor, layer) -> Tensor:
        if layer is not None:
            raise UserError("packed sequences cannot be written to a cache; pass use_cache=False")
        row = inputs.in_one_row()
        y = self.packed_outputs(self._tokens(row), cu_seqlens)
        return self.readout(y, row.x).view(*inputs.x.shape[:2], -1)

    def _over_ranks(self, inputs: LayerInputs, layout: TokenLayout) -> Tensor:
        """Each rank has some pieces of the sequences, one after the other in its tensors."""
        ranks, parts, rows_of, tokens = layout.ranks, [], [], []
        for piece in (ranks.pieces[place] for place in ranks.own()):
            rows = None if layout.rows is None else layout.rows.part(piece.start, piece.stop)
            part = inputs.part(piece.start, piece.stop).valid_first(rows)
            parts.append(part)
            rows_of.append(rows)
            tokens.append((self._tokens(part), None if rows is None else rows.lengths))
        at_once = self.linear and not ranks.padded and ranks.shortest() >= MAX_TAPS
        outputs = []
        scanned = (scan_at_once if at_once else scan_in_turn)(self, tokens, ranks)
        for y, part, rows in zip(scanned, parts, rows_of, strict=True):
            out = self.readout(y, part.x)
            outputs.append(out if rows is None else rows.restore(out))
        return torch.cat(outputs, 1)

    # ---- what they share

    def _cache_layer(self, layout: TokenLayout, arguments: dict):
        """This layer's part of the cache among the arguments, or None."""
        cache = cache_among(arguments)
        if layout.cached and cache is None:
            raise moved(f"layer {self.layer_idx} does not receive the cache of its model")
        return None if cache is None else cache.layers[self.layer_idx]

    def _inputs(self, x: Tensor, position_embeddings, arguments: dict) -> LayerInputs:
        """cos and sin get a row for each row of the batch, and token arguments are checked."""
        batch, length, _ = x.shape
        rotary = ()
        if position_embeddings is not None:
            rotary = tuple([t if t.shape[0] == batch else t.expand(batch, -1, -1) for t in position_embeddings])
        given = {name: arguments[name] for name in self.token_arguments if arguments.get(name) is not None}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or tensor.shape != (batch, length):
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise UserError(
                    f"{name} of layer {self.layer_idx} is {shape}, expected [{batch}, {length}]: one entry for each"
                    " token of this forward; to generate, run the prompt into a cache first"
                )
        return LayerInputs(x, rotary, given)

    def _tokens(self, inputs: LayerInputs) -> dict[str, Tensor]:
        return self.project(inputs.x, inputs.rotary or None) | inputs.given

    def _replay_of(self, tokens: dict[str, Tensor], rows: PaddedRows | None):
        """A function of the states before the tokens and a number: the states after so many of the tokens."""

        def replay(before, count):
            first = {name: tensor[:, :count] for name, tensor in tokens.items()}
            lengths = None if rows is None else rows.lengths_after(count)
            return self.computed_inside(lambda: self.scan(first, before, lengths)[1])

        return replay
