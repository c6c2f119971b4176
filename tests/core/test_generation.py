"""generate() and its users beyond what `checks.py` asks of every family."""

import copy
import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, pipeline
from transformers.cache_utils import StaticLayer
from transformers.generation.continuous_batching import ContinuousBatchingManager

from core.checks import assert_same_generation, check_padded_generation, greedy, left_padded, uncached_greedy
from hf_memmix import RecurrentStateCache
from hf_memmix.layout_hooks import sequences_are_separate
from testing import (
    MIXERS,
    assert_same,
    assert_same_tokens,
    base_model,
    every_third,
    in_turn,
    random_ids,
    tiny_model,
    word_tokenizer,
)

LAYOUTS = ("first", "all")


@pytest.fixture(params=LAYOUTS)
def model(request):
    return tiny_model("llama", request.param)


# ---- inputs


@pytest.mark.parametrize("family", ("llama", "gemma3_text", "gpt2"))
@torch.no_grad()
def test_inputs_embeds(family):
    model = tiny_model(family, "odd")
    ids = random_ids(2, 9)
    embeds = model.get_input_embeddings()(ids)
    assert_same(model(inputs_embeds=embeds).logits, model(ids).logits)
    mask = torch.ones_like(ids)
    out = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert_same_tokens(out, uncached_greedy(model, ids)[0][:, 9:])


@pytest.mark.parametrize("family", ("llama", "gpt_neox", "gemma3_text", "gpt2"))
@torch.no_grad()
def test_hidden_states(family):
    """One entry per layer and one for the embeddings, as from the native model; alone and inside the causal LM."""
    model, native = tiny_model(family, "odd"), tiny_model(family, None)
    ids = random_ids(1, 6)
    out, expected = (m(ids, output_hidden_states=True) for m in (model, native))
    assert [h.shape for h in out.hidden_states] == [h.shape for h in expected.hidden_states]
    inner = base_model(model)(ids, output_hidden_states=True)
    for a, b in zip(inner.hidden_states, out.hidden_states, strict=True):
        assert_same(a, b)
    assert_same(inner.last_hidden_state, out.hidden_states[-1])
    # the mixers changed what follows them and nothing before
    assert (out.hidden_states[1] - expected.hidden_states[1]).abs().max() == 0
    assert (out.hidden_states[2] - expected.hidden_states[2]).abs().max() > 1e-3


@torch.no_grad()
def test_forms_of_the_output(model):
    ids = random_ids(2, 7)
    assert_same(model(ids, return_dict=False, logits_to_keep=2)[0], model(ids).logits[:, -2:])


@torch.no_grad()
def test_mask_kinds(model):
    """A boolean mask, an integer mask and a float mask say the same."""
    ids, mask = left_padded([random_ids(1, 7), random_ids(1, 4)])
    expected = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    for dtype in (torch.bool, torch.int32, torch.float32):
        out = model(ids, attention_mask=mask.to(dtype), use_cache=False).logits
        assert_same(out[mask.bool()], expected, f"mask of {dtype}")


@torch.no_grad()
def test_own_4d_mask(model):
    """A 4D mask says nothing about padding to a memory; `memmix_mask` beside it does."""
    rows = [random_ids(1, 7), random_ids(1, 4)]
    ids, mask = left_padded(rows)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    mask_4d = (causal[None] & mask.bool()[:, None, :])[:, None]
    mask_4d = mask_4d | torch.eye(7, dtype=torch.bool)  # a pad may look at itself: no row of the softmax is empty
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    out = model(ids, attention_mask=mask_4d, memmix_mask=mask, position_ids=positions, use_cache=False).logits
    for i, row in enumerate(rows):
        assert_same(out[i, mask[i].bool()], model(row, use_cache=False).logits[0])
    # beside packed sequences: attention layers see one more token, what the row alone sees by such a mask
    near = causal.triu(-1)
    bounds, both = torch.tensor([0, 7, 11], dtype=torch.int32), torch.block_diag(near, near[:4, :4]).bool()
    options = {"memmix_mask": None, "use_cache": False}
    out = model(torch.cat(rows, 1), attention_mask=both[None, None], cu_seq_lens_q=bounds, **options).logits
    for row, part in zip(rows, out.split((7, 4), 1), strict=True):
        own = near[: row.shape[1], : row.shape[1]][None, None]
        assert_same(part, model(row, attention_mask=own, **options).logits)
    with pytest.raises(ValueError, match="packed sequences cannot be combined with a padding mask"):
        model(ids, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 7, 10, 14], dtype=torch.int32), **options)


