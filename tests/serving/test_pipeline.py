"""Pipeline parallelism: the layers of a model in several processes, which hand on the hidden states."""

import copy
from types import SimpleNamespace

import pytest
import torch
from greedy import ask, assert_greedy, references_of, tokens_of
from serving_cases import BACKBONES, BLOCK, CACHING, MORE_BACKBONES, PROMPTS
from transformers import CONFIG_MAPPING

from hf_memmix.backbones import BACKBONES as ROWS
from testing import randomize

# those that this version of transformers knows
FAMILIES = {case.family: case for case in (BACKBONES | MORE_BACKBONES).values() if case.family in CONFIG_MAPPING}


def stage_of(model, rank: int):
    """A copy of a base model with the layers of one of two stages, as vLLM cuts it."""
    from vllm.model_executor.models.transformers.base import Base

    place = SimpleNamespace(world_size=2, rank_in_group=rank, is_first_rank=rank == 0, is_last_rank=rank == 1)
    found = SimpleNamespace(model=copy.deepcopy(model), pp_group=place, text_config=model.config)
    found.model_config = SimpleNamespace(model="", trust_remote_code=False)
    found._get_tie_word_embeddings = lambda: model.config.tie_word_embeddings
    Base.pipeline_parallel(found)
    return found.model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_families_that_can_be_cut(family):
    """Two stages compute what the whole model does, unless the family's row says that it changes the embeddings."""
    from transformers import AutoModel

    config = FAMILIES[family].config().backbone_config()
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = randomize(AutoModel.from_config(config)).float().eval()
    ids = torch.tensor([PROMPTS["few"][2]])
    options = {"position_ids": torch.arange(ids.shape[1])[None], "use_cache": False, "return_dict": False}
    whole = model(ids, **options)[0]
    handed_on = stage_of(model, 0)(ids, **options)[0]
    found = stage_of(model, 1)(inputs_embeds=handed_on, **options)[0]
    assert torch.allclose(found, whole, atol=1e-4) != ROWS[family].changes_embeddings


@pytest.mark.parametrize("case", ["several"])
def test_two_stages(case, engines):
    """One of the stages has no attention. `memmix serve` counts as many sequences as this engine."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    from hf_memmix.serving.vllm import blocks

    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    # vLLM's first run without the time that a compiler takes
    traced = {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}}
    engine = engines.get(case, **CACHING, **options, **traced)
    for which in ("few", "prefix", "prefix"):
        references = references_of(engines.folders, case, which)
        outputs = ask(engine, references)
        assert_greedy(tokens_of(outputs), references)
    assert all(output.num_cached_tokens for output in outputs)
    core = engine.llm_engine.engine_core.engine_core
    found = get_max_concurrency_for_kv_cache_config(engine.llm_engine.vllm_config, core.scheduler.kv_cache_config)
    arguments = ["--dtype=float32", "--max-model-len=1024", "--enable-prefix-caching", f"--block-size={BLOCK}"]
    config = blocks.configuration(engines.folders / case, [*arguments, "--pipeline-parallel-size=2"])
    assert blocks.sequences_that_fit(config, 2**30, (1024,)) == {1024: found}
