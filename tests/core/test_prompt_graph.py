"""A prompt in pieces by `PromptGraph` equals the prompt at once. With a GPU the pieces run as a CUDA graph."""

import pytest
import torch

from hf_memmix import PromptGraph
from testing import MIXERS, assert_same, build, random_ids, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32 if DEVICE == "cuda" else torch.float64
TOLERANCE = 2e-3 if DEVICE == "cuda" else 1e-8


def tiny(layers=(0, 1), mixer="gka"):
    return build(tiny_config("llama", layers, mixer, num_hidden_layers=2), dtype=DTYPE).to(DEVICE).eval()


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
def test_pieces_equal_the_whole(mixer):
    model, ids = tiny(mixer=mixer), random_ids(2, 24).to(DEVICE)
    graph = PromptGraph(model, batch=2, length=8)
    for _ in range(2):  # a second text does not see the first
        logits = [graph(piece).clone() for piece in ids.split(8, 1)]
        want = model(ids).logits[:, 7::8]
        assert_same(torch.stack(logits, 1), want, tolerance=TOLERANCE)
        graph.start_anew()
    assert int(graph.cache.get_seq_length()) == 0


@torch.no_grad()
def test_kept_attention_layers_and_a_rest():
    """A shorter rest goes through the model with the same cache, also the tokens of a decode."""
    model, ids = tiny(layers=(1,)), random_ids(1, 21).to(DEVICE)
    graph = PromptGraph(model, batch=1, length=8, max_cache_len=32)
    for piece in ids[:, :16].split(8, 1):
        graph(piece)
    rest = model(ids[:, 16:], past_key_values=graph.cache).logits
    assert_same(rest, model(ids).logits[:, 16:], tolerance=TOLERANCE)


def test_refusals():
    model = tiny()
    with pytest.raises(ValueError, match="eval"):
        PromptGraph(model.train(), 1, 8)
    model.eval()
    with pytest.raises(ValueError, match="length=1"):
        PromptGraph(model, 1, 1)
    with pytest.raises(ValueError, match="keeps 1 attention layers.*max_cache_len.*8; got None"):
        PromptGraph(tiny(layers=(1,)), 1, 8)
    sliding = build(tiny_config("mistral", (1,), "gka", num_hidden_layers=2)).eval()
    with pytest.raises(ValueError, match=r"layers \[0\] attend to a sliding window.*convert these layers, too"):
        PromptGraph(sliding, 1, 8, max_cache_len=32)
    with pytest.raises(ValueError, match=r"\[1, 7\].*\[1, 8\]"):
        PromptGraph(model, 1, 8)(torch.ones(1, 7, dtype=torch.long))
