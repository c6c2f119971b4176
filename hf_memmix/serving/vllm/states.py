"""The states of prompts on disk: vLLM's connector for `memmix serve --states DIR`.

vLLM asks the connector of its scheduler how many tokens of a prompt are known elsewhere, gives it blocks for them, and
lets the connectors of its workers fill these blocks before it goes on with the prompt. A state is known at the ends of
steps that are also ends of blocks, as in vLLM's own prefix cache; there this connector writes what the blocks hold.

A load ends between two steps of the engine, because vLLM copies the state of a prefix into the block that the
sequence goes on in before a connector can fill it in the same step.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from ... import __version__
from ..state_store import KEYS, STATES, StateStore, identity, prefix_names, with_contents
from .layer import MemoryLayer
from .state_metrics import DISK, StateMetrics, StateStats
from .versions import installed_version

logger = init_logger(f"vllm.{__name__}")  # vLLM shows the lines of its own loggers only


@dataclass
class Prefix:
    """Some blocks of a request whose contents are on disk, or will be.

    Args:
        request: its id.
        names: of the prefixes that end with these blocks; the last one has the states.
        blocks: for each group of layers, their numbers.
    """

    request: str
    names: list[str]
    blocks: list[list[int]]


@dataclass
class Step(KVConnectorMetadata):
    """What the workers do in one step."""

    loads: list[Prefix] = field(default_factory=list)
    saves: list[Prefix] = field(default_factory=list)


@dataclass
class Known:
    """What the scheduler's connector knows of a request.

    Args:
        names: of the prefixes of its prompt.
        first: how many blocks of it vLLM has in its own prefix cache.
        is_loaded: whether a load was begun.
        blocks: its blocks in each group of layers.
    """

    names: list[str]
    first: int = 0
    is_loaded: bool = False
    blocks: list[list[int]] = field(default_factory=list)


class MemMixStates(KVConnectorBase_V1, SupportsHMA):
    """Reads and writes the states of a model on disk.

    Its `kv_connector_extra_config` has "folder", the "bytes" that the files of all models may take there, and "model",
    the folder of the weights.

    Raises:
        ValueError: prefix caching is off, or a layer stores what is neither states nor all keys and values.
    """

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.groups = kv_cache_config.kv_cache_groups
        self.block = _block_size(vllm_config, self.groups)
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        self.has_keys = any(isinstance(group.kv_cache_spec, FullAttentionSpec) for group in self.groups)
        given = vllm_config.kv_transfer_config.kv_connector_extra_config
        name = _identity(vllm_config, Path(given["model"]), self.groups, self.block)
        self.store = StateStore(Path(given["folder"]), name, given["bytes"])
        self.stats, room = StateStats(), self.store.make_room()
        if role == KVConnectorRole.SCHEDULER:
            logger.info("states on disk in %s: %s", given["folder"], room)
        else:
            self.stats.data[DISK] = room.bytes
        self.requests: dict[str, Known] = {}
        self.waiting: dict[str, Prefix] = {}
        self.loaded: set[str] = set()
        self.failed: set[str] = set()

    # ---- in the scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens after the first `num_computed_tokens` are on disk, and whether a load takes a step."""
        known = self._known(request)
        if known.is_loaded:  # and vLLM asks again: a file was gone, or the request was preempted
            return 0, False
        known.first = first = num_computed_tokens // self.block
        last = min((request.num_tokens - 1) // self.block, len(known.names))
        with_keys = last
        if self.has_keys:
            with_keys = first
            while with_keys < last and self.store.has(KEYS, known.names[with_keys], self.ranks):
                with_keys += 1
        for count in range(with_keys, first, -1):
            if self.store.has(STATES, known.names[count - 1], self.ranks):
                return count * self.block - num_computed_tokens, True
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int):
        """The blocks of a request; those of the last `num_external_tokens` tokens are to be loaded."""
        if not num_external_tokens:
            return
        known = self._known(request)
        first, known.is_loaded = known.first, True
        last = first + num_external_tokens // self.block
        self.waiting[request.request_id] = Prefix(
            request.request_id, known.names[first:last], [group[first:last] for group in blocks.get_block_ids()]
        )

    def build_connector_meta(self, scheduler_output) -> Step:
        """The loads that wait, and what this step completes: prefixes that end with it."""
        step = Step(loads=list(self.waiting.values()))
        self.waiting.clear()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            if (known := self.requests.get(new.req_id)) is not None:
                known.blocks = [list(group) for group in new.block_ids]
                self._add_save(step, new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if (known := self.requests.get(name)) is None:
                continue
            if name in cached.resumed_req_ids:
                known.blocks = [list(group) for group in cached.new_block_ids[i]]
            elif cached.new_block_ids[i]:
                for group, added in zip(known.blocks, cached.new_block_ids[i], strict=True):
                    group.extend(added)
            self._add_save(step, name, cached.num_computed_tokens[i] + scheduled[name])
        return step

    def request_finished_all_groups(self, request, block_ids) -> tuple[bool, None]:
        self.requests.pop(request.request_id, None)
        self.waiting.pop(request.request_id, None)
        return False, None

    def request_finished(self, request, block_ids) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, block_ids)

    def _known(self, request) -> Known:
        """Requests with images, with an adapter or without tokens have no names: their states do not follow from the
        tokens and the weights of the model."""
        known = self.requests.get(request.request_id)
        if known is None:
            other = getattr(request, "mm_features", None) or getattr(request, "lora_request", None)
            tokens = None if other else request.prompt_token_ids
            salt = request.cache_salt or ""
            known = self.requests[request.request_id] = Known(list(prefix_names(tokens or (), self.block, salt)))
        return known

    def _add_save(self, step: Step, name: str, end: int):
        """Save the prefix of `end` tokens of a request, if it consists of whole blocks of the prompt."""
        known, count = self.requests[name], end // self.block
        if end % self.block or not 0 < count <= len(known.names):
            return
        names = [(STATES, known.names[count - 1]), *((KEYS, name) for name in known.names[:count] if self.has_keys)]
        if all(self.store.has(kind, name, self.ranks) for kind, name in names):
            return
        step.saves.append(Prefix(name, known.names[:count], [group[:count] for group in known.blocks]))

    # ---- in the workers

    def register_kv_caches(self, kv_caches: dict[str, Tensor]):
        """The memory of all layers, as a list of [blocks, ...] and the group of the layer, by its name."""
        self.rank = get_tensor_model_parallel_rank()
        layers = self._vllm_config.compilation_config.static_forward_context
        self.memory: dict[str, dict[str, tuple[int, Tensor]]] = {STATES: {}, KEYS: {}}
        for index, group in enumerate(self.groups):
            for name in group.layer_names:
                if isinstance(layers[name], MemoryLayer):
                    self.memory[STATES][name] = index, layers[name].kv_cache[0]
                else:
                    self.memory[KEYS][name] = index, _by_blocks(kv_caches[name], self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context, **kwargs):
        """Fill the blocks of all loads of this step."""
        for prefix in self._get_connector_metadata().loads:
            if not self._load(prefix):
                self.failed.add(prefix.request)
                self.stats.add("failed_loads", 1)
            else:
                self.stats.add("loads", 1)
            self.loaded.add(prefix.request)

    def wait_for_layer_load(self, layer_name: str):
        """Loads are complete when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **kwargs):
        """Everything is saved at the end of a step."""

    def wait_for_save(self):
        """Write the prefixes that this step has completed. A full disk is told and does not end an answer.

        The first blocks, which most prefixes need, come last, so that they are deleted last.
        """
        saves, written = self._get_connector_metadata().saves, 0
        try:
            for prefix in saves:
                for kind, i in self._files(prefix):
                    if self.store.has(kind, prefix.names[i], self.ranks):
                        self.store.touch(kind, prefix.names[i], self.rank)
                    else:
                        contents = self._contents(kind, prefix, i)
                        written += self.store.write(kind, prefix.names[i], self.rank, contents)
            if written:
                room = self.store.keep_room()
                self.stats.add("written_bytes", written)
                self.stats.data[DISK] = room.bytes
                if room.deleted:
                    logger.info("states on disk: %s", room)
        except OSError as error:
            logger.warning("states are not saved: %s", error)

    def get_kv_connector_stats(self) -> StateStats | None:
        """What was read and written since the last call."""
        found, self.stats = self.stats, StateStats()
        return None if found.is_empty() else found

    @classmethod
    def build_kv_connector_stats(cls, data: dict | None = None) -> StateStats:
        return StateStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args) -> StateMetrics:
        return StateMetrics(*args)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The requests whose loads have ended, and those of them that vLLM has to compute after all."""
        found = KVConnectorTransferResults(finished_recving=self.loaded, failed_recving=self.failed)
        self.loaded, self.failed = set(), set()
        return found

    def _load(self, prefix: Prefix) -> bool:
        """Fill the blocks of a prefix. False: a file is gone, or another kernel of attention, e.g. of another GPU,
        orders keys in another way; then vLLM computes the tokens.
        """
        for kind, i in self._files(prefix):
            found = self.store.read(kind, prefix.names[i], self.rank)
            if found is None:
                return False
            for name, (group, memory) in self.memory[kind].items():
                block = memory[prefix.blocks[group][i]]
                if found[name].shape != block.shape:
                    return False
                block.copy_(found[name])
                self.stats.add("read_bytes", found[name].nbytes)
        return True

    def _files(self, prefix: Prefix) -> list[tuple[str, int]]:
        """The kinds and blocks of the files of a prefix, in the order in which they are used: from its end."""
        last = len(prefix.names) - 1
        return [(STATES, last), *((KEYS, i) for i in range(last, -1, -1) if self.has_keys)]

    def _contents(self, kind: str, prefix: Prefix, i: int) -> dict[str, Tensor]:
        """What the layers keep in the block `i` of a prefix, on the CPU."""
        memory = self.memory[kind].items()
        return {name: pool[prefix.blocks[group][i]].cpu().contiguous() for name, (group, pool) in memory}


