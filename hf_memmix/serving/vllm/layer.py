"""A mixer whose states live in vLLM's memory.

`MemoryLayer` is what vLLM sees of a mixer: the size of its states, its pages, its metadata. The mixer stays in the
model under its own name, and hands its forward to the layer. What depends on the batch, and the readout after it, is
one operator, so that vLLM can cut its graphs around it, as it does around attention. The projections before it are a
part of vLLM's graphs, where the compiler fuses them with their neighbours.
"""

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from ...mixers import MemoryMixer
from ...mixers.pages import carve, page_layout, write_pages
from .config import mixers_of, original_config
from .metadata import MemoryBackend, MemoryMetadata
from .parameters import local_sizes

# all states of a sequence are one array for vLLM. It is not uint8: vLLM 0.26 finds out strides by an empty tensor in
# fp32 with as many elements as all pages have, which would be four times their memory
PAGE_DTYPE = torch.int32


class MemoryLayer(MambaBase):
    """The server of one mixer (`MemoryMixer.server`).

    Args:
        mixer: with the sizes of this rank and vLLM's linear layers.
        name: the layer's name in vLLM's tables.
        vllm_config: of the model.
        page_size: bytes, at least those of the states.
        backend: what makes the metadata of a batch.

    Raises:
        ValueError: the name is taken.
    """

    def __init__(self, mixer: MemoryMixer, name: str, vllm_config, page_size: int, backend=MemoryBackend):
        self.mixer, self.name, self.backend = mixer, name, backend
        self.dtype, self.device = vllm_config.model_config.dtype, vllm_config.device_config.device
        self.shapes = mixer.state_shapes(1, self.dtype)
        self.page_bytes = page_size
        self.most_sequences = vllm_config.scheduler_config.max_num_seqs
        self.kv_cache = ()
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"there are two layers of the name {name}")
        layers[name] = self
        mixer.server = self

    # ---- what vLLM asks

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
        self._pages = tuple(pages)
        self.pools = carve(self._pages[0].view(torch.uint8), self.shapes) if self._pages else {}

    # ---- the computation

    def start_anew(self, pages: Tensor):
        """Write the initial states into pages [N] (int32 or int64)."""
        write_pages(self.pools, pages, self.mixer.initial_states(len(pages), self.device, self.dtype))

    def __call__(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """[1, T, hidden] of all tokens of the batch, and cos and sin [1, T, d] -> [1, T, hidden]."""
        tokens = self.mixer.project_rows(hidden_states, rotary)
        output = torch.empty_like(hidden_states)
        torch.ops.vllm.memmix_mix(hidden_states, list(tokens.values()), ",".join(tokens), output, self.name)
        return output

    def run(self, x: Tensor, tokens: dict[str, Tensor], output: Tensor, batch: MemoryMetadata | None):
        """Fill `output`. Without a batch, vLLM measures memory: see `_largest_prefill`."""
        if batch is None:
            output.copy_(self.mixer.readout(self._largest_prefill(tokens), x, tokens))
            return
        decodes, prefills = batch.num_decode_tokens, batch.num_prefill_tokens
        count = decodes + prefills
        if count < x.shape[1]:  # there are rows that only pad the batch
            output[:, count:] = 0
            x, tokens = x[:, :count], {name: t[:, :count] for name, t in tokens.items()}
        parts = []
        if decodes and batch.query_start_loc_d is not None:
            parts.append(self._verify({name: t[0, :decodes] for name, t in tokens.items()}, batch))
        elif decodes:
            rows = {name: t[:, :decodes].transpose(0, 1) for name, t in tokens.items()}
            # a column of vLLM's table of blocks; contiguous already when a graph is captured
            y = self.mixer.step(rows, self.pools, batch.state_indices_tensor_d[:decodes, 0].contiguous())
            parts.append(y.transpose(0, 1))
        if prefills:
            y, _ = self.mixer.scan_sequences(
                {name: t[:, decodes:] for name, t in tokens.items()} if decodes else tokens,
                self.pools,
                cu_seqlens=batch.query_start_loc_p,
                starts_anew=batch.starts_anew,
                state_indices=batch.state_indices_tensor_p,
            )
            parts.append(y)
        y = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        output[:, :count] = self.mixer.readout(y, x, tokens)

    def _verify(self, tokens: dict[str, Tensor], batch: MemoryMetadata) -> Tensor:
        """Decode [T, ...] tokens of rows with draft tokens: each token leaves its state in a page of its own.

        So tokens that are rejected need not be taken out of a state: the next step begins in the page of the last
        accepted one. The shapes depend on the number of rows and of pages only, as graphs need it: where a row has
        fewer tokens, another token stands for the missing one, with page 0 and an output that nobody reads.
        """
        starts, count = batch.query_start_loc_d, next(iter(tokens.values())).shape[0]
        targets, memory = batch.state_indices_tensor_d, self._pages[0]
        page = targets.gather(1, batch.num_accepted_tokens.long()[:, None] - 1)[:, 0]
        y = None
        for i in range(targets.shape[1]):
            place = starts[:-1] + i
            has_token = place < starts[1:]
            target = torch.where(has_token, targets[:, i], 0)
            memory.index_copy_(0, target.long(), memory.index_select(0, page))
            place = torch.where(has_token, place, count)
            rows = {name: t.index_select(0, place.clamp(max=count - 1))[:, None] for name, t in tokens.items()}
            found = self.mixer.step(rows, self.pools, target)[:, 0]
            y = found.new_zeros(count + 1, *found.shape[1:]) if y is None else y
            y.index_copy_(0, place.long(), found)
            page = target
        return y[None, :count]

    def _largest_prefill(self, tokens: dict[str, Tensor]) -> Tensor:
        """A prefill of as many tokens, in as many rows as there may be: vLLM sees the memory that it takes."""
        length = next(iter(tokens.values())).shape[1]
        rows = min(self.most_sequences, length)
        bounds = torch.arange(rows + 1, dtype=torch.int32, device=self.device) * (length // rows)
        bounds[-1] = length
        states = self.mixer.initial_states(rows, self.device, self.dtype)
        return self.mixer.scan_sequences(tokens, states, cu_seqlens=bounds)[0]


def page_shape(size: int) -> tuple[tuple[int, ...], ...]:
    """What vLLM is told of the states of a page of `size` bytes: one array of `PAGE_DTYPE`."""
    return ((size // PAGE_DTYPE.itemsize,),)


def page_bytes(mixer: MemoryMixer, dtype: torch.dtype) -> int:
    """What one sequence takes in one layer, with activations of `dtype`."""
    return page_layout(mixer.state_shapes(1, dtype))[1]


def page_sizes(mixers: dict[str, MemoryMixer], vllm_config) -> dict[str, int]:
    """The bytes of a page of each mixer, by its path. The mixers have the sizes of one rank.

    With prefix caching all pages are equally large: 0.26 can then copy the states of models with several mixers.
    """
    if vllm_config.cache_config.enable_prefix_caching:
        return dict.fromkeys(mixers, largest_page(vllm_config))
    return {path: page_bytes(mixer, vllm_config.model_config.dtype) for path, mixer in mixers.items()}


def largest_page(vllm_config) -> int:
    """The bytes of the largest page of a model, in whichever stage of a pipeline it is."""
    ranks, dtype = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.dtype
    mixers = mixers_of(original_config(vllm_config.model_config.hf_config))
    return max(page_bytes(local_sizes(mixer, ranks), dtype) for mixer in mixers)


def metadata_of(batch: dict | None, name: str) -> MemoryMetadata | None:
    """The metadata of the layer `name` in those of a forward; None while vLLM measures memory, without metadata.

    Raises:
        ValueError: there are metadata, but none for this layer. Outputs without the states would be wrong.
    """
    if batch is None:
        return None
    found = batch.get(name) if isinstance(batch, dict) else None
    if not isinstance(found, MemoryMetadata):
        given = sorted(batch) if isinstance(batch, dict) else type(batch).__name__
        raise ValueError(
            f"vLLM runs layer {name} without its metadata (given: {given}), so the layer does not know where its"
            " states are; run the model with vLLM's default options, and report those that lead here"
        )
    return found


def memmix_mix(hidden_states: Tensor, tokens: list[Tensor], names: str, output: Tensor, name: str) -> None:
    """The operator: run the layer `name` of the model on this batch. `names`: of the tokens, with commas between."""
    context = get_forward_context()
    batch = metadata_of(context.attn_metadata, name)
    named = dict(zip(names.split(","), tokens, strict=True))
    context.no_compile_layers[name].run(hidden_states, named, output, batch)


def _fake(hidden_states: Tensor, tokens: list[Tensor], names: str, output: Tensor, name: str) -> None:
    return


direct_register_custom_op("memmix_mix", memmix_mix, mutates_args=["output"], fake_impl=_fake)
