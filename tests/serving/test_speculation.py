"""Speculative decoding: draft tokens from the text, mostly rejected; the answers are those of `generate()`."""

import pytest
import torch
from greedy import ask, assert_greedy, references_of, tokens_of
from serving_cases import CACHING, ROOMY

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.cases("several")
@pytest.mark.parametrize("caching", [False, True])
def test_ngrams(caching, engines):
    """With prefix caching, the states of accepted tokens are also those that are kept."""
    if caching and not torch.cuda.is_available():
        return  # refused, see test_refusals.py
    engine = engines.get("several", **(CACHING if caching else ROOMY), speculative_config=NGRAMS)
    for prompts in ("prefix", "prefix") if caching else ("plain", "one"):
        references = references_of(engines.folders, "several", prompts)
        assert_greedy(tokens_of(ask(engine, references)), references)
    found = [m for m in engine.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")]
    counts = {m.name.rpartition("_num_")[2]: m.value for m in found}
    assert counts["draft_tokens"] > counts["accepted_tokens"] > 0
    engines.close()
