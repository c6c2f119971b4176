"""Sequence classifiers, and embeddings of a language model: the numbers are those of transformers."""

import pytest
import torch
from references import FILE, ready
from serving_cases import ASSET


def pooled(engines, case, **options):
    """An engine of a pooling model, and the references."""
    references = torch.load(ready(engines.folders / case) / FILE, weights_only=True)["pooled"]
    engine = engines.get(case, runner="pooling", **options)
    return engine, [{"prompt_token_ids": r["prompt"]} for r in references], [r["vector"] for r in references]


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
