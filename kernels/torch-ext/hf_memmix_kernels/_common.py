"""What the ops share: sequence layout (batched or packed) and input checks.

Shape letters: N sequences, B batch, T tokens, H heads, D head size. A packed input is [1, sum of lengths, ...] with
`cu_seqlens` [N+1], the sequences' boundaries.
"""

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and accumulations: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_cu_seqlens(cu_seqlens: torch.Tensor, batch: int, name: str = "cu_seqlens") -> None:
    """Raise ValueError unless `cu_seqlens` is a 1-D integer tensor that belongs to a packed batch of one row."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() < 2:
        raise ValueError(
            f"{name} must be a 1-D int32 or int64 tensor [N+1] of boundaries 0 .. T, got {cu_seqlens.dtype} of shape"
            f" {tuple(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(f"{name} describes one packed row, the batch is {batch}; flatten it to [1, B*T, ...] first")


def num_sequences(batch: int, cu_seqlens: torch.Tensor | None) -> int:
    """How many independent sequences, and so how many states, an input holds."""
    return batch if cu_seqlens is None else cu_seqlens.numel() - 1


class SequenceLayout:
    """Cuts [B, T, ...] tensors, batched or packed, into chunks [N, chunks, C, ...], zero-padded, and back."""

    def __init__(self, batch: int, length: int, chunk_size: int, cu_seqlens: torch.Tensor | None):
        self.batch, self.length, self.chunk_size = batch, length, chunk_size
        self.index = self.valid = None
        longest = length
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.long()
            lengths = cu_seqlens.diff()
            longest = int(lengths.max())
        self.chunks = max(1, -(-longest // chunk_size))
        self.padded = self.chunks * chunk_size
        if cu_seqlens is not None:
            steps = torch.arange(self.padded, device=cu_seqlens.device)
            self.valid = steps < lengths[:, None]
            self.index = torch.where(self.valid, cu_seqlens[:-1, None] + steps, 0)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [N, chunks, C, ...]; positions beyond a sequence's end are zero."""
        if self.index is None:
            pad = self.padded - self.length
            if pad:
                x = torch.cat([x, x.new_zeros(self.batch, pad, *x.shape[2:])], dim=1)
        else:
            valid = self.valid.view(*self.valid.shape, *[1] * (x.dim() - 2))
            x = torch.where(valid, x[0, self.index], torch.zeros((), dtype=x.dtype, device=x.device))
        return x.reshape(x.shape[0], self.chunks, self.chunk_size, *x.shape[2:])

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """[N, chunks, C, ...] -> [B, T, ...], the inverse of `split`."""
        x = x.reshape(x.shape[0], self.padded, *x.shape[3:])
        if self.index is None:
            return x[:, : self.length]
        out = x.new_zeros(1, self.length, *x.shape[2:])
        out[0, self.index[self.valid]] = x[self.valid]
        return out