def _block_size(vllm_config, groups) -> int:
    """The tokens of a block, the same in all groups of layers. Raises ValueError, see `MemMixStates`."""
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ValueError("--states needs prefix caching: leave --no-enable-prefix-caching out")
    for group in groups:
        spec = group.kv_cache_spec
        if type(spec) not in (FullAttentionSpec, MambaSpec) or getattr(spec, "sliding_window", None):
            raise ValueError(
                f"--states: layers like {group.layer_names[0]} keep the keys of a window of tokens, which are not"
                " stored on disk; leave the option out"
            )
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) > 1:
        raise ValueError(f"--states: layers have blocks of different sizes {sorted(sizes)}; leave the option out")
    return sizes.pop()


def _identity(vllm_config, folder: Path, groups, block: int) -> str:
    """Of everything that the contents of blocks depend on. The names of layers tell which mixers share a page."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return identity(
        folder,
        versions=(__version__, installed_version(), torch.__version__),
        loaded=(model.revision, vllm_config.load_config.load_format),
        model=(with_contents(model.hf_overrides), model.quantization, model.dtype, cache.cache_dtype),
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        block=block,
        layers=[(group.layer_names, group.kv_cache_spec.page_size_bytes) for group in groups],
    )


def _by_blocks(keys: Tensor, blocks: int) -> Tensor:
    """The memory of an attention layer as [blocks, ...]: vLLM may cut a block in several, or put it second."""
    place = 0 if keys.shape[0] >= blocks and keys.shape[0] % blocks == 0 else 1
    return keys.unflatten(place, (blocks, -1)).movedim(place, 0)
