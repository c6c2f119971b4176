"""Tables for packed inputs: the sequence and the chunk of every program. Computed on the device, without a sync."""

import torch
from torch import Tensor


def sequence_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The sequence of every packed token, int64 [tokens]."""
    steps = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].long(), steps, right=True).clamp_(max=cu_seqlens.shape[0] - 2)


def keep_tables(cu_seqlens: Tensor):
    """Have the tables of these boundaries computed once for all layers. The caller must not change the tensor later,
    also not by the replay of a CUDA graph.
    """
    cu_seqlens.kept_tables = {}


def chunk_table(cu_seqlens: Tensor, tokens: int, chunk_size: int) -> tuple[Tensor, Tensor, int]:
    """Chunks of all packed sequences in order.

    Returns:
        first [N+1] int32, the global index of each sequence's first chunk; sequence [bound] int32, each chunk's
        sequence, N for the unused tail; bound, an upper limit of the number of chunks known without a device read.
    """
    kept = getattr(cu_seqlens, "kept_tables", None)
    if kept is None:
        return _chunk_table(cu_seqlens, tokens, chunk_size)
    if (tokens, chunk_size) not in kept:
        kept[tokens, chunk_size] = _chunk_table(cu_seqlens, tokens, chunk_size)
    return kept[tokens, chunk_size]


def _chunk_table(cu_seqlens: Tensor, tokens: int, chunk_size: int) -> tuple[Tensor, Tensor, int]:
    sequences = cu_seqlens.shape[0] - 1
    counts = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    first = torch.zeros(sequences + 1, dtype=torch.int32, device=cu_seqlens.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=first[1:])
    bound = tokens // chunk_size + sequences
    steps = torch.arange(bound, device=cu_seqlens.device, dtype=torch.int32)
    return first, torch.searchsorted(first[1:], steps, right=True, out_int32=True), bound


def checkpoint_slots(batch: int, tokens: int, cu_seqlens: Tensor | None, every: int) -> int:
    """How many states forward keeps for backward, if it keeps one per `every` tokens of each sequence.

    For packed sequences this is an upper bound, known without reading the device: sequence i, which begins at token
    start_i, has its first state in slot start_i // every + i.
    """
    if cu_seqlens is None:
        return batch * -(-tokens // every)
    return tokens // every + cu_seqlens.shape[0]
