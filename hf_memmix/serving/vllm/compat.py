"""Where the interface differs between the versions of vLLM in `versions.py`; README.md says which of them were run.

The Transformers backend makes one attention per layer. From a layer without attention it either makes one that nobody
uses, which would get memory for its keys (until 0.29), or it refuses the model (from 0.30).
"""

from types import SimpleNamespace

ATTENTION_NAME = "attn"  # of vLLM's attention


class KeptAttention:
    """Attention in the layers alone that have kept it. Goes before a class of the Transformers backend."""

    attention_backend = None  # the class of vLLM that computes attention, once its place in memory is to be known

    def memory_layers(self) -> dict[int, str]:
        """The layers without attention: path of their mixer in this module by index."""
        raise NotImplementedError

    def connect_memories(self, prefix: str):
        """Called when vLLM's table of layers with a cache has no surplus entries."""
        raise NotImplementedError

    def create_attention_instances(self) -> dict:
        """Until 0.29: attention by the index of its layer; the model passes this dictionary on."""
        instances = super().create_attention_instances()
        for i in self.memory_layers():
            del self._table()[instances.pop(i).layer_name]
        self.connect_memories("")
        return instances

    def _create_attention_instances(self, *prefix: str):
        """From 0.30: attention as a child of the module that it serves, if that was found to have an attention.

        From 0.32 the model has a name in front of those of its modules.
        """
        layers = self.memory_layers()
        self.attention_fusers |= {i: (path, _NoAttention()) for i, path in layers.items()}
        super()._create_attention_instances(*prefix)
        for path in layers.values():
            module = self.get_submodule(path)
            surplus = getattr(module, ATTENTION_NAME)
            self.attention_backend = surplus.get_attn_backend()
            del self._table()[surplus.layer_name]
            delattr(module, ATTENTION_NAME)
        self.connect_memories(*prefix or ("",))

    def _table(self) -> dict:
        return self.compilation_config.static_forward_context


def resolve_layout(vllm_config, specs: dict):
    """0.32: choose how blocks lie in memory, as vLLM does before it divides the memory by them. 0.26 has no choice.

    Args:
        specs: what each layer stores (KVCacheSpec), by its name in vLLM's table.
    """
    try:
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    except ImportError:
        return
    from vllm.v1.worker.worker_base import WorkerBase

    # the method reads nothing else of a worker
    supported = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=vllm_config))
    resolve_kv_cache_layout(vllm_config, [supported], list(specs.values()))


class _NoAttention:
    """The two properties that 0.32 reads of every layer's attention, for a layer without attention."""

    def scale(self, module) -> float:
        return 1.0

    def sinks(self, module) -> None:
        return None
