"""Weights that accelerate keeps on disk: parameters are in place in a module's own forward, on "meta" elsewhere.

`test_native_code.py` tests that the hooks of every mixer's layers run.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.checks import check_assistant, check_prompt_lookup, check_static_cache, greedy
from testing import BESIDE, DEFAULT_MIXER, assert_same_tokens, build, mixers_of, random_ids, tiny_config, tiny_model

ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.product_rows(r"(gka|mamba2)\]")  # those of the other one are modules inside of a module
@pytest.mark.parametrize("mixer", [DEFAULT_MIXER, "mamba2", BESIDE])
def test_weights_on_disk(mixer, tmp_path):
    """Rollback and static caches work as with the weights in memory."""
    pytest.importorskip("accelerate")
    in_memory = tiny_model("llama", "odd", mixer, dtype=torch.float32)
    in_memory.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=ON_DISK, offload_folder=tmp_path / "offload"
    ).eval()
    assert all(p.device.type == "meta" for m in mixers_of(model).values() for p in m.parameters())
    check_prompt_lookup(model)
    check_assistant(model, build(tiny_config("llama", "odd", mixer), seed=1))
    check_static_cache(model)
    ids = random_ids(1, 9)
    assert_same_tokens(greedy(model, ids).sequences, greedy(in_memory, ids).sequences)
