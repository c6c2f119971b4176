"""Runs one mixer on a batch of vLLM, with states in vLLM's memory.

The mixer stays in the model under its own name, and hands its forward to its server. What depends on the batch, and
the readout after it, is one operator, so that vLLM can cut its graphs around it, as it does around attention. The
projections before it are a part of vLLM's graphs, where the compiler fuses them with their neighbours.
"""

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from ...mixers import MemoryMixer
from ...mixers.pages import carve, write_pages
from .metadata import MemoryMetadata
from .page_plan import page_bytes


class MixerServer:
    """The server of one mixer (`MemoryMixer.server`).

    Args:
        mixer: with the sizes of this rank and vLLM's linear layers.
        layer: the name of the layer in vLLM's tables that has its pages, see layer.py.
        place: of the mixer among those whose states these pages hold.
        vllm_config: of the model.
    """

    def __init__(self, mixer: MemoryMixer, layer: str, place: int, vllm_config):
        self.mixer, self.layer, self.place = mixer, layer, place
        self.dtype, self.device = vllm_config.model_config.dtype, vllm_config.device_config.device
        self.shapes = mixer.state_shapes(1, self.dtype)
        self.size = page_bytes(mixer, self.dtype)
        self.most_sequences = vllm_config.scheduler_config.max_num_seqs
        mixer.server = self

    def take(self, memory: Tensor | None):
        """The part of the pages that is this mixer's, [pages, `size` bytes] of `PAGE_DTYPE`; None takes it back."""
        self.memory = memory
        self.pools = {} if memory is None else carve(memory.view(torch.uint8), self.shapes)

    def start_anew(self, pages: Tensor):
        """Write the initial states into pages [N] (int32 or int64)."""
        write_pages(self.pools, pages, self.mixer.initial_states(len(pages), self.device, self.dtype))

    def __call__(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """[1, T, hidden] of all tokens of the batch, and cos and sin [1, T, d] -> [1, T, hidden]."""
        tokens = self.mixer.project_rows(hidden_states, rotary)
        output = torch.empty_like(hidden_states)
        names = ",".join(tokens)
        torch.ops.vllm.memmix_mix(hidden_states, list(tokens.values()), names, output, self.layer, self.place)
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
        targets, memory = batch.state_indices_tensor_d, self.memory
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


def memmix_mix(x: Tensor, tokens: list[Tensor], names: str, output: Tensor, layer: str, place: int) -> None:
    """The operator: run a mixer on this batch.

    Args:
        names: of the tokens, with commas between.
        layer, place: where the mixer has its states, see `MixerServer`.
    """
    context = get_forward_context()
    batch = metadata_of(context.attn_metadata, layer)
    named = dict(zip(names.split(","), tokens, strict=True))
    context.no_compile_layers[layer].servers[place].run(x, named, output, batch)


def _fake(x: Tensor, tokens: list[Tensor], names: str, output: Tensor, layer: str, place: int) -> None:
    return


direct_register_custom_op("memmix_mix", memmix_mix, mutates_args=["output"], fake_impl=_fake)
