"""Positions that the user gives: they separate packed sequences, or they are refused, but are never ignored."""

import pytest
import torch
from transformers import DynamicCache

from core.checks import left_padded
from core.mixer_variants import VARIANTS
from hf_memmix import RecurrentStateCache
from hf_memmix.conversion import convert_model
from testing import LAYOUTS, MIXERS, assert_same, build, one_each, random_ids, tiny_config, tiny_model
from tiny_teachers import tiny_teacher

PACKED, GAP = [0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 8, 9, 10]
AGAIN = [0, 1, 2, 3, 3, 4, 5]


@pytest.fixture(params=("odd", "all"))
def model(request):
    return tiny_model("llama", request.param)


@torch.no_grad()
@pytest.mark.parametrize("positions", (PACKED, GAP, AGAIN), ids=("packed", "gap", "again"))
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
@pytest.mark.parametrize("positions", (PACKED, AGAIN), ids=("packed", "again"))
@pytest.mark.parametrize("cache", (RecurrentStateCache, DynamicCache))
def test_packed_positions_beside_a_cache_are_refused(model, cache, positions):
    cache = cache(config=model.config)
    with pytest.raises(ValueError, match=f"row 1 go from 3 to {positions[4]} at token 4.*a cache"):
        model(random_ids(2, 7), position_ids=torch.tensor([list(range(7)), positions]), past_key_values=cache)
    assert int(cache.get_seq_length()) == 0


@torch.no_grad()
@pytest.mark.parametrize("positions", (PACKED, GAP, AGAIN), ids=("packed", "gap", "again"))
def test_a_position_that_does_not_follow_the_one_before_starts_a_sequence(model, positions):
    """Without a padding mask and a cache, which is then not made by default: the two parts do not see each other."""
    ids, positions = random_ids(2, 7), torch.tensor([positions, list(range(7))])
    out = model(ids, position_ids=positions, use_cache=False).logits
    default = model(ids, position_ids=positions)
    assert model.config.use_cache and default.past_key_values is None and torch.equal(default.logits, out)
    with pytest.raises(ValueError, match="packed sequences cannot be combined with a cache"):
        model(ids, position_ids=positions, use_cache=True)
    for row, part in ((0, slice(0, 4)), (0, slice(4, 7)), (1, slice(0, 7))):
        rows = slice(row, row + 1)
        alone = model(ids[rows, part], position_ids=positions[rows, part], use_cache=False).logits
        assert_same(out[rows, part], alone, f"row {row}, {part}")


@torch.no_grad()
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
def test_rows_of_one_packed_sequence(attention):
    """As collators give them for a single document. For such rows the library makes no mask with sdpa."""
    model, ids = tiny_model("llama", "odd", fresh=True), random_ids(2, 7)
    model.set_attn_implementation(attention)
    expected = model(ids, use_cache=False).logits
    for packed in (
        {"cu_seq_lens_q": torch.tensor([0, 7, 14], dtype=torch.int32)},
        {"seq_idx": torch.zeros(2, 7, dtype=torch.int32), "attention_mask": torch.ones_like(ids)},
    ):
        assert_same(model(ids, use_cache=False, **packed).logits, expected, f"{list(packed)}")


@torch.no_grad()
def test_positions_of_pads_are_free(model):
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


@torch.no_grad()
@pytest.mark.parametrize("make", (RecurrentStateCache, lambda config: RecurrentStateCache(config, 20), lambda _: None))
def test_pads_without_memory_layers(make):
    """No layer of the cache counts pads, so all forwards must count them as the library does."""
    config = tiny_config("llama", "odd")
    config.mixer_types = ["attention"] * len(config.mixer_types)
    model = build(config, dtype=torch.float64)
    rows, new = [random_ids(1, 7), random_ids(1, 4)], random_ids(2, 3, seed=5)
    ids, mask = left_padded(rows)
    cache = model(ids, attention_mask=mask, past_key_values=make(config), use_cache=True).past_key_values
    mask = torch.cat([mask, torch.ones_like(new)], 1)
    out = model(new, attention_mask=mask, past_key_values=cache).logits
    for i, row in enumerate(rows):
        assert_same(out[i], model(torch.cat([row, new[i : i + 1]], 1), use_cache=False).logits[0, -3:], f"row {i}")


