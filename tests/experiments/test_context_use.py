"""How much of its context a transformer uses: paired positions, and ratios to the longest context."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memmix.training.experiments.conversion.context_use import losses_after, measure, section

VOCAB = 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.5, **sizes)).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_token_is_predicted_from_the_tokens_before_it_alone(model, tokens):
    positions = torch.tensor([8, 20, 59])
    found = losses_after(model, tokens, positions, context=8, batch=2)
    for position, loss in zip(positions.tolist(), found, strict=True):
        logits = model(tokens[None, position - 8 : position]).logits[0, -1]
        torch.testing.assert_close(loss, F.cross_entropy(logits, tokens[position]))


def test_ratios_are_to_the_longest_context_at_the_same_positions(model, tokens):
    rows = measure(model, tokens, contexts=(4, 16), count=10)
    short, long = rows
    assert long["ratio"] == 1 and long["error"] == 0 and [row["context"] for row in rows] == [4, 16]
    assert short["ratio"] == pytest.approx(math.exp(short["loss"] - long["loss"])) and short["error"] > 0
    results = {"rows": rows, "settings": {"positions": 10}, "environment": {"hardware": "CPU", "commit": "abc"}}
    assert f"| 4 | {math.exp(short['loss']):.2f} | {short['ratio']:.3f} |" in section(results)
    with pytest.raises(ValueError, match="60 tokens have no 50 positions after a context of 16"):
        measure(model, tokens, contexts=(16,), count=50)