@torch.no_grad()
@every_third(("mixer", "layout"), list(zip(MIXERS, itertools.cycle(("odd", "all")))))
def test_prompt_tuning_of_a_padded_batch(mixer, layout):
    """PEFT puts tokens in front of the prompt after its inputs have been prepared, pads and all."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama", layout, mixer, fresh=True), config).double().eval()
    ids, mask = left_padded([random_ids(1, 7), random_ids(1, 4)])
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=5, return_dict_in_generate=True, output_logits=True
    )
    shown = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1)
    full = model(input_ids=out.sequences, attention_mask=shown, use_cache=False).logits[:, -6:-1]
    assert_same(torch.stack(out.logits, 1).double(), full, tolerance=1e-6)
    swapped = torch.cat([ids[:, :3].flip(1) + 1, ids[:, 3:]], 1)  # what stands at the pads is of no account
    again = model.generate(input_ids=swapped, attention_mask=mask, max_new_tokens=5)
    assert_same_tokens(again[1, 7:], out.sequences[1, 7:])


@torch.no_grad()
@pytest.mark.parametrize("layout", ("odd", "all"))
@pytest.mark.parametrize("implementation", (None, "static"))
def test_prefix_tuning_is_refused(layout, implementation):
    """A prefix consists of keys and values, which a recurrent state cannot hold."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama", layout, fresh=True), config).double().eval()
    ids = random_ids(2, 5)
    with pytest.raises(ValueError, match="holds keys and values.*prefix tuning"):
        model(input_ids=ids)
    with pytest.raises(ValueError, match="holds keys and values.*prefix tuning"):
        model.generate(input_ids=ids, max_new_tokens=3, cache_implementation=implementation)


# ---- caches and modes


