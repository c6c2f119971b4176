"""Padded rows are sorted once a forward, for all layers, on every path that a forward may take."""

import pytest
import torch

from core.checks import greedy, left_padded
from hf_memmix.padding import PaddedRows
from testing import LAYERS, MIXERS, in_turn, mixers_of, random_ids, tiny_model


@pytest.fixture
def sorts(monkeypatch):
    """The shapes of the masks that were sorted."""
    of, shapes = PaddedRows.of, []

    def counted(mask):
        shapes.append(tuple(mask.shape))
        return of(mask)

    monkeypatch.setattr(PaddedRows, "of", counted)
    return shapes


@pytest.fixture
def batch():
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 5)])
    return {"input_ids": ids, "attention_mask": mask}


# StableLM's layers drop keyword arguments, GPT-2's take them under other names
@pytest.mark.parametrize("family", ("llama", "stablelm", "gpt2"))
def test_forward(family, sorts, batch):
    model = tiny_model(family, "all")
    model(**batch, use_cache=False)
    assert sorts == [(2, 9)]
    model(batch["input_ids"])
    assert len(sorts) == 1, "nothing is sorted without pads"


def test_gradient_checkpointing(sorts, batch):
    """The backward pass computes the layers again, with the same padded rows."""
    model = tiny_model("llama", "all", fresh=True).train()
    model.gradient_checkpointing_enable()
    runs = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: runs.append(1))
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert len(runs) == 2 * LAYERS
    assert len(sorts) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}],
    ids=("dynamic", "static", "chunks"),
)
def test_generation(options, sorts, batch):
    """Every forward with pads sorts its rows once; a decode step has no pads and does not sort."""
    greedy(tiny_model("llama", "all"), batch["input_ids"], attention_mask=batch["attention_mask"], **options)
    # of three chunks the first holds three pads and the second one
    assert sorts == ([(2, 3)] * 2 if "prefill_chunk_size" in options else [(2, 9)])


@torch.no_grad()
@in_turn(mixer=MIXERS, layout=("odd", "all"))
def test_outputs_at_pads_are_zero(mixer, layout):
    """Exactly, in every mixer and for every pattern, with a cache and without."""
    model, outputs = tiny_model("llama", layout, mixer), []
    hooks = [m.register_forward_hook(lambda *call: outputs.append(call[-1][0])) for m in mixers_of(model).values()]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = mask[1, 3] = mask[1, 8] = 0
    try:
        for use_cache in (False, True):
            model(random_ids(2, 9), attention_mask=mask, use_cache=use_cache)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(outputs) == 2 * len(hooks) > 0
    for y in outputs:
        assert y[mask == 0].eq(0).all()
        assert y.ne(0).any()
