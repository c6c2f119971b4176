"""Mixers share pages, so that vLLM has one group of layers with attention and one with states."""

import pytest
from serving_cases import SIZES
from transformers import AutoConfig

from hf_memmix import memmix_config
from testing import MIXERS, VOCAB

KEPT = "attention"
LAYOUTS = {
    "3 of 4": ("gka", "gka", "gka", KEPT) * 4,
    "the last page has fewer": (*("gka", "gka", "gka", KEPT) * 4, "gka"),
    "as many": ("gka", KEPT) * 3,
    "a few more": (*("gka", KEPT) * 4, "gka"),
    "half as many more": ("gka", KEPT, "gka", KEPT, "gka"),
    "states of several sizes": ("gka", "mamba2", "window", KEPT) * 2,
    "one attention": ("mamba2", "gka", KEPT, "ska"),
}


def planned(layout, folder, monkeypatch, *options):
    """The configuration of a server, and how vLLM divides 1 GiB."""
    from hf_memmix.serving.vllm import blocks

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    fields = {"vocab_size": VOCAB, "num_hidden_layers": len(layout), "bos_token_id": 1, "eos_token_id": None}
    config = memmix_config(AutoConfig.for_model("llama", **fields, **SIZES), list(layout), MIXERS)
    config.architectures = ["MemMixLlamaForCausalLM"]
    config.save_pretrained(folder)
    given = blocks.configuration(
        folder, ["--dtype=float32", "--max-model-len=1024", "--skip-tokenizer-init", *options]
    )
    return given, blocks.divided(given, 2**30)


def mixers_of(config, groups) -> list[int]:
    """How many mixers each layer with states has, in one list."""
    from hf_memmix.serving.vllm.layer import MemoryLayer

    layers = [config.compilation_config.static_forward_context[name] for group in groups for name in group.layer_names]
    return [len(layer.servers) for layer in layers if isinstance(layer, MemoryLayer)]


@pytest.mark.parametrize(
    "options", [("--no-enable-prefix-caching",), ("--enable-prefix-caching",)], ids=("", "caching")
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_groups(layout, options, tmp_path, monkeypatch):
    kinds = LAYOUTS[layout]
    config, found = planned(kinds, tmp_path, monkeypatch, *options)
    groups = found.kv_cache_groups
    assert len(groups) == 2
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    together = mixers_of(config, groups)
    assert sum(together) == len(kinds) - kinds.count(KEPT)
    assert len(together) <= 1.5 * kinds.count(KEPT)


def test_two_stages(tmp_path, monkeypatch):
    """A page has the mixers of one stage."""
    from hf_memmix.serving.vllm.page_plan import page_plan

    config, found = planned(LAYOUTS["3 of 4"], tmp_path, monkeypatch, "--pipeline-parallel-size=2")
    assert len(found.kv_cache_groups) == 2
    assert [page.layers for page in page_plan(config)] == [(0, 1, 2), (4, 5, 6), (8, 9, 10), (12, 13, 14)]


@pytest.mark.parametrize("kinds", [("gka",) * 3, ("gka", "mamba2")])
def test_without_attention_each_mixer_has_pages(kinds, tmp_path, monkeypatch):
    config, found = planned(kinds, tmp_path, monkeypatch)
    assert mixers_of(config, found.kv_cache_groups) == [1] * len(kinds)


def test_a_step_reaches_the_end_of_a_block(tmp_path, monkeypatch):
    """With prefix caching a state is kept there: fewer mixers share a page if their block would be too long."""
    options = "--enable-prefix-caching", "--max-num-batched-tokens=256"
    config, found = planned(LAYOUTS["3 of 4"], tmp_path, monkeypatch, *options)
    assert max(group.kv_cache_spec.block_size for group in found.kv_cache_groups) <= 128
    assert set(mixers_of(config, found.kv_cache_groups)) == {1}
