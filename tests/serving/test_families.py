"""Every decoder family and every family that is trained from scratch: the tokens are those of `generate()`."""

import pytest
from greedy import ask, assert_greedy, assert_log_probabilities, references_of, tokens_of
from serving_cases import BACKBONES, MORE_BACKBONES, RECIPES, SCRATCH

MORE = [pytest.param(name, marks=pytest.mark.product) for name in MORE_BACKBONES]


@pytest.mark.parametrize("case", [*SCRATCH, *BACKBONES, *RECIPES, *MORE], scope="module")
def test_family(case, engines):
    """The logits too: vLLM must know what the family does to them."""
    references = references_of(engines.folders, case, "few")
    # an engine starts with a batch of the largest size
    engine = engines.get(case, max_num_batched_tokens=256, max_num_seqs=len(references))
    outputs = ask(engine, references, logprobs=5)
    assert_greedy(tokens_of(outputs), references)
    assert_log_probabilities(outputs, references)
