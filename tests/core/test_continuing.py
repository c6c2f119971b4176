"""A cache that is given to generate() or forward() a second time, where transformers would continue it wrongly."""

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import DynamicCache

from core.checks import greedy, uncached_greedy
from hf_memmix import RecurrentStateCache
from testing import assert_same, base_model, random_ids, tiny_model


@pytest.fixture(params=("first", "all"))
def model(request):
    return tiny_model("llama", request.param)


@torch.no_grad()
@pytest.mark.parametrize("implementation", (None, "static"))
def test_the_cache_of_beam_search_is_refused(model, implementation, tmp_path):
    """Its rows are in another order than the sequences."""
    options = {"num_beams": 3, "num_return_sequences": 3, "cache_implementation": implementation}
    out = greedy(model, random_ids(2, 7), 5, **options)
    turn, cache = torch.cat([out.sequences, random_ids(6, 2)], 1), out.past_key_values
    for use in (
        lambda: model(turn[:, -2:], past_key_values=cache),
        lambda: greedy(model, turn, past_key_values=cache),
        lambda: cache.save_pretrained(tmp_path),
    ):
        with pytest.raises(ValueError, match=r"beam search has filled.*empty cache.*reset\(\)"):
            use()
    cache.reset()
    ids = random_ids(6, 5)
    assert_same(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


@torch.no_grad()
@pytest.mark.parametrize("options", ({}, {"prefill_chunk_size": 2}, {"num_beams": 2}), ids=str)
@pytest.mark.parametrize("make", (RecurrentStateCache, DynamicCache, "static"), ids=str)
def test_a_prompt_without_a_new_token_is_refused(model, make, options):
    """transformers would feed the whole prompt, or a part of it, after itself."""
    ids, rows = random_ids(1, 9), options.get("num_beams", 1)
    sizes = {"max_cache_len": 40} if make == "static" else {}
    cache = (RecurrentStateCache if make == "static" else make)(config=model.config, **sizes)
    model(ids.expand(rows, -1), past_key_values=cache)
    for tokens in (9, 6, 3):
        prompt = ids[:, :tokens]
        for prompt_as in ({"inputs": prompt}, {"inputs_embeds": model.get_input_embeddings()(prompt)}):
            with pytest.raises(ValueError, match=f"has {tokens} tokens and the cache has read 9"):
                model.generate(**prompt_as, past_key_values=cache, max_new_tokens=3, **options)
    assert int(cache.get_seq_length()) == 9


@torch.no_grad()
def test_new_tokens_alone_with_a_mask_of_all_tokens(model):
    """The other form in which transformers takes a second turn."""
    ids = random_ids(1, 12)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    out = greedy(model, ids[:, 9:], past_key_values=cache, attention_mask=torch.ones_like(ids))
    assert_same(torch.stack(out.logits, 1).double(), uncached_greedy(model, ids)[1], tolerance=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("implementation", (None, "static"))
@pytest.mark.parametrize("layer", (1, 3))
def test_a_cache_left_by_half_a_forward_is_refused(model, layer, implementation, tmp_path):
    """The layers before the place of the error have read the new tokens, the others have not."""
    ids = random_ids(1, 12)
    cache = RecurrentStateCache(model.config, 40 if implementation else None)
    model(ids[:, :6], past_key_values=cache)

    def out_of_memory(*_):
        raise MemoryError

    hook = base_model(model).layers[layer].register_forward_pre_hook(out_of_memory)
    try:
        with pytest.raises(MemoryError):
            model(ids[:, 6:9], past_key_values=cache)
    finally:
        hook.remove()
    uses = [lambda: greedy(model, ids, past_key_values=cache), lambda: cache.save_pretrained(tmp_path)]
    if not implementation:
        uses.append(lambda: model(ids[:, 6:9], past_key_values=cache))
    for use in uses:
        with pytest.raises(ValueError, match="broken off.* first layer .* has read 9 tokens.* last one 6"):
            use()
    cache.reset()
    assert_same(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


def test_expand_of_a_cache_that_is_part_of_a_graph(model):
    """A document that was read without `torch.no_grad()`; gradients reach it through the copies."""
    document, questions = random_ids(1, 6), random_ids(3, 4)
    cache = model(document, use_cache=True).past_key_values
    weight = model.get_input_embeddings().weight
    out = model(questions, past_key_values=cache.expand(3)).logits
    expected = model(torch.cat([document.expand(3, -1), questions], 1), use_cache=False).logits[:, 6:]
    assert_same(out, expected)
    gradients = [torch.autograd.grad(x.square().sum(), weight)[0] for x in (out, expected)]
    assert_same(*gradients)
    assert int(cache.get_seq_length()) == 6


@torch.no_grad()
@pytest.mark.parametrize("layout", ("first", "all"))
def test_a_second_turn_of_prompt_tuning_is_refused(layout, tmp_path):
    """The cache has read more tokens than there are in the prompt: transformers would leave out as many new ones."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_model("llama", layout, fresh=True), config).double().eval()
    ids = random_ids(2, 7)
    options = {"max_new_tokens": 4, "do_sample": False}
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options)
    turn = torch.cat([out.sequences, random_ids(2, 6)], 1)
    options = {"max_new_tokens": 4, "attention_mask": torch.ones_like(turn)}
    out.past_key_values.save_pretrained(tmp_path)
    for cache in (out.past_key_values, RecurrentStateCache.from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match="prompt tuning has put 3 tokens.*without past_key_values"):
            model.generate(input_ids=turn, past_key_values=cache, **options)
    out.past_key_values.reset()
    again = model.generate(input_ids=turn, past_key_values=out.past_key_values, do_sample=False, **options)
    assert_same(again, model.generate(input_ids=turn, do_sample=False, **options), tolerance=0)
