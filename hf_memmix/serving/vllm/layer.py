"""What vLLM sees of mixers: the size of their states, their pages, their metadata.

A layer of vLLM has the pages of one mixer or of several (page_plan.py). What computes is mixer_server.py.
"""

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ...mixers import MemoryMixer
from .metadata import MemoryBackend
from .mixer_server import MixerServer
from .page_plan import PAGE_DTYPE, page_plan, page_shape


class MemoryLayer(MambaBase):
    """The pages of some mixers. A page holds the states of one after the other, and may be larger.

    Args:
        mixers: with the sizes of this rank and vLLM's linear layers.
        name: the layer's name in vLLM's tables.
        vllm_config: of the model.
        page_size: bytes, at least those of the states.
        backend: what makes the metadata of a batch.

    Raises:
        ValueError: the name is taken.
    """

    def __init__(self, mixers: list[MemoryMixer], name: str, vllm_config, page_size: int, backend=MemoryBackend):
        self.backend, self.page_bytes = backend, page_size
        self.servers = [MixerServer(mixer, name, place, vllm_config) for place, mixer in enumerate(mixers)]
        self.kv_cache = ()
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"there are two layers of the name {name}")
        layers[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return page_shape(self.page_bytes)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (PAGE_DTYPE,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Only a label here: `get_attn_backend` says what runs."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[MemoryBackend]:
        return self.backend

    @property
    def kv_cache(self) -> tuple[Tensor, ...]:
        """The pages [pages, page size] of `PAGE_DTYPE`, in a tuple of one; () when vLLM takes its memory back."""
        return self._pages

    @kv_cache.setter
    def kv_cache(self, pages):
        self._pages, end = tuple(pages), 0
        for server in self.servers:
            start, end = end, end + server.size // PAGE_DTYPE.itemsize
            server.take(self._pages[0][:, start:end] if self._pages else None)

    def start_anew(self, pages: Tensor):
        """Write the initial states into pages [N] (int32 or int64)."""
        for server in self.servers:
            server.start_anew(pages)


def add_memory_layers(mixers: dict[str, MemoryMixer], vllm_config, backend=MemoryBackend):
    """Enter the layers of mixers into vLLM's table of layers with a cache. A layer has the name of its first mixer.

    Args:
        mixers: those of one stage of a pipeline, or of all, by their names.
    """
    names = {mixer.layer_idx: name for name, mixer in mixers.items()}
    for layers, size in page_plan(vllm_config):
        own = [names[i] for i in layers if i in names]
        if own:
            MemoryLayer([mixers[name] for name in own], own[0], vllm_config, size, backend)