# options with which a mixer reads positions
ROTATED = {mixer: options for mixer, options in VARIANTS if options.get("use_rope")}


@torch.no_grad()
@one_each(mixer=MIXERS, layout=LAYOUTS, static=(False, True))
def test_positions_count_from_the_first_token(mixer, layout, static):
    """Without `position_ids` too, a padded row equals the row alone: in one forward, and in pieces with a cache.

    The library counts the pads before it, and the first state of Lattice does not turn with the keys. It is followed
    in counting pads after it.
    """
    model = build(tiny_config("llama", layout, mixer, ROTATED.get(mixer)), dtype=torch.float64)
    (ids, mask), new = left_padded([random_ids(1, 7), random_ids(1, 4)]), random_ids(2, 4, seed=5)
    mask[0, 3] = 0  # a hole
    alone = [torch.cat([ids[i][mask[i].bool()], new[i]])[None] for i in range(2)]
    places = [torch.tensor([[0, 1, 2, *range(4, 11)]]), torch.arange(8)[None]]
    expected = [
        model(row, position_ids=at, past_key_values=RecurrentStateCache(model.config)).logits[0]
        for row, at in zip(alone, places, strict=True)
    ]
    cache = RecurrentStateCache(model.config, 20 if static else None)
    for past in (None, cache):
        out = model(ids, attention_mask=mask, past_key_values=past, use_cache=past is not None).logits
        for i, row in enumerate(mask.bool()):
            assert_same(out[i, row], expected[i][:-4], f"row {i}")
    seen, steps = mask, []
    for part in new.split((1, 2, 1), 1):
        seen = torch.cat([seen, torch.ones_like(part)], 1)
        # without attention layers the mask may be left out: the cache knows which tokens were pads
        shown = None if layout == "all" and not static and part.shape[1] == 1 else seen
        steps.append(model(part, attention_mask=shown, past_key_values=cache).logits)
    for i, row in enumerate(torch.cat(steps, 1)):
        assert_same(row, expected[i][-4:], f"row {i}, with a cache")


@torch.no_grad()
@pytest.mark.parametrize("pieces", ((12,), (3, 5, 4)), ids=str)
@pytest.mark.parametrize("static", (False, True))
@pytest.mark.parametrize("kept", ("full_attention", "sliding_attention"))
def test_pads_are_counted_as_by_the_teacher(kept, static, pieces):
    """Without `position_ids`, between tokens, and before the first one over two pieces: a student whose windows hold
    the whole context equals its teacher. In the sliding window of a kept layer the pads count, too.
    """
    kinds = ["full_attention", kept, "full_attention"]
    teacher = tiny_teacher("qwen2", layer_types=kinds, sliding_window=3, use_sliding_window=True).double()
    student = convert_model(teacher, "window", keep=[1]).double()
    ids, mask = random_ids(2, 12) % 64, torch.ones(2, 12, dtype=torch.long)
    mask[0, 4:7] = mask[1, :5] = mask[1, 9] = 0
    caches, outputs = [DynamicCache(), RecurrentStateCache(student.config, 20 if static else None)], []
    for part, end in zip(ids.split(pieces, 1), torch.tensor(pieces).cumsum(0), strict=True):
        runs = zip((teacher, student), caches, strict=True)
        outputs.append(
            [model(part, attention_mask=mask[:, :end], past_key_values=past).logits for model, past in runs]
        )
    expected, got = (torch.cat(parts, 1)[mask.bool()] for parts in zip(*outputs, strict=True))
    assert_same(got, expected)
