"""The batch as memory layers see it: which rows decode, which prefill, and in which pages their states are.

Rows that decode come first. vLLM's own metadata for layers with states has all that is needed:

    num_decode_tokens, num_prefill_tokens       tokens of both kinds
    state_indices_tensor_d [decodes, 1]         pages of the rows that decode; a row that only pads has page 0, which
                                                belongs to no sequence
    state_indices_tensor_p [prefills]           pages of the rows that prefill
    has_initial_states_p [prefills]             whether a row goes on; if not, its page holds another sequence's states
    query_start_loc_p [prefills + 1]            boundaries of the rows among the tokens that prefill

With draft tokens (speculative decoding), a row that decodes has several tokens and a page for each of them:

    state_indices_tensor_d [decodes, 1 + drafts]
    query_start_loc_d [decodes + 1]             boundaries of the rows among the tokens that decode
    num_accepted_tokens [decodes]               of the step before: the state is in the page of the last one

A prompt of one token looks like a row that decodes. If all rows of a batch have one token, vLLM may replay its CUDA
graph of decode, in which no row starts anew. Then such a prompt decodes too, and its page gets the initial states
before.
"""

from dataclasses import MISSING, dataclass, fields, replace

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from hf_memmix_kernels._chunks import keep_tables


@dataclass
class MemoryMetadata(BaseMambaAttentionMetadata):
    """vLLM asks for a class of its own for each kind of layer.

    Args:
        first_tokens: int64 [N], the rows among those that decode whose token is the first of its sequence; or None.
        starts_anew: of the rows that prefill, see `MemoryMixer.scan_sequences`.
    """

    first_tokens: Tensor | None = None
    starts_anew: Tensor | bool | None = None


# vLLM asks for more fields until 0.31
NOTHING = {field.name: None for field in fields(MemoryMetadata) if field.default is MISSING}


class MemoryMetadataBuilder(ShortConvAttentionMetadataBuilder):
    """Builds `MemoryMetadata`; the base class also captures full CUDA graphs of decode.

    vLLM tells a few builders only how many draft tokens were accepted. This one of them adds nothing to the base class
    of all builders for layers with states.
    """

    metadata_cls = MemoryMetadata
    needs_causal_conv1d_metadata = False

    def build(self, common_prefix_len: int, common_attn_metadata, *args, **kwargs) -> MemoryMetadata:
        """Called once per batch: what the kernels compute from the boundaries serves all layers."""
        rows = None
        if common_attn_metadata.max_query_len == 1 and common_attn_metadata.is_prefilling is not None:
            if not (self.use_spec_decode or common_attn_metadata.is_prefilling.any()):
                return self._decode(common_attn_metadata)
            rows = first_tokens(common_attn_metadata)
        if rows is not None:
            is_prefilling = common_attn_metadata.is_prefilling.clone()
            is_prefilling[rows] = False
            common_attn_metadata = common_attn_metadata.replace(is_prefilling=is_prefilling)
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        if rows is not None:
            metadata = replace(metadata, first_tokens=rows)
        if metadata.num_prefills:
            keep_tables(metadata.query_start_loc_p)
            metadata.starts_anew = starts_anew(common_attn_metadata, metadata)
        return self._with_pages(metadata)

    def update_block_table(self, metadata: MemoryMetadata, *args, **kwargs) -> MemoryMetadata:
        """Called instead of `build` for further layers, with the metadata of the first ones; they have other pages."""
        return self._with_pages(super().update_block_table(metadata, *args, **kwargs))

    def _decode(self, batch) -> MemoryMetadata:
        """What the base class builds for a batch in which all rows decode, at a third of its time: it looks for rows
        that prefill in a dozen small tensors."""
        pages = mamba_get_block_table_tensor(
            batch.block_table_tensor,
            batch.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        metadata = MemoryMetadata(
            **NOTHING
            | {
                "num_prefills": 0,
                "num_prefill_tokens": 0,
                "num_decodes": batch.num_reqs,
                "num_decode_tokens": batch.num_actual_tokens,
                "num_reqs": batch.num_reqs,
                "state_indices_tensor_d": pages[:, :1],
                "seq_lens": batch.seq_lens,
            }
        )
        return self._update_metadata_for_cudagraph_capture(metadata)

    def _with_pages(self, metadata: MemoryMetadata) -> MemoryMetadata:
        """The pages of rows that prefill as indices for all layers. The pages of `first_tokens` get the initial
        states, in all layers that read this metadata.
        """
        if metadata.num_prefills:
            metadata.state_indices_tensor_p = metadata.state_indices_tensor_p.long()
        if metadata.first_tokens is not None:
            pages = metadata.state_indices_tensor_d[metadata.first_tokens, 0]
            for name in self.layer_names:
                self.compilation_config.static_forward_context[name].start_anew(pages)
        return metadata


def first_tokens(batch) -> Tensor | None:
    """The rows that begin a sequence, of a batch (vLLM's CommonAttentionMetadata) in which all rows have one token.

    Read on the CPU: rows that pad the batch have no token there.
    """
    one_token = torch.diff(batch.query_start_loc_cpu) == 1
    rows = (batch.is_prefilling & one_token & (batch.seq_lens_cpu_upper_bound <= 1)).nonzero().flatten()
    return rows if len(rows) else None


def starts_anew(batch, metadata: MemoryMetadata) -> Tensor | bool | None:
    """`MemoryMetadata.starts_anew` of a batch. On the CPU it is known whether all rows or none start anew."""
    tokens = torch.diff(batch.query_start_loc_cpu)
    goes_on = (batch.seq_lens_cpu_upper_bound > tokens)[metadata.num_decodes :]
    if not goes_on.any():
        return True
    return None if goes_on.all() else ~metadata.has_initial_states_p


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


def backend_beside(attention: type[AttentionBackend]) -> type[MemoryBackend]:
    """For models with both: a stage of a pipeline that has no attention must lay out its memory as the others do."""

    class Beside(MemoryBackend):
        supported_kv_cache_layouts = attention.supported_kv_cache_layouts  # from 0.32

    return Beside