@torch.no_grad()
@pytest.mark.parametrize("layout", ("first", "all"))
def test_chunked_prefill_of_a_static_cache(layout, monkeypatch):
    """Keys and values are never allocated for layers with mixers: they would take gigabytes."""
    model, ids, made = tiny_model("llama", layout), random_ids(1, 12), []
    initialize = StaticLayer.lazy_initialization

    def recorded(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        made.append(self.keys.nbytes)

    monkeypatch.setattr(StaticLayer, "lazy_initialization", recorded)
    options = {"cache_implementation": "static", "prefill_chunk_size": 5}
    assert_same_generation(greedy(model, ids, **options), uncached_greedy(model, ids), "chunks")
    kept = model.config.mixer_types.count("attention")
    assert len([size for size in made if size]) == kept


@torch.no_grad()
@pytest.mark.parametrize("family", ("llama", "gemma3_text"))
def test_masks_are_made_for_attention_layers_only(family, monkeypatch):
    """Before each token of a static cache the library makes masks, which no mixer reads."""
    made = []
    for place in ("hf_memmix._generation_hooks", "transformers.models.gemma3.modeling_gemma3"):
        make = importlib.import_module(place).create_masks_for_generate
        monkeypatch.setattr(
            f"{place}.create_masks_for_generate", lambda *a, _m=make, **k: made.append(1) or _m(*a, **k)
        )
    for layout in LAYOUTS:
        made.clear()
        check_padded_generation(tiny_model(family, layout), cache_implementation="static")
        assert bool(made) == (layout != "all")


@torch.no_grad()
@every_third(("mixer", "layout"), list(zip(MIXERS, itertools.cycle(LAYOUTS))))
def test_samples_on_a_static_cache(mixer, layout):
    """Three samples per prompt: the cache has one row per sample."""
    (ids, mask), out = left_padded([random_ids(1, 7), random_ids(1, 4)]), []
    model = tiny_model("llama", layout, mixer)
    for cache in ({"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(0)
        options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5, **cache}
        out.append(model.generate(ids, attention_mask=mask, **options))
    assert_same_tokens(out[1], out[0])


@torch.no_grad()
@in_turn(mixer=MIXERS, case=[*itertools.product(LAYOUTS, (None, "static"))])
def test_padded_prompt_token_by_token(mixer, case):
    """A chunk of the prompt may be a single pad; the new token of a decode step is never a pad."""
    layout, cache = case
    check_padded_generation(tiny_model("llama", layout, mixer), prefill_chunk_size=1, cache_implementation=cache)


@torch.no_grad()
@pytest.mark.parametrize("implementation", (None, "static"))
def test_beams_of_a_padded_batch(model, implementation):
    rows = [random_ids(1, n, seed=n) for n in (8, 5)]
    ids, mask = left_padded(rows)
    options = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False}
    out = model.generate(ids, attention_mask=mask, cache_implementation=implementation, **options)
    for i, row in enumerate(rows):
        alone = model.generate(row, attention_mask=torch.ones_like(row), use_cache=False, **options)
        assert_same_tokens(out[i, -5:], alone[0, -5:])


@torch.no_grad()
def test_assistant_of_another_kind(model):
    """A native draft model for a memory model, and a memory model as draft of a native one."""
    native = tiny_model("llama", None, seed=1)
    ids = random_ids(1, 9)
    for target, draft in ((model, native), (native, model)):
        out = greedy(target, ids, 8, assistant_model=draft)
        assert_same_generation(out, uncached_greedy(target, ids, 8), "mixed pair")


@torch.no_grad()
def test_assisted_decoding_from_a_filled_cache_is_refused(model):
    """transformers would feed the whole prompt again; its own models then give wrong results without an error."""
    ids = random_ids(1, 8)
    cache = greedy(model, ids, 4).past_key_values
    for kwargs in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        with pytest.raises(ValueError, match="empty cache.*11 tokens"):
            greedy(model, torch.cat([ids, ids], 1), past_key_values=cache, **kwargs)


@torch.no_grad()
def test_a_second_turn_after_assisted_decoding(model):
    """The cache of assisted decoding can be used for a second turn without assistance."""
    ids = random_ids(1, 8)
    first = greedy(model, ids, 6, prompt_lookup_num_tokens=3)
    turn = torch.cat([first.sequences, ids[:, :5]], 1)
    out = greedy(model, turn, past_key_values=first.past_key_values)
    assert_same_generation(out, uncached_greedy(model, turn), "after prompt lookup")


@torch.no_grad()
@in_turn(mixer=MIXERS, case=[*itertools.product(LAYOUTS, (None, DynamicCache()))])
def test_assisted_decoding_leaves_no_recording(mixer, case):
    """Every recorded forward keeps its inputs and states, so recording must stop after assisted decoding."""
    layout, cache = case
    model = tiny_model("llama", layout, mixer)
    out = greedy(model, random_ids(1, 8), 6, prompt_lookup_num_tokens=3, past_key_values=copy.deepcopy(cache))
    cache = out.past_key_values
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    model(random_ids(1, 2), past_key_values=cache)
    with pytest.raises(ValueError, match="only the last 0 tokens"):
        cache.crop(-1)


def test_assisted_decoding_on_a_static_cache_is_refused_or_right(model):
    ids = random_ids(1, 9)
    try:
        out = greedy(model, ids, 8, prompt_lookup_num_tokens=3, cache_implementation="static")
    except ValueError as error:
        assert "static" in str(error).lower()  # noqa: PT017
    else:
        assert_same_generation(out, uncached_greedy(model, ids, 8), "prompt lookup, static cache")


def test_continuous_batching_is_refused(model):
    """On each entry; `transformers serve --continuous-batching` calls the last one."""
    entries = [
        lambda: model.generate_batch([[1, 2, 3]]),
        lambda: model.generate(random_ids(1, 3), cache_implementation="paged"),
        lambda: model.continuous_batching_context_manager().__enter__(),
        model.init_continuous_batching,
    ]
    for entry in entries:
        with pytest.raises(ValueError, match="continuous batching of transformers.*vLLM"):
            entry()


def test_a_manager_of_the_user_is_refused_at_its_first_request(model):
    """It calls the model without the methods that refuse; its error reaches the result of the request."""
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    small = ContinuousBatchingConfig(block_size=16, num_blocks=8, max_batch_tokens=32)
    manager = ContinuousBatchingManager(model, GenerationConfig(**options), small)
    manager.start()
    try:
        manager.add_request([1, 2, 3], max_new_tokens=2)
        result = manager.get_result(timeout=60)
    finally:
        manager.stop(block=True, timeout=30)
    assert "continuous batching of transformers" in result.error and "vLLM" in result.error


def test_quantized_cache_is_refused(model):
    with pytest.raises((ValueError, ImportError)):
        greedy(model, random_ids(1, 5), cache_implementation="quantized")


@torch.no_grad()
def test_streamer_and_stopping(model):
    """Tokens stream out one by one, and a stop token ends the row."""
    ids = random_ids(1, 6)
    whole = uncached_greedy(model, ids)[0][0].tolist()
    tokens = []
    streamer = SimpleNamespace(put=lambda value: tokens.extend(value.flatten().tolist()), end=lambda: None)
    greedy(model, ids, streamer=streamer)
    assert tokens == whole
    stopped = greedy(model, ids, eos_token_id=whole[8]).sequences[0].tolist()
    assert stopped == whole[: whole.index(whole[8], 6) + 1]


def test_pipeline(model):
    tokenizer = word_tokenizer()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    texts = [tokenizer.decode(random_ids(1, n, seed=n)[0]) for n in (5, 9)]
    alone = [generator(text, max_new_tokens=5, do_sample=False)[0]["generated_text"] for text in texts]
    together = generator(texts, max_new_tokens=5, do_sample=False, batch_size=2)
    assert [rows[0]["generated_text"] for rows in together] == alone


# ---- packing beyond the checks of every family


@torch.no_grad()
@in_turn(mixer=MIXERS, layout=("odd", "all"))
def test_indices_of_sequences_in_any_order(mixer, layout):
    """`seq_idx` names sequences: the next one may have a smaller number."""
    model, ids = tiny_model("llama", layout, mixer), random_ids(2, 9)
    lengths = (4, 2, 3)
    out = model(ids, seq_idx=torch.tensor([3, 3, 3, 3, 1, 1, 2, 2, 2]).repeat(2, 1), use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    assert_same(out, torch.cat(alone, 1))


@torch.no_grad()
@pytest.mark.parametrize("row", (0, 1))
@pytest.mark.parametrize("additive", (False, True))
def test_a_mask_that_does_not_separate_packed_sequences_is_refused(additive, row):
    """All packed rows are checked. Only a large negative entry of the mask separates two sequences."""
    boundaries = torch.tensor([0, 3, 6, 8, 12], dtype=torch.int32)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[0, :, 3:, :3] = mask[1, :, 2:, :2] = False
    leaking = mask.clone()
    first = (3, 2)[row]
    leaking[row, :, first, first - 1] = True
    if additive:
        mask, leaking = (torch.zeros(m.shape).masked_fill(~m, -1e9) for m in (mask, leaking))
        biased = mask.clone()
        biased[row, :, first, first - 1] = -2.0  # a bias as of ALiBi, no separation
        assert not sequences_are_separate(biased, boundaries)
    assert sequences_are_separate(mask, boundaries)
    assert not sequences_are_separate(leaking, boundaries)


@torch.no_grad()
@pytest.mark.parametrize(
    "boundaries",
    (
        {"cu_seq_lens_q": torch.tensor([0, 4, 10], dtype=torch.int32)},
        {"seq_idx": torch.tensor([[0] * 4 + [1] * 6], dtype=torch.int32)},
        # padded to a fixed number, as collators for static shapes do
        {"cu_seq_lens_q": torch.tensor([0, 4, 4, 10, 10], dtype=torch.int32)},
        # with the cache that a forward makes by default
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]), "use_cache": None},
    ),
    ids=("cu_seq_lens_q", "seq_idx", "empty sequences", "position_ids"),
)
def test_packed_by_boundaries_alone(boundaries):
    """They suffice where no attention layer needs positions."""
    model, ids = tiny_model("llama", "all"), random_ids(1, 10)
    out = model(ids, **{"use_cache": False, **boundaries}).logits
    assert_same(out, torch.cat([model(part, use_cache=False).logits for part in ids.split((4, 6), 1)], 1))


@pytest.mark.parametrize("cache", (DynamicCache, None))
def test_packed_into_a_given_cache_is_refused(cache):
    model = tiny_model("llama", "all")
    given = RecurrentStateCache(model.config) if cache is None else cache(config=model.config)
    with pytest.raises(ValueError, match=r"packed.*cache"):
        model(random_ids(1, 6), cu_seq_lens_q=torch.tensor([0, 2, 6], dtype=torch.int32), past_key_values=given)
