"""Short convolution in torch, for any device: K shifted products over one buffer.

The buffer holds the carried state of every sequence in front of its tokens, so that token t reads rows base_t ..
base_t + K - 1: slices in a rectangular batch, a gather in a packed one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._chunks import sequence_ids
from .._common import compute_dtype
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import Inputs, Token, Upstream


class _Window:
    """The padded buffer [.., K-1 state rows + tokens, C] of one call, and the rows of its taps and final states."""

    def __init__(self, x: Tensor, taps: int, cu_seqlens: Tensor | None, lengths: Tensor | None):
        self.batch, self.tokens, self.channels = x.shape
        self.taps = taps
        self.valid = None
        device = x.device
        steps = torch.arange(taps - 1, device=device)
        if cu_seqlens is None:
            self.base = None
            length = torch.full((self.batch,), self.tokens, device=device) if lengths is None else lengths.long()
            rows = torch.arange(self.batch, device=device) * (self.tokens + taps - 1)
            if lengths is not None:
                self.valid = (torch.arange(self.tokens, device=device) < length[:, None])[..., None]
            self.heads = rows[:, None] + steps
            self.tails = (rows + length)[:, None] + steps
        else:
            starts = cu_seqlens[:-1].long() + torch.arange(len(cu_seqlens) - 1, device=device) * (taps - 1)
            self.base = torch.arange(self.tokens, device=device) + sequence_ids(cu_seqlens, self.tokens) * (taps - 1)
            self.heads = starts[:, None] + steps
            self.tails = (starts + cu_seqlens.diff().long())[:, None] + steps

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Zero buffer, flat over rows: [rows, C]."""
        rows = self.batch * self.tokens + self.heads.shape[0] * (self.taps - 1)
        return torch.zeros(rows, self.channels, dtype=dtype, device=like.device)

    def by_row(self, buffer: Tensor) -> Tensor:
        """A flat buffer without cu_seqlens as [B, K-1+T, C]."""
        return buffer.view(self.batch, self.taps - 1 + self.tokens, self.channels)

    def tokens_of(self, buffer: Tensor) -> Tensor:
        """The token rows of a flat buffer, [B, T, C]."""
        return self.tap(buffer, self.taps - 1)

    def tap(self, buffer: Tensor, j: int) -> Tensor:
        """The input of tap j at every token, [B, T, C]."""
        if self.base is None:
            return self.by_row(buffer)[:, j : j + self.tokens]
        return buffer[self.base + j][None]

    def add_to_tap(self, buffer: Tensor, j: int, value: Tensor) -> None:
        """Adjoint of `tap`, accumulated in place."""
        if self.base is None:
            self.by_row(buffer)[:, j : j + self.tokens] += value
        else:
            buffer.index_add_(0, self.base + j, value[0])

    def fill(self, x: Tensor, state: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Flat buffer of the inputs with the carried states in front of their rows."""
        buffer = self.empty(x, dtype)
        if self.valid is not None:
            x = torch.where(self.valid, x, 0)
        if self.base is None:
            self.by_row(buffer)[:, self.taps - 1 :] = x
        else:
            buffer[self.base + self.taps - 1] = x[0].to(dtype)
        if state is not None:
            buffer[self.heads] = state.transpose(1, 2).to(dtype)
        return buffer


def _cut(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)


def _preactivation(window: _Window, buffer: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = window.tap(buffer, 0) * weight[:, 0]
    for j in range(1, window.taps):
        z = z + window.tap(buffer, j) * weight[:, j]
    return z if bias is None else z + bias


@flat(Inputs)
def short_conv_fwd_torch(a: Inputs) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, C] and the final states [N, C, K-1], both in x.dtype."""
    x, weight, bias, initial_state, cu_seqlens, lengths, silu, limit = a
    dtype = compute_dtype(x.dtype)
    x = _cut(x, limit)
    window = _Window(x, weight.shape[1], cu_seqlens, lengths)
    buffer = window.fill(x, initial_state, dtype)
    z = _preactivation(window, buffer, weight.to(dtype), None if bias is None else bias.to(dtype))
    y = F.silu(z) if silu else z
    if window.valid is not None:
        y = torch.where(window.valid, y, 0)
    return y.to(x.dtype), buffer[window.tails].transpose(1, 2).to(x.dtype).contiguous()


@flat(Upstream, Inputs)
def short_conv_bwd_torch(upstream: Upstream, a: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns dx, dweight, dbias [C] and the gradient of the initial states [N, C, K-1]."""
    (dy, dstate), (x, weight, bias, initial_state, cu_seqlens, lengths, silu, limit) = upstream, a
    dtype = compute_dtype(x.dtype)
    inside = None if limit is None else x.abs() < limit
    x = _cut(x, limit)
    window = _Window(x, weight.shape[1], cu_seqlens, lengths)
    buffer = window.fill(x, initial_state, dtype)
    w = weight.to(dtype)
    dz = dy.to(dtype)
    if silu:
        z = _preactivation(window, buffer, w, None if bias is None else bias.to(dtype))
        gate = torch.sigmoid(z)
        dz = dz * gate * (1 + z * (1 - gate))
    if window.valid is not None:
        dz = torch.where(window.valid, dz, 0)
    dbuffer = window.empty(x, dtype)
    for j in range(window.taps):
        window.add_to_tap(dbuffer, j, dz * w[:, j])
    dbuffer.index_add_(0, window.tails.flatten(), dstate.transpose(1, 2).to(dtype).flatten(0, 1))
    dweight = torch.stack([(dz * window.tap(buffer, j)).sum((0, 1)) for j in range(window.taps)], -1)
    dinitial = dbuffer[window.heads].transpose(1, 2).contiguous()
    dx = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(window.tokens_of(dbuffer))
    if inside is not None:
        dx *= inside
    return dx, dweight, dz.sum((0, 1)), dinitial


@flat(Token)
def short_conv_step_torch(token: Token) -> Tensor:
    """Read one token [B, 1, C] and shift the state [B, C, K-1], or its pages in `pool`, in place."""
    x, weight, bias, pool, state_indices, silu, limit = token
    (state,) = read_pages(state_indices, pool)
    dtype = compute_dtype(x.dtype)
    window = torch.cat([state.to(dtype), _cut(x, limit).mT.to(dtype)], -1)
    z = (window * weight.to(dtype)).sum(-1)
    z = z if bias is None else z + bias.to(dtype)
    state.copy_(window[..., 1:])
    write_pages(state_indices, (pool,), (state,))
    return (F.silu(z) if silu else z).to(x.dtype)[:, None]
