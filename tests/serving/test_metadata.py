"""The short way to the metadata of a decode step gives what vLLM's own way gives, also with a version of vLLM that
asks for other fields than the one of these tests."""

import dataclasses
import importlib.util

import pytest
import torch

from hf_memmix.assets import asset_path

ROWS, BLOCKS = 3, 4
# the fields without a default that the metadata have in these versions alone, of those that the plugin works with
ONLY_IN = {
    "0.26 to 0.31": (
        "num_computed_tokens_p",
        "block_idx_last_scheduled_token",
        "block_idx_first_scheduled_token_p",
        "block_idx_last_computed_token",
        "block_idx_last_scheduled_token_prev_step",
    ),
    "0.32 and 0.33": (),
}


def builder_where(metadata, fields: tuple[str, ...], monkeypatch):
    """The class of `metadata.py`, imported anew where vLLM's metadata have these fields, too."""
    from vllm.v1.attention.backends import mamba_attn

    base = mamba_attn.BaseMambaAttentionMetadata
    known = {field.name for field in dataclasses.fields(base)}
    added = [(name, object, dataclasses.field(kw_only=True)) for name in fields if name not in known]
    other = dataclasses.make_dataclass("Other", added, bases=(base,))
    monkeypatch.setattr(mamba_attn, "BaseMambaAttentionMetadata", other)
    spec = importlib.util.spec_from_file_location(metadata.__name__, metadata.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MemoryMetadataBuilder


def decoding():
    """vLLM's batch of rows that all decode."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts, lengths = torch.arange(ROWS + 1, dtype=torch.int32), torch.tensor([5, 130, 300], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=ROWS,
        num_actual_tokens=ROWS,
        max_query_len=1,
        max_seq_len=300,
        block_table_tensor=torch.arange(1, ROWS * BLOCKS + 1, dtype=torch.int32).view(ROWS, BLOCKS),
        slot_mapping=torch.arange(ROWS),
        is_prefilling=torch.zeros(ROWS, dtype=torch.bool),
    )


@pytest.mark.parametrize("versions", ONLY_IN)
@pytest.mark.parametrize(("mode", "pages"), [("none", (1, 5, 9)), ("align", (1, 6, 11))])
def test_all_rows_decode(mode, pages, versions, monkeypatch):
    """`pages`: those of the first block, and with prefix caching those of the last token's block."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from hf_memmix.serving.vllm import metadata
    from hf_memmix.serving.vllm.blocks import add_layers
    from hf_memmix.serving.vllm.layer import MemoryLayer

    config = EngineArgs(str(asset_path("tiny_gka")), max_model_len=512).create_engine_config()
    with set_current_vllm_config(config):
        add_layers(config)
    config.cache_config.mamba_cache_mode = mode
    layers = config.compilation_config.static_forward_context
    name, layer = next((name, layer) for name, layer in layers.items() if isinstance(layer, MemoryLayer))
    spec = dataclasses.replace(layer.get_kv_cache_spec(config), block_size=128)
    given = spec, [name], config, torch.device("cpu")
    builder = metadata.MemoryMetadataBuilder(*given)
    expected = super(metadata.MemoryMetadataBuilder, builder).build(0, decoding())
    found = builder_where(metadata, ONLY_IN[versions], monkeypatch)(*given).build(0, decoding())
    assert tuple(found.state_indices_tensor_d[:, 0].tolist()) == pages
    for field in dataclasses.fields(expected):
        value, own = getattr(expected, field.name), getattr(found, field.name)
        if isinstance(value, torch.Tensor) and len(value):  # of rows that prefill there are none
            assert torch.equal(own, value), field.name
        else:
            assert own is None or own == value, field.name
