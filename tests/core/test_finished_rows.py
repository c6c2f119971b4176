"""Rows that end early, and masks that contradict what the cache was fed; `check_finished_rows` has the usual case."""

import functools
import itertools
import pickle

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
)

from core.checks import an_end_token, assert_follows, greedy, left_padded
from hf_memmix import RecurrentStateCache
from hf_memmix.cache import FinishedRows
from hf_memmix.cache.layer import count_hidden
from testing import MIXERS, assert_same, every_third, one_each, random_ids, tiny_model, word_tokenizer

NEW = 9
REFUSED = "attention_mask hides .* of the .* tokens in the cache in row"


class Batch:
    """A padded batch, a token that ends its rows at different places, and the rows' lengths with it."""

    def __init__(self, model, prompts=(9, 5, 7)):
        self.model = model
        self.ids, self.mask = left_padded([random_ids(1, n, seed=n) for n in prompts])
        self.end, self.lengths = an_end_token(greedy(model, self.ids, NEW, attention_mask=self.mask).sequences[:, 9:])

    def generate(self, **options):
        return greedy(self.model, self.ids, NEW, attention_mask=self.mask, **{"eos_token_id": self.end, **options})

    def seen(self, lengths=None):
        """The mask after the first turn, in which every row has its own new tokens."""
        lengths = torch.tensor(lengths or self.lengths)
        return torch.cat([self.mask, (torch.arange(max(lengths)) < lengths[:, None]).long()], 1)

    def second_turn(self, sequences, cache, seen, rows=None):
        """Three tokens more, then four generated ones: each row as alone."""
        rows = torch.arange(len(sequences)) if rows is None else rows
        turn = torch.cat([sequences, random_ids(len(sequences), 3, seed=2)], 1)[rows]
        shown = torch.cat([seen, torch.ones(len(seen), 3, dtype=torch.long)], 1)[rows]
        out = greedy(self.model, turn, 4, attention_mask=shown, past_key_values=cache)
        shown = torch.cat([shown, torch.ones(len(rows), 4, dtype=torch.long)], 1)
        assert_follows(self.model, out, turn, shown, [4] * len(rows), "second turn")


@functools.cache
def batch_of_layout(layout):
    """One batch per layout: the tests do not change it."""
    return Batch(tiny_model("llama", layout))


@pytest.fixture
def batch():
    return batch_of_layout("odd")


# ---- caches


@every_third(("mixer", "kind"), list(zip(MIXERS, itertools.cycle((DynamicCache, StaticCache)))))
def test_caches_of_the_library(mixer, kind):
    batch = Batch(tiny_model("llama", "odd", mixer))
    cache = DynamicCache() if kind is DynamicCache else StaticCache(config=batch.model.config, max_cache_len=40)
    out = batch.generate(past_key_values=cache)
    batch.second_turn(out.sequences, cache, batch.seen())


@every_third("mixer", MIXERS)
def test_two_rows(mixer):
    batch = Batch(tiny_model("llama", "all", mixer), prompts=(9, 5))
    assert len(set(batch.lengths)) == 2
    out = batch.generate()
    batch.second_turn(out.sequences, out.past_key_values, batch.seen())


def test_cache_of_generate_that_is_static():
    batch = Batch(tiny_model("llama", "all"))  # without attention a static cache has no end
    out = batch.generate(cache_implementation="static")
    batch.second_turn(out.sequences, out.past_key_values, batch.seen())


@pytest.mark.parametrize("pads", (True, False))
def test_rows_that_end_by_a_stop_string(batch, pads):
    """With an end-of-sequence token, which never comes here, they get pads; without one they are sampled on."""
    new = batch.generate(eos_token_id=None).sequences[:, 9:]
    never = next(i for i in range(3, 90) if i not in new)
    # a word that begins with the stop string holds it too
    ends = [[str(token).startswith(str(batch.end)) for token in row] for row in new.tolist()]
    ends = [(row + [True]).index(True) + 1 for row in ends]
    ends = [min(end, NEW) for end in ends]
    assert min(ends) < max(ends)
    tokenizer = word_tokenizer(unknown="abcdef")  # which the library looks for in a decoded text
    out = batch.generate(stop_strings=f"w{batch.end}", tokenizer=tokenizer, eos_token_id=never if pads else None)
    lengths = ends if pads else [max(ends)] * 3
    assert (out.sequences[:, 9:] != 0).sum(1).tolist() == lengths
    batch.second_turn(out.sequences, out.past_key_values, batch.seen(lengths))


