"""generate() of a model with mixers: its cache, rows that end early, assisted decoding, padding."""

from contextlib import contextmanager

import torch

from ._generation_hooks import GenerationHooks
from ._transformers import execution_device
from .cache import (
    FinishedRows,
    RecurrentStateCache,
    adopt_cache,
    check_hidden,
    check_whole,
    feeds_pads,
    memory_layers_of,
    static_length_of,
    stop_past_recording,
)
from .errors import UserError
from .given_cache import cache_among
from .mixers import ATTENTION
from .padding import padding_of
from .swap import memory_mixers

NO_CONTINUOUS_BATCHING = (
    "continuous batching of transformers has a paged cache, which cannot hold recurrent states; serve the model with"
    " vLLM, call generate() with a padded batch, or start `transformers serve` without --continuous-batching"
)


class MemoryGeneration(GenerationHooks):
    """A base class that stands before a native causal language model."""

    def generate(self, *args, **kwargs):
        """As in transformers. An assistant of assisted decoding without a mask reads every token.

        The library would infer a mask from pad tokens in each round. But the prompt has none, or it came with a mask:
        such a token was written by the target, and the assistant's memory has read it.
        """
        ids = kwargs.get("input_ids")
        drafts = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if drafts and ids is not None and kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones_like(ids)
        return super().generate(*args, **kwargs)

    def fit_cache(self, cache, rows: int, given: bool):
        """The user's cache, changed in place, or a new `RecurrentStateCache` if the library has made `cache`."""
        if given:
            return adopt_cache(cache, self.config)
        cache = RecurrentStateCache.from_cache(cache, self.config)
        if cache.static_length is not None:
            self._allocate_states(cache, rows)
        return cache

    def _allocate_states(self, cache, batch: int):
        """Allocate the states at fixed addresses now: they must not be allocated inside a compiled forward."""
        for i, mixer in memory_mixers(self).items():
            cache.layers[i].allocate(mixer.allocate_states(batch, execution_device(mixer), self.dtype))

    def reads_masks(self) -> bool:
        """Whether there is an attention layer: no mixer reads a mask."""
        return ATTENTION in self.config.mixer_types

    def heads_with_keys(self, heads: list[int]) -> list[int]:
        """0 for memory layers, because their cache layers are replaced afterwards."""
        return [n if kind == ATTENTION else 0 for n, kind in zip(heads, self.config.mixer_types, strict=True)]

    @contextmanager
    def sampling(self, cache, rows: int, criteria, outlives: bool):
        """If the cache is used after the loop, rows that end early get their states from before the pads back."""
        if cache is None or not outlives or rows == 1 or not feeds_pads(criteria):
            yield criteria
            return
        finished = FinishedRows(criteria, cache)
        try:
            yield finished
        finally:
            finished.put_back()

    @contextmanager
    def assisted_decoding(self, cache):
        """Raise ValueError if the cache is not empty. Afterwards, delete what was recorded for the rollback."""
        if cache is not None and (seen := int(cache.get_seq_length())):
            # the library would feed the whole prompt again, also with its own models
            raise UserError(
                f"assisted and prompt-lookup decoding need an empty cache, but this one holds {seen} tokens; leave"
                " past_key_values out, or decode without assistance"
            )
        try:
            yield
        finally:
            if cache is not None:
                stop_past_recording(cache)  # otherwise every later forward would add to the record

    @contextmanager
    def beam_search(self, cache):
        """Afterwards the cache is refused: its rows are those of the last running beams, not of the returned ones."""
        try:
            yield
        finally:
            for layer in () if cache is None else memory_layers_of(cache):
                layer.of_beams = True

    def check_new_tokens(self, cache, tokens: int):
        """Raise ValueError if the cache has read the whole prompt, as its states do not give the next token."""
        check_whole(cache)
        seen = int(cache.get_seq_length())
        if virtual := max(getattr(layer, "virtual_tokens", 0) for layer in cache.layers):
            raise UserError(
                f"PEFT's prompt tuning has put {virtual} tokens before those of the prompt into this cache, and"
                " generate() cannot tell which tokens are new: give the whole sequence without past_key_values"
            )
        if seen and tokens <= seen:
            raise UserError(
                f"the prompt has {tokens} tokens and the cache has read {seen}, so no token is new: generate() takes"
                " the whole sequence, the cached tokens first, and at least one token after them. To continue after"
                " a document, read all of it but its last token into the cache"
            )

    def note_virtual_tokens(self, cache, tokens: int):
        """Note that the cache has read more tokens than the prompt has."""
        virtual = max(int(cache.get_seq_length()) - tokens, 0)
        for layer in memory_layers_of(cache):
            layer.virtual_tokens = virtual

    # the var-keyword must be spelled `kwargs`: generate() looks for that name to see what the model accepts
    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, inputs_embeds=None, **kwargs):
        """As in transformers; adds the padding mask of the new tokens if forward() cannot read it from the mask."""
        prefill = kwargs.pop("memmix_prefill", kwargs.get("is_first_iteration"))
        inputs = super().prepare_inputs_for_generation(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        tokens, cache = inputs.get("input_ids"), cache_among(inputs)
        batch, length = (tokens if tokens is not None else inputs["inputs_embeds"]).shape[:2]
        compileable = cache is not None and cache.is_compileable
        if length == 1 and not prefill:
            inputs["memmix_mask"] = None  # a new token is real
            return inputs
        if compileable or attention_mask is None:
            check_hidden(cache, attention_mask)
        if compileable:
            # generate() has replaced the 2D mask by a 4D mask or a dict, but the mixers need the padding. With all
            # other caches, forward() reads the 2D mask, which may be longer then (PEFT's prompt tuning adds tokens)
            seen, static = cache.get_seq_length(), static_length_of(cache) is not None
            mask = padding_of(attention_mask, batch, length, seen, static)
            inputs["memmix_mask"] = None if mask is None else mask.contiguous()
        return inputs

    def generate_batch(self, *args, **kwargs):
        """Refused: ValueError. Why, and what transformers would need: hf_memmix/serving/continuous_batching.md."""
        raise UserError(NO_CONTINUOUS_BATCHING)

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: ValueError; `continuous_batching_context_manager` and `transformers serve` end here."""
        raise UserError(NO_CONTINUOUS_BATCHING)
