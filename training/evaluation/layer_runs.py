"""Runs a transformer from any of its layers on, with a window in place of the attention of some layers.

A layer changes nothing below it. So a search over sets of layers keeps the hidden states before the first layer that
changes, and computes only the layers above. The window stands in for a mixer before any training: it is the teacher's
own attention, whose mask hides all tokens but the last ones.
"""

import functools
import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_memmix._transformers import MASKED_ATTENTION, attention_implementation, execution_device
from hf_memmix.conversion.families import attention_module, decoder_layers
from hf_memmix.errors import UserError
from hf_memmix.mixer_names import DEFAULT_SINKS


class LayerRuns:
    """Runs of a causal LM whose layers each have their attention or a window over it.

    Args:
        teacher: a causal LM without mixers, on one device or spread over several.
        window: number of last tokens that a query of a windowed layer reads, with its own.
        sinks: number of first tokens that it reads as well.

    Raises:
        ValueError: the window is smaller than 1, there are more sinks than it has tokens, or the attention of the
            model does not take a mask.
    """

    def __init__(self, teacher: nn.Module, window: int, sinks: int = DEFAULT_SINKS):
        if window < 1:
            raise UserError(f"window is {window}; a token reads at least itself, give 1 or more")
        if not 0 <= sinks <= window:
            raise UserError(f"sinks are {sinks}; they can be 0 to the {window} tokens of the window")
        implementation = attention_implementation(teacher.config)
        if implementation not in MASKED_ATTENTION:
            raise UserError(
                f"the teacher's attention is {implementation!r}, which takes no mask for a window; load it with"
                f" attn_implementation={MASKED_ATTENTION[0]!r}"
            )
        self.teacher, self.window, self.sinks = teacher, window, sinks
        self.layers = decoder_layers(teacher)
        self._windowed: Collection[int] = ()
        self._start, self._stop, self._hidden = 0, None, None

    @contextmanager
    def routed(self) -> Iterator["LayerRuns"]:
        """Inside this context the methods below work; the model itself computes what it does outside."""
        handles, before = [], [vars(layer).get("forward") for layer in self.layers]
        training = self.teacher.training
        self.teacher.eval()
        try:
            for index, layer in enumerate(self.layers):
                hook = functools.partial(self._narrow, index)
                handles.append(attention_module(self.teacher, index).register_forward_pre_hook(hook, with_kwargs=True))
                layer.forward = functools.partial(self._visit, index, layer.forward)
            yield self
        finally:
            for handle in handles:
                handle.remove()
            for layer, forward in zip(self.layers, before, strict=True):
                del layer.forward
                if forward is not None:  # accelerate's, of a model that is spread over devices
                    layer.forward = forward
            self.teacher.train(training)

    @torch.no_grad()
    def last_hidden(
        self, ids: Tensor, windowed: Collection[int] = (), start: int = 0, hidden: Tensor | None = None
    ) -> Tensor:
        """The last hidden states [B, T, hidden] of tokens [B, T].

        windowed: layers with a window.
        start, hidden: the first layer that is computed, and its inputs [B, T, hidden] from `next_hidden`.
        """
        with self._from(windowed, start, None, hidden):
            return self._run(ids)

    @torch.no_grad()
    def next_hidden(self, ids: Tensor, windowed: Collection[int], layer: int, hidden: Tensor | None) -> Tensor:
        """The outputs [B, T, hidden] of one layer for its inputs; `hidden` is None for layer 0."""
        with self._from(windowed, layer, layer, hidden):
            try:
                self._run(ids)
            except _Reached as end:
                return end.hidden
        raise RuntimeError(f"the forward pass did not reach layer {layer}")

    def _run(self, ids: Tensor) -> Tensor:
        ids = ids.to(execution_device(self.teacher.get_input_embeddings()))
        return self.teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state

    @contextmanager
    def _from(self, windowed, start: int, stop: int | None, hidden: Tensor | None) -> Iterator[None]:
        self._windowed, self._start, self._stop, self._hidden = windowed, start, stop, hidden
        try:
            yield
        finally:
            self._windowed, self._start, self._stop, self._hidden = (), 0, None, None

    def _visit(self, index: int, native, *args, **kwargs):
        """The forward of layer `index`."""
        named = "hidden_states" in kwargs
        if index < self._start:  # the states that it would change are replaced in layer `start`
            return kwargs["hidden_states"] if named else args[0]
        if index == self._start and self._hidden is not None:
            if named:
                kwargs["hidden_states"] = self._hidden
            else:
                args = (self._hidden, *args[1:])
        output = native(*args, **kwargs)
        if index == self._stop:
            raise _Reached(output[0] if isinstance(output, tuple) else output)
        return output

    def _narrow(self, index: int, module: nn.Module, args, kwargs):
        """Hook of an attention: hide what lies outside of the window."""
        if index not in self._windowed:
            return None
        given = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs)
        given.arguments["attention_mask"] = self._within(given.arguments)
        return given.args[1:], given.kwargs

    def _within(self, arguments: dict) -> Tensor | None:
        """The mask of an attention, without what lies outside of the window: boolean, or added to the scores."""
        mask, hidden = arguments.get("attention_mask"), arguments["hidden_states"]
        length = hidden.shape[1]
        if self.window >= length:
            return mask
        places = torch.arange(length, device=hidden.device)
        distance = places[:, None] - places
        seen = ((distance >= 0) & ((distance < self.window) | (places < self.sinks)))[None, None]
        if mask is None:
            return seen
        mask = mask.to(hidden.device)
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


class _Reached(Exception):
    """Ends a forward pass; `hidden` is the output of its last layer."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden
