"""Positions that the user gives: they separate packed sequences, or they are refused, but are never ignored."""

import pytest
import torch
from transformers import DynamicCache

from hf_memmix import RecurrentStateCache
from testing import assert_same, random_ids, tiny_model

PACKED, GAP = [0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 8, 9, 10]


@pytest.fixture(params=("odd", "all"))
def model(request):
    return tiny_model("llama", request.param)


@torch.no_grad()
@pytest.mark.parametrize("positions", (PACKED, GAP), ids=("packed", "gap"))
@pytest.mark.parametrize("rows", (1, 2))
def test_packed_positions_beside_a_padding_mask_are_refused(model, positions, rows):
    """Without pads the row is two sequences; a pad in another row must not make it one."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 6:] = 0
    for name in ("attention_mask", "memmix_mask"):
        with pytest.raises(ValueError, match=r"row 0 go from 3 to \d at token 4.*padding mask"):
            model(
                random_ids(2, 7),
                position_ids=torch.tensor([positions] * rows),
                use_cache=False,
                **{name: mask},
            )


@torch.no_grad()
@pytest.mark.parametrize("cache", (RecurrentStateCache, DynamicCache))
def test_packed_positions_beside_a_cache_are_refused(model, cache):
    cache = cache(config=model.config)
    with pytest.raises(ValueError, match="row 1 go from 3 to 0 at token 4.*a cache"):
        model(random_ids(2, 7), position_ids=torch.tensor([list(range(7)), PACKED]), past_key_values=cache)
    assert int(cache.get_seq_length()) == 0


@torch.no_grad()
def test_positions_of_pads_are_free(model):
    """Pads and tokens beside holes may have any position."""
    ids, mask = random_ids(2, 7), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 0]])
    counted = (mask.cumsum(1) - 1).clamp_min(0)
    for at_pads in (0, 1, 50):
        positions = counted.masked_fill(mask == 0, at_pads)
        for cache in (None, RecurrentStateCache(model.config)):
            out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
            for i, row in enumerate(mask.bool()):
                alone = model(ids[i : i + 1, row], use_cache=False).logits[0]
                assert_same(out[i, row], alone, f"row {i}, positions {at_pads} at pads")


@torch.no_grad()
def test_positions_that_leave_some_out_in_a_cache(model):
    """With a cache they are one sequence, in one forward and token by token."""
    ids, positions = random_ids(1, 7), torch.tensor([GAP])
    cache, steps = RecurrentStateCache(model.config), []
    expected = model(ids, position_ids=positions, past_key_values=RecurrentStateCache(model.config)).logits
    for t in range(7):
        here = slice(t, t + 1)
        steps.append(model(ids[:, here], position_ids=positions[:, here], past_key_values=cache).logits)
    assert_same(torch.cat(steps, 1), expected)
