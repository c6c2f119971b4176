"""Negative controls: with a part of the code broken on purpose, the checks that guard it must fail."""

import functools

import pytest
import torch

from core.checks import CHECKS, cache_layer_class, check_assistant
from hf_memmix.cache import FinishedRows
from hf_memmix.token_layout import TokenLayout
from testing import mixers_of, tiny_model


@pytest.fixture
def model():
    return tiny_model("llama", "odd")


def must_fail(model, *checks):
    for check in checks:
        with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, pytest.fail.Exception)):
            CHECKS[check](model)


def without(field):
    """A wrapper of a mixer's forward that withholds a field of the layout of its tokens."""

    def wrap(forward):
        @functools.wraps(forward)
        def wrapped(*args, **kwargs):
            layouts = {name: x._replace(**{field: None}) for name, x in kwargs.items() if isinstance(x, TokenLayout)}
            return forward(*args, **(kwargs | layouts))

        return wrapped

    return wrap


def patch_mixers(model, monkeypatch, wrap):
    for mixer in mixers_of(model).values():
        monkeypatch.setattr(mixer, "forward", wrap(mixer.forward))


def test_mask_withheld(model, monkeypatch):
    patch_mixers(model, monkeypatch, without("rows"))
    must_fail(model, "padding", "padded_generation", "static_cache")


def test_packing_withheld(model, monkeypatch):
    patch_mixers(model, monkeypatch, without("cu_seqlens"))
    must_fail(model, "packed")


def test_state_dropped(model, monkeypatch):
    monkeypatch.setattr(cache_layer_class(model), "get", lambda self, *args, **kwargs: None)
    must_fail(model, "splits", "greedy", "chunked_prefill", "multi_turn", "beams", "fork", "static_cache")


def test_state_rounded(model, monkeypatch):
    """One rounding to float32, the smallest error that a float64 run of ours can make."""
    cls = cache_layer_class(model)
    get = cls.get

    def rounded(self, *args, **kwargs):
        states = get(self, *args, **kwargs)
        return None if states is None else {name: t.float().double() for name, t in states.items()}

    monkeypatch.setattr(cls, "get", rounded)
    must_fail(model, "splits", "greedy", "chunked_prefill", "multi_turn", "fork")


def test_crop_forgotten(model, monkeypatch):
    monkeypatch.setattr(cache_layer_class(model), "crop", lambda self, tokens: None)
    must_fail(model, "crop", "prompt_lookup")
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError)):
        check_assistant(model, tiny_model("llama", "odd", seed=1))


def test_crop_off_by_one(model, monkeypatch):
    cls = cache_layer_class(model)
    crop = cls.crop
    monkeypatch.setattr(cls, "crop", lambda self, tokens: crop(self, -max(abs(int(tokens)) - 1, 0)))
    must_fail(model, "crop", "prompt_lookup")


def test_rows_stay(model, monkeypatch):
    cls = cache_layer_class(model)
    for method in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        with monkeypatch.context() as patch:
            patch.setattr(cls, method, lambda self, *args: None)
            must_fail(model, "batch_operations", *(["beams"] if method == "reorder_cache" else []))


def test_finished_rows_advance(model, monkeypatch):
    monkeypatch.setattr(FinishedRows, "put_back", lambda self: None)
    must_fail(model, "finished_rows")


def test_finished_rows_stop_before_their_last_token(model, monkeypatch):
    copy_rows = cache_layer_class(model).copy_rows
    call = FinishedRows.__call__

    def early(self, *args, **kwargs):
        done = call(self, *args, **kwargs)
        rows, self._last_token_is_next = self._last_token_is_next, []
        self._kept += [(layer, copy_rows(layer, rows)) for layer in self._layers]
        return done

    monkeypatch.setattr(FinishedRows, "__call__", early)
    must_fail(model, "finished_rows")


def test_copy_shares_its_state(model, monkeypatch):
    monkeypatch.setattr(cache_layer_class(model), "__deepcopy__", lambda self, memo: self, raising=False)
    must_fail(model, "fork")


def test_silent_mixers():
    """Mixers that answer nothing leave the other checks blind: the memory check is the one that sees it."""
    model = tiny_model("llama", "all", fresh=True)
    for mixer in mixers_of(model).values():
        torch.nn.init.zeros_(mixer.o_proj.weight)
    must_fail(model, "memory_reaches_the_end")
