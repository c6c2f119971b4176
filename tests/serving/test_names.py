"""The names of vLLM that the plugin needs. They are private to vLLM and change with its releases: run this file first
with a new one. What is imported is read from the sources; what is overridden, called or read stands in `USED`.
"""

import ast
import dataclasses
import importlib
from pathlib import Path

import pytest

import hf_memmix.serving

FOLDER = Path(hf_memmix.serving.__file__).parent
# imported only if they are there, see compat.py
OPTIONAL = {"resolve_kv_cache_layout"}
TRANSFORMERS = "vllm.model_executor.models.transformers"
# names of a class or a module; of a tuple, one is enough: its name differs between versions
USED = {
    f"{TRANSFORMERS}:TransformersForCausalLM": (
        "_patch_config",
        "_create_hf_to_vllm_mapper",
        "recursive_replace",
        "load_weights",
        ("create_attention_instances", "_create_attention_instances"),
    ),
    f"{TRANSFORMERS}:TransformersMoEForCausalLM": ("recursive_replace",),
    f"{TRANSFORMERS}:TransformersForSequenceClassification": ("load_weights",),
    "vllm.model_executor.models.config:VerifyAndUpdateConfig": (
        "verify_and_update_model_config",
        "verify_and_update_config",
    ),
    "vllm.model_executor.models.interfaces:IsHybrid": (
        "get_mamba_state_shape_from_config",
        "get_mamba_state_copy_func",
    ),
    "vllm.model_executor.layers.mamba.abstract:MambaBase": (
        "get_state_shape",
        "get_state_dtype",
        "mamba_type",
        "get_attn_backend",
        "get_kv_cache_spec",
        "kv_cache",
    ),
    "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder": ("build", "update_block_table"),
    "vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadata": (
        "num_decode_tokens",
        "num_prefill_tokens",
        "num_prefills",
        "state_indices_tensor_d",
        "state_indices_tensor_p",
        "has_initial_states_p",
        "query_start_loc_p",
    ),
    "vllm.v1.attention.backend:AttentionBackend": ("get_name", "get_builder_cls", "is_ssm"),
    "vllm.v1.attention.backend:CommonAttentionMetadata": (
        "max_query_len",
        "is_prefilling",
        "query_start_loc_cpu",
        "seq_lens_cpu_upper_bound",
        "replace",
    ),
    "vllm.v1.attention.backends.registry:MambaAttentionBackendEnum": ("LINEAR",),
    "vllm.config:CompilationConfig": ("_attention_ops", "static_forward_context", "set_splitting_ops_for_v1"),
    "vllm.config:CacheConfig": (
        "enable_prefix_caching",
        "mamba_cache_mode",
        "cache_dtype",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
    ),
    "vllm.platforms:current_platform": ("update_block_size_for_backend",),
    # a reload of weights calls the model's `load_weights` between these two
    "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
}


def imported() -> set[tuple[str, str]]:
    """Pairs of a module of vLLM and a name that the package imports from it."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in FOLDER.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {
        (node.module, alias.name)
        for node in nodes
        if node.module.split(".")[0] == "vllm"
        for alias in node.names
        if alias.name not in OPTIONAL
    }


@pytest.mark.parametrize(("module", "name"), sorted(imported()))
def test_imported_name(module, name):
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("owner", USED)
def test_used_names(owner):
    module, _, name = owner.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, name) if name else found
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    known = fields | set(dir(found)) | set(getattr(found, "__annotations__", ()))
    for one in USED[owner]:
        assert known & ({one} if isinstance(one, str) else set(one)), one
