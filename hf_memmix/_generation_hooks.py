"""The methods of generate() that are overridden, most of them private: a part of the door `_transformers`.

Each one has the same name, arguments and meaning from transformers 5.17 to 5.24, unless a comment names the releases.
They check themselves while a model runs, because a method that the library does not call any more changes the text
without an error: `check_forward`, `check_generate` and `GenerationHooks.generate` raise RuntimeError then.
"""

import functools
import inspect
from contextvars import ContextVar

import torch
from transformers import GenerationMixin

# the masks that generate() makes before each step of a static cache
from transformers.masking_utils import create_masks_for_generate

from .given_cache import cache_among
from .versions import check_methods, moved

# the argument of a forward, and the key of generate()'s `model_kwargs`, that holds the cache: "past_key_values" up to
# transformers 5.23, "cache" since 5.24
CACHE = "cache" if "cache" in inspect.signature(create_masks_for_generate).parameters else "past_key_values"
# arguments of the forward of a native model, which ours passes on
_FORWARD = ("input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds")
# methods of generate() and the parameters, in their order, that `GenerationHooks` relies on
RELIED_ON = {
    "_prepare_cache_for_generation": "generation_config model_kwargs generation_mode batch_size",
    "_get_static_cache_init_shape": "",
    "_sample": "input_ids logits_processor stopping_criteria generation_config",
    "_assisted_decoding": "input_ids",
    "_beam_search": "input_ids",
    "_prefill": "input_ids generation_config model_kwargs is_first_iteration",
    "load_custom_generate": "pretrained_model_name_or_path",
}
_LOOPS = ("_sample", "_assisted_decoding", "_beam_search")


def check_forward(model_class: type, cache: bool = True):
    """Raise RuntimeError if the forward of a native model class does not have the arguments that ours passes on.

    cache: whether the cache is among them.
    """
    known = {*inspect.signature(model_class.forward).parameters}
    if "kwargs" in known:  # the heads of GraniteMoe pass it on to their base model among these, which is checked too
        known.add("use_cache")
    if missing := [name for name in _FORWARD if name not in known and (cache or name != CACHE)]:
        raise moved(f"{model_class.__name__}.forward has no argument {missing[0]!r}")


@functools.cache
def check_generate():
    """Raise RuntimeError if a method of generate() is missing or has other parameters than in `RELIED_ON`."""
    check_methods(GenerationMixin, RELIED_ON, "generate()")
    prepare = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    if missing := {CACHE, "attention_mask", "inputs_embeds", "is_first_iteration"} - prepare.keys():
        raise moved(f"prepare_inputs_for_generation has no argument {min(missing)!r}")


# the names of the methods below that the running generate() has called, and GIVEN if it has got a cache, which then
# outlives it; None outside of it
GIVEN = "a cache"
_called: ContextVar[set[str] | None] = ContextVar("called", default=None)


def _note(method: str):
    if (called := _called.get()) is not None:
        called.add(method)


def _not_called(called: set[str], own_loop: bool) -> str | None:
    """A method that generate() must have called and has not; `own_loop`: the user has given the loop."""
    if "load_custom_generate" in called:  # a function from a repository generates in its own way
        return None
    wanted = ["_prepare_cache_for_generation", "prepare_inputs_for_generation"]
    if not own_loop and not called.intersection(_LOOPS):
        return " or ".join(_LOOPS)
    if not own_loop and "_assisted_decoding" not in called:  # which reads the prompt in its first round
        wanted.append("_prefill")
    return next((name for name in wanted if name not in called), None)


