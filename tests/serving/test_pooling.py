"""Sequence classifiers, and embeddings of a language model: the numbers are those of transformers."""

import pytest
import torch
from greedy import pooled
from serving_cases import ASSET


@pytest.mark.cases("classifier")
def test_classifier(engines):
    engine, prompts, expected = pooled(engines, "classifier")
    for output, vector in zip(engine.classify(prompts, use_tqdm=False), expected, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.probs), vector, rtol=1e-4, atol=1e-5)


@pytest.mark.cases(ASSET)
def test_embedding(engines):
    engine, prompts, expected = pooled(engines, ASSET, convert="embed", skip_tokenizer_init=False)
    for output, vector in zip(engine.embed(prompts, use_tqdm=False), expected, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), vector, rtol=1e-4, atol=1e-5)
