"""Speculative decoding: draft tokens from the text or another model, mostly rejected; the answers are those of
`generate()`.
"""

import subprocess
import sys

import pytest
import torch
from greedy import ask, assert_greedy, references_of, refused, tokens_of
from references import ready
from serving_cases import CACHING, ROOMY

import child

# writes a transformer, in a process without vLLM
DRAFT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from testing import backbone_config
torch.manual_seed(0)
sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
config = backbone_config("llama", max_position_embeddings=1024, num_hidden_layers=int(sys.argv[1]), **sizes)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[2])
"""
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
    assert_drafted(engine)
    engines.close()


@pytest.mark.cases("gka_pure")
def test_draft_model(engines, tmp_path):
    """A transformer drafts; one with more layers than the model has memory layers is refused."""
    for layers in (4, 2):
        command = [sys.executable, "-c", DRAFT, str(layers), tmp_path / str(layers)]
        subprocess.run(command, env=child.child_env(), check=True)
    given = {"method": "draft_model", "model": str(tmp_path / "4"), "num_speculative_tokens": 3}
    message = refused(engines, ready(engines.folders / "gka_pure"), speculative_config=given)
    assert "--speculative-config (with a draft model of too many layers): " in message
    engine = engines.get("gka_pure", **ROOMY, speculative_config=given | {"model": str(tmp_path / "2")})
    for prompts in ("plain", "prefix"):
        references = references_of(engines.folders, "gka_pure", prompts)
        assert_greedy(tokens_of(ask(engine, references)), references)
    assert_drafted(engine)
    engines.close()


def assert_drafted(engine):
    """Some draft tokens were accepted, and some were not."""
    found = [m for m in engine.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")]
    counts = {m.name.rpartition("_num_")[2]: m.value for m in found}
    assert counts["draft_tokens"] > counts["accepted_tokens"] > 0