def test_rows_that_end_under_synced_gpus(batch, tmp_path):
    """The loop of sharded models (ZeRO-3, FSDP), which asks all processes whether one goes on; here there is one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        out = batch.generate(synced_gpus=True)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(out.sequences, batch.generate().sequences)
    batch.second_turn(out.sequences, out.past_key_values, batch.seen())


def test_cache_that_is_not_handed_out_costs_nothing(batch, monkeypatch):
    monkeypatch.setattr(FinishedRows, "__call__", None)
    options = {"attention_mask": batch.mask, "eos_token_id": batch.end, "max_new_tokens": NEW}
    batch.model.generate(batch.ids, **options)
    with pytest.raises(TypeError):  # the control: here the rows are watched
        batch.model.generate(batch.ids, past_key_values=DynamicCache(), **options)


def test_three_turns(batch):
    """Pads of several turns add up."""
    first = batch.generate()
    seen, turn = batch.seen(), torch.cat([first.sequences, random_ids(3, 2, seed=8)], 1)
    shown = torch.cat([seen, torch.ones(3, 2, dtype=torch.long)], 1)
    free = greedy(batch.model, turn, NEW, attention_mask=shown).sequences[:, turn.shape[1] :]
    end, lengths = an_end_token(free)
    out = greedy(batch.model, turn, NEW, attention_mask=shown, past_key_values=first.past_key_values, eos_token_id=end)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch.second_turn(out.sequences, out.past_key_values, torch.cat([shown, real.long()], 1))


# ---- ways to end a row


def test_several_end_tokens_of_which_one_pads(batch):
    out = batch.generate(eos_token_id=[batch.end, 2], pad_token_id=batch.end)
    assert (out.sequences[:, -1] == batch.end).any()
    batch.second_turn(out.sequences, out.past_key_values, batch.seen())


def test_samples_of_one_prompt(batch):
    torch.manual_seed(0)
    ids, options = batch.ids[:2], {"do_sample": True, "num_return_sequences": 3, "return_dict_in_generate": True}
    ends = list(range(3, 23))
    out = batch.model.generate(ids, attention_mask=batch.mask[:2], max_new_tokens=NEW, eos_token_id=ends, **options)
    new = out.sequences[:, 9:]
    stops = torch.isin(new, torch.tensor(ends))
    real = (stops.cumsum(1) - stops.long()) == 0
    assert (~real).sum() > 3, "no sample ended early: the test shows nothing"
    seen = torch.cat([batch.mask[:2].repeat_interleave(3, 0), real.long()], 1)
    batch.second_turn(out.sequences, out.past_key_values, seen)


def test_generation_that_breaks_off(batch):
    """A cache of the user's is right after an exception, too."""

    class Interrupt(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 9 + max(batch.lengths) - 1:
                raise KeyboardInterrupt
            return scores

    cache, whole = DynamicCache(), batch.generate().sequences
    with pytest.raises(KeyboardInterrupt):
        batch.generate(past_key_values=cache, logits_processor=LogitsProcessorList([Interrupt()]))
    assert int(cache.get_seq_length()) == whole.shape[1] - 1
    batch.second_turn(whole[:, :-1], cache, batch.seen()[:, :-1])


# ---- what becomes of the record


CHANGES = {
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "reorder": (lambda c: c.reorder_cache(torch.tensor([1, 2, 0])), [1, 2, 0]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


each_cache = pytest.mark.parametrize(("layout", "static"), [("odd", False), ("all", True)])


@pytest.mark.parametrize("change", CHANGES)
@each_cache
def test_rows_keep_their_record(layout, static, change):
    batch, (apply, rows) = batch_of_layout(layout), CHANGES[change]
    out = batch.generate(past_key_values=RecurrentStateCache(batch.model.config, 40 if static else None))
    apply(out.past_key_values)
    batch.second_turn(out.sequences, out.past_key_values, batch.seen(), torch.tensor(rows))


@each_cache
def test_files_and_copies_keep_the_record(layout, static, tmp_path):
    batch = batch_of_layout(layout)
    out = batch.generate(past_key_values=RecurrentStateCache(batch.model.config, 40 if static else None))
    out.past_key_values.save_pretrained(tmp_path)
    for cache in (RecurrentStateCache.from_pretrained(tmp_path), pickle.loads(pickle.dumps(out.past_key_values))):
        with pytest.raises(ValueError, match=REFUSED):
            greedy(batch.model, out.sequences, 2, attention_mask=torch.ones_like(out.sequences), past_key_values=cache)
        batch.second_turn(out.sequences, cache, batch.seen())


@torch.no_grad()
@pytest.mark.parametrize("removed", (2, 5, 8, 9))
def test_crop_takes_the_record_back(removed):
    """Into a padded forward, to its start, and into the one before."""
    model = tiny_model("llama", "all")
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, [0, 1, 5, 8]] = mask[1, 6] = 0
    cache = RecurrentStateCache(model.config)
    cache.activate_past_recording()
    for start, end in ((0, 4), (4, 12)):
        model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
    cache.crop(-removed)
    end = 12 - removed
    shown = torch.cat([mask[:, :end], torch.ones(2, 3, dtype=torch.long)], 1)
    tokens = random_ids(2, 3, seed=5)
    wrong = shown.clone()
    wrong[1, 3 if end > 3 else 0] = 0
    with pytest.raises(ValueError, match=REFUSED):
        model(tokens, attention_mask=wrong, past_key_values=cache)
    out = model(tokens, attention_mask=shown, past_key_values=cache).logits
    full = model(torch.cat([ids[:, :end], tokens], 1), attention_mask=shown, use_cache=False).logits
    assert_same(out, full[:, -3:])


@torch.no_grad()
@pytest.mark.parametrize("static", (False, True))
def test_a_reset_cache_has_no_record(static):
    model, (ids, mask) = tiny_model("llama", "all"), left_padded([random_ids(1, 7), random_ids(1, 4)])
    cache = RecurrentStateCache(model.config, 20 if static else None)
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.reset()
    model(ids, past_key_values=cache)
    model(ids[:, :2], attention_mask=torch.ones(2, 9, dtype=torch.long), past_key_values=cache)


# ---- masks


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("static", (False, True))
def test_mask_that_contradicts_the_cache(static, mixer):
    """It hides a token, shows a pad, or hides as many tokens elsewhere."""
    model, (ids, mask) = tiny_model("llama", "all", mixer), left_padded([random_ids(1, 7), random_ids(1, 4)])
    cache = RecurrentStateCache(model.config, 20 if static else None)
    model(ids, attention_mask=mask, past_key_values=cache)
    grown = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
    hides, shows, moved = grown.clone(), grown.clone(), grown.clone()
    hides[0, 3], shows[1, 0], moved[1, 2], moved[1, 3] = 0, 1, 1, 0
    for wrong, counts in (
        (hides, "hides 1 of the 7 .* row 0, .* the 0 that"),
        (shows, "hides 2 of the 7 .* row 1, .* the 3 that"),
        (moved, "hides 3 of the 7 .* row 1"),
    ):
        with pytest.raises(ValueError, match=counts):
            model(ids[:, :2], attention_mask=wrong, past_key_values=cache)
    assert int(cache.get_seq_length()) == 7
    out = model(ids[:, :2], attention_mask=grown, past_key_values=cache).logits
    full = model(torch.cat([ids, ids[:, :2]], 1), attention_mask=grown, use_cache=False).logits
    assert_same(out, full[:, -2:])


@torch.no_grad()
@one_each(mixer=MIXERS, layout=("odd", "all"), static=(False, True))
def test_mask_that_hides_other_tokens_with_equal_sums(mixer, layout, static):
    """Pads 1 and 8, and a mask that hides 4 and 7: as many tokens, and equal sums of the squares of their places."""
    model, ids = tiny_model("llama", layout, mixer), random_ids(1, 10)
    mask, wrong = (torch.ones(1, 12, dtype=torch.long) for _ in range(2))
    mask[0, [0, 7]], wrong[0, [3, 6]] = 0, 0
    cache = RecurrentStateCache(model.config, 20 if static else None)
    model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
    with pytest.raises(ValueError, match="hides 2 of the 8 .* row 0, .* the 2 that"):
        model(ids[:, :2], attention_mask=wrong[:, :10], past_key_values=cache)
    model(ids[:, 8:], attention_mask=mask[:, :10], past_key_values=cache)


def test_no_two_masks_have_equal_numbers():
    """All masks of 16 tokens; and the numbers of the parts of a mask add up."""
    masks = 1 - (torch.arange(2**16)[:, None] >> torch.arange(16)) % 2
    numbers = count_hidden(masks, 0)
    assert len(torch.unique(numbers, dim=0)) == len(torch.unique(numbers[:, 1:], dim=0)) == len(masks)
    assert torch.equal(count_hidden(masks[:, :5], 0) + count_hidden(masks[:, 5:], torch.tensor(5)), numbers)
    far = 2**31 - 17  # the largest places: no sum or product overflows
    assert len(torch.unique(count_hidden(masks, far), dim=0)) == len(masks)
    assert (count_hidden(masks, far) >= 0).all()


@torch.no_grad()
def test_no_mask_on_a_padded_cache():
    """Memories know their pads; kept attention would see them."""
    ids, mask = left_padded([random_ids(1, 7), random_ids(1, 4)])
    for layout in ("all", "odd"):
        model = tiny_model("llama", layout)
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        if layout == "all":
            out = model(ids[:, :2], past_key_values=cache).logits
            grown = torch.cat([mask, torch.ones(2, 2, dtype=torch.long)], 1)
            full = model(torch.cat([ids, ids[:, :2]], 1), attention_mask=grown, use_cache=False).logits
            assert_same(out, full[:, -2:])
        else:
            with pytest.raises(ValueError, match="hides 0 of the 7 .* row 1, .* the 3 that"):
                model(ids[:, :2], past_key_values=cache)
