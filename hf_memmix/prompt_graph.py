"""A prompt as a CUDA graph: the GPU does not wait for Python.

With short prompts a GPU finishes its work on a layer before Python has launched that of the next one. `PromptGraph`
records the forward of `length` tokens once, with a static cache, and replays it for every further piece of a prompt.

    graph = PromptGraph(model, batch=1, length=2048)
    for piece in prompt.split(2048, dim=1):          # whole pieces; a shorter rest goes to model(...) with graph.cache
        logits = graph(piece)                        # [B, vocab] after the last token
    graph.start_anew()                               # forget: the next piece begins another text

A piece may continue another one, because a layer's state after a split is the same as without it. On a CPU the same
forward runs without a graph.
"""

import torch
from torch import Tensor

from ._generation_hooks import CACHE
from ._transformers import execution_device
from .cache import RecurrentStateCache
from .swap import memory_mixers


class PromptGraph:
    """The forward of `length` more tokens of each of `batch` sequences.

    Args:
        model: a causal language model with mixers, in eval mode.
        batch: number of sequences, all without padding.
        length: tokens per piece, at least 2.
        max_cache_len: length of the static cache of kept attention layers. Without such layers there is no limit to
            the number of tokens; None then. With them it must be given.

    Attributes:
        cache: the static `RecurrentStateCache` that the pieces advance. It can be given to generate() or to the model.

    Raises:
        ValueError: the model trains, a kept attention layer has a sliding window, `length` or `batch` is too small, or
            `max_cache_len` does not fit.
    """

    def __init__(self, model, batch: int, length: int, max_cache_len: int | None = None):
        if model.training:
            raise ValueError("PromptGraph needs a model in eval mode: call model.eval()")
        if batch < 1 or length < 2:
            raise ValueError(f"batch={batch} and length={length}: a graph reads at least 1 row of 2 tokens")
        mixers = memory_mixers(model)
        kept = len(model.config.mixer_types) - len(mixers)
        if kept and (max_cache_len is None or max_cache_len < length):
            raise ValueError(
                f"the model keeps {kept} attention layers: give max_cache_len, the largest number of tokens of a"
                f" sequence, at least length={length}; got {max_cache_len}"
            )
        self.model, self._mixers = model, mixers
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=model.get_input_embeddings().weight.device)
        self.cache = RecurrentStateCache(model.config, max_cache_len=max_cache_len or length)
        if sliding := [i for i, layer in enumerate(self.cache.layers) if layer.is_sliding]:
            # transformers counts their tokens in Python, which a graph does not repeat
            raise ValueError(
                f"layers {sliding} attend to a sliding window, which a CUDA graph cannot follow over several pieces;"
                " call the model itself, or convert these layers, too"
            )
        self._first = {}
        for i, mixer in mixers.items():
            device = execution_device(mixer)
            self._first[i] = mixer.initial_states(batch, device, model.dtype)
            self.cache.layers[i].allocate({name: state.clone() for name, state in self._first[i].items()})
        self._graph = None
        self._logits = self._forward()  # compiles kernels, and allocates the keys of attention layers
        self.start_anew()
        if self.tokens.is_cuda:
            self._graph = self._capture()
            self.start_anew()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        cache = {CACHE: self.cache}
        out = self.model(self.tokens, **cache, use_cache=True, logits_to_keep=1, memmix_mask=None)
        return out.logits[:, -1]

    def _capture(self) -> "torch.cuda.CUDAGraph":
        side = torch.cuda.Stream(self.tokens.device)
        side.wait_stream(torch.cuda.current_stream(self.tokens.device))
        with torch.cuda.stream(side):
            self._forward()
        torch.cuda.current_stream(self.tokens.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._forward()
        return graph

    def start_anew(self):
        """Forget all tokens. The states stay where they are and become those before the first token."""
        self.cache.reset()
        for i, first in self._first.items():
            layer = self.cache.layers[i]
            for name, state in layer.states.items():
                state.copy_(first[name])
            # the graph reads the states, also before the first token
            layer.is_initialized = layer.has_previous_state[0] = True

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """Read the next tokens [batch, length]; the logits [batch, vocab] after the last one.

        On a GPU the logits lie in the memory of the graph: the next call overwrites them.

        Raises:
            ValueError: the tokens have another shape.
        """
        if input_ids.shape != self.tokens.shape:
            raise ValueError(
                f"input_ids are {list(input_ids.shape)}, the graph reads {list(self.tokens.shape)}; give a shorter"
                " rest to the model itself, with past_key_values=graph.cache"
            )
        self.tokens.copy_(input_ids)
        if self._graph is None:
            self._logits = self._forward()
        else:
            self._graph.replay()
        return self._logits