class GenerationHooks:
    """The methods of generate() that must change for a cache with recurrent states. Stands before a native class."""

    def fit_cache(self, cache, rows: int, given: bool):
        """The cache to generate with, made from the library's `cache`. `given`: the user has passed it."""
        raise NotImplementedError

    def reads_masks(self) -> bool:
        """Whether a layer reads the masks that the library makes."""
        raise NotImplementedError

    def heads_with_keys(self, heads: list[int]) -> list[int]:
        """Number of heads, per layer, for which a static cache allocates keys and values."""
        raise NotImplementedError

    def sampling(self, cache, rows: int, criteria, outlives: bool):
        """A context manager around the sampling loop, which yields its stopping criteria.

        `outlives`: the caller can use the cache after the loop.
        """
        raise NotImplementedError

    def assisted_decoding(self, cache):
        """A context manager around assisted and prompt-lookup decoding."""
        raise NotImplementedError

    def beam_search(self, cache):
        """A context manager around beam search."""
        raise NotImplementedError

    def check_new_tokens(self, cache, tokens: int):
        """Raise ValueError unless the prompt, of `tokens` tokens, has more tokens than the cache."""
        raise NotImplementedError

    def note_virtual_tokens(self, cache, tokens: int):
        """Called after the prompt of `tokens` tokens was read; the cache may have read more."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(self, *args, **kwargs):
        """As in transformers; RuntimeError if the library has not called the methods that are overridden here."""
        check_generate()
        called: set[str] = set()
        token = _called.set(called)
        try:
            out = super().generate(*args, **kwargs)
        finally:
            _called.reset(token)
        if missing := _not_called(called, own_loop=callable(kwargs.get("custom_generate"))):
            raise moved(f"generate() has not called {missing}")
        return out

    def load_custom_generate(self, *args, **kwargs):
        """A function from the Hub or a folder that takes the place of generate()."""
        _note("load_custom_generate")
        return super().load_custom_generate(*args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, *args, **kwargs
    ):
        """The library puts the cache into `model_kwargs`."""
        _note("_prepare_cache_for_generation")
        given = cache_among(model_kwargs, (CACHE,)) is not None
        if given:
            _note(GIVEN)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, *args, **kwargs
        )
        cache = cache_among(model_kwargs, (CACHE,))
        if cache is None:
            return
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        cache = model_kwargs[CACHE] = self.fit_cache(cache, rows, given)
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()  # the library has activated it in the layers that were replaced since

    def create_masks_for_generate(self, *args, **kwargs):
        """Before each step of a static cache, outside of the compiled program: about twenty small operators."""
        if not self.reads_masks():
            return None
        make = getattr(super(), "create_masks_for_generate", create_masks_for_generate)  # some families have their own
        return make(*args, **kwargs)

    def _get_static_cache_init_shape(self):
        """The library allocates keys and values of a static cache before a chunked prefill, for all layers."""
        shape = super()._get_static_cache_init_shape()
        if shape is None:
            return None
        heads, head_dim = shape
        heads = [heads] * self.config.num_hidden_layers if isinstance(heads, int) else heads
        return self.heads_with_keys(heads), head_dim

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        """Greedy search and sampling; the criteria are called after every token."""
        _note("_sample")
        cache = cache_among(kwargs, (CACHE,))
        outlives = generation_config.return_dict_in_generate or GIVEN in (_called.get() or ())
        with self.sampling(cache, len(input_ids), stopping_criteria, outlives) as criteria:
            return super()._sample(input_ids, logits_processor, criteria, generation_config, **kwargs)

    def _assisted_decoding(self, *args, **kwargs):
        """With a draft model or by prompt lookup."""
        _note("_assisted_decoding")
        with self.assisted_decoding(cache_among(kwargs, (CACHE,))):
            return super()._assisted_decoding(*args, **kwargs)

    def _beam_search(self, *args, **kwargs):
        """Beam search and beam sampling."""
        _note("_beam_search")
        with self.beam_search(cache_among(kwargs, (CACHE,))):
            return super()._beam_search(*args, **kwargs)

    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        """In 5.17, the later chunks of a prompt look like decode steps; `memmix_prefill` marks them.

        The library cuts the cached tokens off the prompt, ids[:, seen - tokens :]. If no new token is left, this is
        a part of the prompt that the cache has read already.
        """
        _note("_prefill")
        cache = cache_among(model_kwargs, (CACHE,))
        embeds, mask = (model_kwargs.get(name) for name in ("inputs_embeds", "attention_mask"))
        widths = [x.shape[1] for x in (input_ids, embeds, mask) if x is not None]
        # the width of a mask without pads, which the library has dropped; 5.17 keeps it
        tokens = max(*widths, getattr(generation_config, "_mask_length", 0))
        if cache is not None:
            self.check_new_tokens(cache, tokens)
        model_kwargs["memmix_prefill"] = True
        try:
            out = super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        finally:
            del model_kwargs["memmix_prefill"]
        if cache is not None:
            self.note_virtual_tokens(cache, tokens)
        return out

    def prepare_inputs_for_generation(self, *args, **kwargs):
        """The inputs of each forward, with the cache among them."""
        _note("prepare_inputs_for_generation")
        cache_among(kwargs, (CACHE,))
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        cache_among(inputs, (CACHE,))
        if "prepare_inputs_for_generation" in vars(self) and CACHE in inputs:
            # PEFT has put its method for virtual tokens in front of ours. PEFT 0.21 asks for the cache by its name of
            # before transformers 5.24, which forward() still takes
            inputs["past_key_values"] = inputs.pop(CACHE)
        return inputs
