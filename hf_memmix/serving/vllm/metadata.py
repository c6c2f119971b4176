"""The batch as memory layers see it: which rows decode, which prefill, and in which pages their states are.

Rows that decode come first. vLLM's own metadata for layers with states has all that is needed:

    num_decode_tokens, num_prefill_tokens       tokens of both kinds
    state_indices_tensor_d [decodes, 1]         pages of the rows that decode; a row that only pads has page 0, which
                                                belongs to no sequence
    state_indices_tensor_p [prefills]           pages of the rows that prefill
    has_initial_states_p [prefills]             whether a row goes on; if not, its page holds another sequence's states
    query_start_loc_p [prefills + 1]            boundaries of the rows among the tokens that prefill
"""

from dataclasses import dataclass

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder

from hf_memmix_kernels._chunks import keep_tables


@dataclass
class MemoryMetadata(BaseMambaAttentionMetadata):
    """vLLM asks for a class of its own for each kind of layer."""


class MemoryMetadataBuilder(BaseMambaAttentionMetadataBuilder[MemoryMetadata]):
    """Builds `MemoryMetadata`; the base class also captures full CUDA graphs of decode."""

    metadata_cls = MemoryMetadata
    needs_causal_conv1d_metadata = False

    def build(self, *args, **kwargs) -> MemoryMetadata:
        """Called once per batch: what the kernels compute from the boundaries serves all layers."""
        metadata = super().build(*args, **kwargs)
        if metadata.num_prefills:
            keep_tables(metadata.query_start_loc_p)
        return metadata


class MemoryBackend(AttentionBackend):
    """Names the builder; the layer itself computes."""

    @staticmethod
    def get_name() -> str:
        return "MEMMIX"

    @staticmethod
    def get_builder_cls() -> type[MemoryMetadataBuilder]:
        return MemoryMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
