"""Properties that hold for every model of every family, mixer and layout; one function per property.

Each function takes a model and raises AssertionError if the property does not hold. `test_families.py` runs them over
the tables of `testing.py`; `test_controls.py` breaks the code on purpose and tests that they fail.
"""

import contextlib
import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_memmix
from hf_memmix.swap import decoder_layers
from testing import (
    TOLERANCES,
    assert_same,
    assert_same_tokens,
    base_model,
    difference,
    distinct_ids,
    mixers_of,
    random_ids,
    slides,
    sliding_cache_records_one_forward,
)

NEW_TOKENS = 6


# ---- references: no cache, no padding, one sequence at a time


@torch.no_grad()
def uncached_greedy(model, ids, new_tokens=NEW_TOKENS):
    """The prompt with its greedy continuation, and the logits [B, new_tokens, V] of its steps, by full forwards."""
    logits = []
    for _ in range(new_tokens):
        logits.append(model(ids, use_cache=False).logits[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
    return ids, torch.stack(logits, 1)


@torch.no_grad()
def greedy_along(model, sequences, new_tokens=NEW_TOKENS):
    """The result of `uncached_greedy` for the prompts of `sequences`, by one forward, if `sequences` are greedy.

    A forward of prompt and new tokens has the logits of every step. If a new token is not that of greedy search, the
    returned tokens differ from `sequences` at the first such token.
    """
    logits = model(sequences[:, :-1], use_cache=False).logits[:, -new_tokens:]
    return torch.cat([sequences[:, :-new_tokens], logits.argmax(-1)], 1), logits


def greedy(model, ids, new_tokens=NEW_TOKENS, **kwargs):
    """generate() without sampling; the result holds `sequences`, `logits` and `past_key_values`."""
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True, **kwargs
    )


def assert_same_generation(out, expected, what, tolerance=None):
    """Tokens and logits are equal. Equal tokens alone would not show a damaged state that does not change
    the argmax.
    """
    assert_same(torch.stack(out.logits, 1).to(expected[1].dtype), expected[1], f"{what}, logits", tolerance)
    assert_same_tokens(out.sequences, expected[0], what)


def prompt_with_repeats(length=14):
    """A prompt that repeats n-grams with other continuations, so that prompt lookup makes proposals that
    are rejected.
    """
    ids = random_ids(1, length, seed=3)
    ids[:, 5:7] = ids[:, 1:3]
    ids[:, -3:-1] = ids[:, 1:3]
    ids[:, -1] = ids[:, 5]
    return ids


def left_padded(rows):
    """Ids and mask [B, T] of rows [1, t] with pads before each row."""
    length = max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - row.shape[1] :] = row[0]
    return ids, (ids != 0).long()


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp_min(0)


def cache_layer_class(model):
    cache = model(random_ids(1, 2), use_cache=True).past_key_values
    return type(cache.layers[min(mixers_of(model))])


@contextlib.contextmanager
def recorded_crops(model):
    """A list to which every crop of a recurrent layer in this block appends the number of tokens that it removes."""
    cls = cache_layer_class(model)
    original, taken = cls.crop, []

    def crop(self, tokens, *args, **kwargs):
        taken.append(abs(int(tokens)))
        return original(self, tokens, *args, **kwargs)

    cls.crop = crop
    try:
        yield taken
    finally:
        cls.crop = original


# ---- forward


@torch.no_grad()
def check_memory_reaches_the_end(model):
    """The first token changes the last logits. Otherwise no other check could find a lost state.

    Of windows, which forget the first tokens, one of the last tokens does.
    """
    ids = random_ids(1, 19)
    other, place = ids.clone(), 15 if "window" in model.config.mixer_types else 0
    other[:, place] = ids[:, place] % 90 + 5
    moved = difference(model(other, use_cache=False).logits[:, -1], model(ids, use_cache=False).logits[:, -1])
    assert moved > 0.01, f"token {place} changes the last logits by {moved:.1e} only"


@torch.no_grad()
def check_splits(model):
    """Any split of a sequence into forwards with a carried cache equals the full forward."""
    ids = random_ids(2, 19)
    full = model(ids, use_cache=False).logits
    for sizes in ((1,) * 19, (9, 1, 1, 6, 2), (12, 7)):
        cache, parts = None, []
        for part in ids.split(sizes, 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        assert_same(torch.cat(parts, 1), full, f"split into {sizes}")
        assert int(cache.get_seq_length()) == 19


def random_weights(model, batch, length):
    """Random weights of the logits; the weighted sum of all logits is the loss."""
    shape = (batch, length, model.config.vocab_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.dtype)


def _padded_batch(kind, lengths, length):
    """Mask [B, length] with `lengths` valid tokens per row."""
    mask = torch.zeros(len(lengths), length, dtype=torch.long)
    for i, valid in enumerate(lengths):
        starts = {"left": length - valid, "right": 0, "mixed": (length - valid) * (2 - i) // 2}
        if kind == "holes":
            mask[i, torch.randperm(length, generator=torch.Generator().manual_seed(i))[:valid]] = 1
        else:
            mask[i, starts[kind] : starts[kind] + valid] = 1
    return mask


def _forward_and_gradients(model, embeds, mask, positions, weights):
    """Logits, and the gradients of a weighted sum of the valid ones by the embeddings and the mixers' parameters."""
    parameters = [p for mixer in mixers_of(model).values() for p in mixer.parameters() if p.requires_grad]
    embeds = embeds.detach().requires_grad_()
    logits = model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False).logits
    loss = (logits * weights).sum() if mask is None else (logits * weights)[mask.bool()].sum()
    grads = torch.autograd.grad(loss, [embeds, *parameters])
    return logits.detach(), grads[0], grads[1:]


def check_padding(model, kinds=("left", "right", "mixed")):
    """A padded row equals the row alone, forward and backward. Padded positions get zero gradient for any tokens
    there.
    """
    length, lengths = 13, (9, 13, 4)
    embed = model.get_input_embeddings()
    pads, weights = embed(distinct_ids(3, length)).detach(), random_weights(model, 3, length)
    rows = [embed(distinct_ids(1, n, seed=n)).detach() for n in lengths]
    row_weights = [weights[i : i + 1, :n] for i, n in enumerate(lengths)]
    alone = [
        _forward_and_gradients(model, row, None, torch.arange(n)[None], w)
        for row, n, w in zip(rows, lengths, row_weights, strict=True)
    ]
    for kind in kinds:
        mask = _padded_batch(kind, lengths, length)
        valid = mask.bool()
        # padded positions hold ordinary tokens; only the mask marks them
        embeds = pads.masked_scatter(valid[..., None], torch.cat(rows, 1))
        padded_weights = weights.masked_scatter(valid[..., None], torch.cat(row_weights, 1))
        logits, grad, parameter_grads = _forward_and_gradients(model, embeds, mask, positions_of(mask), padded_weights)
        assert torch.isfinite(grad).all(), f"{kind}: gradients are not finite"
        assert not grad[mask == 0].any(), f"{kind}: a pad got a gradient"
        for i, (row_logits, row_grad, _) in enumerate(alone):
            assert_same(logits[i, valid[i]], row_logits[0], f"{kind} padding, row {i}")
            assert_same(grad[i, valid[i]], row_grad[0], f"{kind} padding, row {i}, gradient")
        for got, *parts in zip(parameter_grads, *(row[2] for row in alone), strict=True):
            assert_same(got, sum(parts), f"{kind} padding, gradient of a parameter")


def packed_kwargs(lengths, kind):
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    if kind == "position_ids":
        return {"position_ids": positions}
    if kind == "seq_idx":
        index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return {"position_ids": positions, "seq_idx": index[None].int()}
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def check_packed(model, kinds=("position_ids", "seq_idx", "cu_seq_lens_q")):
    """Sequences packed into one row equal the sequences alone, forward and backward."""
    lengths = (5, 1, 10, 3)
    ids = distinct_ids(1, sum(lengths))
    weights = random_weights(model, 1, sum(lengths))

    def run(embeds, weights, **kwargs):
        embeds = embeds.detach().requires_grad_()
        logits = model(inputs_embeds=embeds, use_cache=False, **kwargs).logits
        return logits.detach(), torch.autograd.grad((logits * weights).sum(), embeds)[0]

    embeds = model.get_input_embeddings()(ids)
    alone = [run(e, w) for e, w in zip(embeds.split(lengths, 1), weights.split(lengths, 1), strict=True)]
    for kind in kinds:
        logits, grad = run(embeds, weights, **packed_kwargs(lengths, kind))
        assert_same(logits, torch.cat([a[0] for a in alone], 1), f"packed by {kind}")
        assert_same(grad, torch.cat([a[1] for a in alone], 1), f"packed by {kind}, gradient")


def check_gradient_checkpointing(model):
    """Gradient checkpointing changes no gradient. The check changes the model, so it must not be a shared one."""
    ids = random_ids(2, 13)
    mask = _padded_batch("mixed", (9, 13), 13)
    model.train()

    def gradients():
        model.zero_grad()
        model(ids, attention_mask=mask, position_ids=positions_of(mask), labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable()
    checkpointed = gradients()
    assert plain.keys() == checkpointed.keys()
    for name, grad in plain.items():
        assert_same(checkpointed[name], grad, name)


def check_checkpointing_refuses_a_cache(model):
    """A cache is refused with gradient checkpointing, whether it is filled or empty, and stays as it was."""
    ids = random_ids(2, 9)
    filled = model.eval()(ids[:, :5], use_cache=True).past_key_values
    for cache, seen in ((filled, 5), (hf_memmix.RecurrentStateCache(model.config), 0), (DynamicCache(), 0)):
        model.train().gradient_checkpointing_enable()
        with pytest.raises(ValueError, match=r"gradient checkpointing.*past_key_values"):
            model(ids[:, 5:], past_key_values=cache)
        assert int(cache.get_seq_length()) == seen
        model.eval()
        decoder_layers(base_model(model))[
            1
        ].train()  # only this layer is trained, so only this layer would ignore the cache
        with pytest.raises(ValueError, match=r"gradient checkpointing.*past_key_values"):
            model(ids[:, 5:], past_key_values=cache)
        assert int(cache.get_seq_length()) == seen
    model.train().gradient_checkpointing_disable()
    out = model(ids[:, 5:], past_key_values=filled).logits
    assert_same(out, model.eval()(ids, use_cache=False).logits[:, 5:], "train mode without checkpointing")


# ---- generation


@torch.no_grad()
def check_greedy(model):
    ids = random_ids(2, 11, seed=1)
    assert_same_generation(greedy(model, ids), uncached_greedy(model, ids), "greedy")


@torch.no_grad()
def check_padded_generation(model, **kwargs):
    """A left-padded batch generates what each row generates alone."""
    rows = [random_ids(1, n, seed=n) for n in (11, 4, 7)]
    ids, mask = left_padded(rows)
    out = greedy(model, ids, attention_mask=mask, **kwargs)
    new = out.sequences[:, -NEW_TOKENS:]
    alone = [greedy_along(model, torch.cat([row, new[i : i + 1]], 1)) for i, row in enumerate(rows)]
    new = torch.cat([tokens[:, -NEW_TOKENS:] for tokens, _ in alone])
    logits = torch.cat([logits for _, logits in alone])
    assert_same_generation(out, (torch.cat([ids, new], 1), logits), f"left-padded batch {kwargs}")


@torch.no_grad()
def check_static_cache(model):
    """The static cache generates the same tokens, for a plain and for a padded batch."""
    ids = random_ids(2, 11, seed=1)
    out = greedy(model, ids, cache_implementation="static")
    assert_same_generation(out, greedy_along(model, out.sequences), "static cache")
    check_padded_generation(model, cache_implementation="static")


@torch.no_grad()
def check_chunked_prefill(model):
    """A prompt fed in pieces generates the same tokens."""
    ids = random_ids(2, 13, seed=1)
    out = greedy(model, ids, prefill_chunk_size=4)
    assert_same_generation(out, greedy_along(model, out.sequences), "prefill in chunks of 4 tokens, the last of one")
    check_padded_generation(model, prefill_chunk_size=3)


@torch.no_grad()
def check_multi_turn(model):
    """A cache that generate() returned can be used in the next turn. Users may pass a cache of every kind."""
    ids = random_ids(1, 9, seed=1)
    config = model.config
    kinds = {
        "none": None,
        "RecurrentStateCache": hf_memmix.RecurrentStateCache(config),
        "DynamicCache()": DynamicCache(),
        "DynamicCache(config)": DynamicCache(config=config),
        "StaticCache": StaticCache(config=config, max_cache_len=40),
    }
    for kind, cache in kinds.items():
        first = greedy(model, ids, 4, past_key_values=cache)
        turn = torch.cat([first.sequences, random_ids(1, 5, seed=2)], 1)
        out = greedy(model, turn, 4, past_key_values=first.past_key_values)
        assert_same_generation(out, greedy_along(model, out.sequences, 4), f"second turn, cache: {kind}")


@torch.no_grad()
def check_wide_masks(model):
    """With a static cache, the mask may end at any position between the last new token and the end of the cache."""
    ids, mask = random_ids(2, 11), torch.ones(2, 20, dtype=torch.long)
    mask[0, :4] = mask[1, 9] = 0
    expected = model(ids, attention_mask=mask[:, :11], position_ids=positions_of(mask)[:, :11], use_cache=False).logits
    for make in (StaticCache, hf_memmix.RecurrentStateCache):
        for spare in (0, 2, 9):
            cache = make(config=model.config, max_cache_len=20)
            for start, end in ((0, 8), (8, 11)):
                here = mask[:, : end + spare]
                positions = positions_of(mask)[:, start:end]
                out = model(ids[:, start:end], attention_mask=here, position_ids=positions, past_key_values=cache)
                valid = mask[:, start:end].bool()
                what = f"{make.__name__}, mask of {end + spare}, tokens {start} to {end}"
                assert_same(out.logits[valid], expected[:, start:end][valid], what)
        with pytest.raises(ValueError, match=r"\[2, 12\], expected \[2, at least 13\]"):
            model(ids[:, :2], attention_mask=mask[:, :12], past_key_values=cache)


def assert_follows(model, out, ids, mask, lengths, what):
    """The first `lengths` [B] new tokens of generate() for the rows of `ids` are those of full forwards of the rows.

    `mask` covers `ids` and the new tokens. Each row runs alone. With sliding windows the rows run together, because
    pads in the middle of a row count in the width of the window.
    """
    new = len(out.logits)
    logits = torch.stack(out.logits, 1)
    assert_same_tokens(out.sequences[:, :-new], ids, what)
    together = slides(model)
    if together:
        full = model(out.sequences, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits
    for i, length in enumerate(lengths):
        last = ids.shape[1] + length  # one past the row's last new token
        valid = mask[i, :last].bool()
        if not together:
            alone = model(out.sequences[i : i + 1, :last][:, valid], use_cache=False).logits[0]
        row = full[i, :last][valid] if together else alone
        expected = row[-length - 1 : -1]
        tolerance = max(TOLERANCES[expected.dtype], 1e-6)
        assert_same(logits[i, :length].to(expected.dtype), expected, f"{what}, row {i}", tolerance)
        assert_same_tokens(out.sequences[i, last - length : last], expected.argmax(-1), f"{what}, row {i}")


def an_end_token(rows):
    """A token that ends some rows of generated tokens [B, T] long before others, and the lengths of the
    rows with it.
    """
    for token in rows.unique().tolist():
        lengths = [(row + [token]).index(token) + 1 for row in rows.tolist()]
        lengths = [min(length, rows.shape[1]) for length in lengths]
        if max(lengths) - min(lengths) > 2:
            return token, lengths
    raise AssertionError(f"no token ends these rows apart: {rows.tolist()}")


@torch.no_grad()
def check_finished_rows(model):
    """The states of rows that end early do not change afterwards. In the next turn, with masked pads, each row equals
    the row alone.
    """
    ids, mask = left_padded([random_ids(1, n, seed=n) for n in (9, 5, 7)])
    end, lengths = an_end_token(greedy(model, ids, 9, attention_mask=mask).sequences[:, 9:])
    real = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    caches = {"dynamic": None, "static": hf_memmix.RecurrentStateCache(model.config, max_cache_len=40)}
    for kind, cache in caches.items():
        out = greedy(model, ids, 9, attention_mask=mask, eos_token_id=end, past_key_values=cache)
        assert not out.sequences[:, 9:][real == 0].any(), "a finished row is not followed by pads"
        seen, cache = torch.cat([mask, real], 1), out.past_key_values
        assert_follows(model, out, ids, seen, lengths, f"first turn, {kind}")

        turn = torch.cat([out.sequences, random_ids(3, 3, seed=2)], 1)
        shown = torch.cat([seen, torch.ones(3, 3, dtype=torch.long)], 1)
        for wrong in (torch.ones_like(shown), shown * turn.ne(end)):
            with pytest.raises(ValueError, match="attention_mask hides .* of the .* tokens in the cache in row"):
                greedy(model, turn, 4, attention_mask=wrong, past_key_values=cache)
        out = greedy(model, turn, 4, attention_mask=shown, past_key_values=cache)
        shown = torch.cat([shown, torch.ones(3, 4, dtype=torch.long)], 1)
        assert_follows(model, out, turn, shown, [4] * 3, f"second turn, {kind}")


@torch.no_grad()
def check_fork(model):
    """A copied cache and its original can be continued independently."""
    ids, (left, right) = random_ids(1, 9), random_ids(2, 6, seed=4).split(1)
    cache = model(ids, use_cache=True).past_key_values
    fork = copy.deepcopy(cache)
    for part, past in ((left, cache), (right, fork)):
        out = model(part, past_key_values=past, use_cache=True).logits
        expected = model(torch.cat([ids, part], 1), use_cache=False).logits[:, 9:]
        assert_same(out, expected, "forked cache")


@torch.no_grad()
def check_beams(model):
    ids = random_ids(2, 7, seed=1)
    out = {}
    for use_cache in (True, False):
        out[use_cache] = greedy(
            model,
            ids,
            use_cache=use_cache,
            num_beams=3,
            num_return_sequences=2,
            output_scores=True,
        )
    assert_same_tokens(out[True].sequences, out[False].sequences, "beams")
    assert_same(out[True].sequences_scores, out[False].sequences_scores, "scores of the beams")


@torch.no_grad()
def check_sampling(model):
    """Several samples per prompt are equal with and without a cache from the same seed."""
    ids, mask = left_padded([random_ids(1, n, seed=n) for n in (9, 5)])
    out = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        out.append(
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                num_return_sequences=3,
                max_new_tokens=NEW_TOKENS,
                use_cache=use_cache,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    assert_same_generation(out[0], (out[1].sequences, torch.stack(out[1].logits, 1)), "samples")
    assert len({tuple(row) for row in out[0].sequences.tolist()}) > 2, "the samples of one prompt are all equal"


@torch.no_grad()
def check_prompt_lookup(model):
    """Prompt-lookup decoding equals greedy decoding, and some proposed tokens were rejected."""
    ids = prompt_with_repeats()
    with recorded_crops(model) as crops:
        out = greedy(model, ids, 10, prompt_lookup_num_tokens=3, max_matching_ngram_size=2)
    assert_same_generation(out, greedy_along(model, out.sequences, 10), "prompt lookup")
    assert any(crops), "no proposal was rejected: the check shows nothing"


@torch.no_grad()
def check_assistant(model, assistant):
    """Decoding with a draft model equals greedy decoding; some drafts are rejected and some accepted."""
    ids = prompt_with_repeats()
    with recorded_crops(model) as crops:
        out = greedy(model, ids, 10, assistant_model=assistant)
    expected = greedy_along(model, out.sequences, 10)
    assert_same_generation(out, expected, "assistant with other weights")
    assert any(crops), "no draft was rejected: the check shows nothing"
    assert_same_generation(greedy(model, ids, 10, assistant_model=model), expected, "its own assistant")


@torch.no_grad()
def check_written_pad(model):
    """A pad token that the target writes is a token like others, also for an assistant that reads the text anew."""
    ids = prompt_with_repeats()
    expected = greedy(model, ids, 10)
    written = expected.sequences[0, ids.shape[1]].item()
    draft = copy.deepcopy(model)
    # several rounds, whatever its confidence, so that it has read the pad before
    draft.generation_config.num_assistant_tokens, draft.generation_config.assistant_confidence_threshold = 3, 0
    again = greedy(model, ids, 10, assistant_model=draft, pad_token_id=written)
    assert_same_generation(again, (expected.sequences, torch.stack(expected.logits, 1)), "a written pad")


@torch.no_grad()
def check_crop(model):
    """After a crop the cache equals one that never read the removed tokens."""
    ids, following = random_ids(2, 13), random_ids(2, 4, seed=5)
    recorded = [(3, 13)] if slides(model) and sliding_cache_records_one_forward() else [(3, 8), (8, 13)]
    for removed in (4, 5, 6, 10):  # inside the last forward, all of it, and beyond it
        cache = hf_memmix.RecurrentStateCache(model.config)
        model(ids[:, :3], past_key_values=cache, use_cache=True)
        cache.activate_past_recording()
        for start, end in recorded:
            model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache.crop(-removed)
        assert int(cache.get_seq_length()) == 13 - removed
        out = model(following, past_key_values=cache, use_cache=True).logits
        rest = torch.cat([ids[:, : 13 - removed], following], 1)
        assert_same(out, model(rest, use_cache=False).logits[:, -4:], f"crop by {removed}")


@torch.no_grad()
def check_batch_operations(model):
    """reorder, repeat, select and expand apply to all states of a row."""
    ids, following = random_ids(3, 9), random_ids(3, 4, seed=5)
    order = torch.tensor([2, 0, 0])

    def after(change):
        cache = model(ids, use_cache=True).past_key_values
        change(cache)
        return cache

    def expect(cache, rows, what):
        tail = following[rows % 3]
        out = model(tail, past_key_values=cache, use_cache=True).logits
        full = model(torch.cat([ids[rows], tail], 1), use_cache=False).logits[:, -4:]
        assert_same(out, full, what)

    expect(after(lambda c: c.reorder_cache(order)), order, "reorder_cache")
    expect(after(lambda c: c.batch_select_indices(order[:2])), order[:2], "batch_select_indices")
    repeated = torch.tensor([0, 0, 1, 1, 2, 2])
    expect(after(lambda c: c.batch_repeat_interleave(2)), repeated, "batch_repeat_interleave")


# the checks that a model of every family and layout must pass: the rows of test_families.py
CHECKS = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_memory_reaches_the_end,
        check_splits,
        check_padding,
        check_packed,
        check_greedy,
        check_padded_generation,
        check_static_cache,
        check_chunked_prefill,
        check_multi_turn,
        check_wide_masks,
        check_finished_rows,
        check_fork,
        check_beams,
        check_sampling,
        check_prompt_lookup,
        check_crop,
        check_batch_operations,
    )
}
