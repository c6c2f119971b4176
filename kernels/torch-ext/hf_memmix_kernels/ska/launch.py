"""Launches of the SKA kernels: forward, backward and decode step.

Scratch memory holds the statistics before every chunk, [chunks, Hk, r, 2r + P] float32, and in the backward pass as
much again for their gradients. After the forward pass only its inputs stay in memory.
"""

import torch
from torch import Tensor

from .._groups import flat
from .._launch import cdiv, contiguous, next_power_of_2, page_strides
from .._tape import taped
from .arguments import FORWARD, STEP, Chunks, Ends, Estimate, Refresh, State, Tokens, Upstream
from .kernels.backward import ska_bwd_kernel_dkv, ska_bwd_kernel_operator, ska_bwd_kernel_scan
from .kernels.forward import ska_fwd_kernel_read, ska_fwd_kernel_scan
from .kernels.step import ska_step_kernel

MAX_TRITON_RANK = 64

# (num_warps, num_stages, most tokens per tile) of each kernel up to rank 32, and above; 8 warps fail there (README)
LAUNCH = {
    "fwd_scan": ((1, 3, 64), (4, 3, 64)),
    "fwd_read": ((1, 1, 64), (4, 1, 64)),
    "bwd_operator": ((2, 1, 64), (4, 1, 16)),
    "bwd_dkv": ((4, 1, 64), (4, 1, 64)),
}
SCAN_BLOCK = 512
# above this rank, tokens of 16 bits enter as float32 (README)
MAX_LOW_PRECISION_RANK = 32


class _Launch:
    """Grids, tables and constants that the kernels of one call share."""

    def __init__(self, x: Tokens, state: State, ends: Ends, chunk_size: int, estimate: Estimate):
        (q, _, v, _), position, (cu_seqlens, lengths) = x, state.position, ends
        batch, T, self.H, R = q.shape
        self.HK, V = v.shape[2:]
        first = sequence = None
        per_sequence = (T + chunk_size - 1) // chunk_size + 1
        if cu_seqlens is None:
            self.N, self.chunks = batch, batch * per_sequence
        else:
            self.N = cu_seqlens.numel() - 1
            # a sequence may end one chunk beyond its last token, and begin within one
            self.chunks = T // chunk_size + 2 * self.N
            counts = (position[:, 0].long() + cu_seqlens.diff()) // chunk_size + 1
            first = torch.zeros(self.N + 1, dtype=torch.int32, device=q.device)
            torch.cumsum(counts, 0, dtype=torch.int32, out=first[1:])
            steps = torch.arange(self.chunks, device=q.device, dtype=torch.int32)
            sequence = torch.searchsorted(first[1:], steps, right=True, out_int32=True)
        self.layout = (position, cu_seqlens, lengths, first)
        self.by_sequence = T, per_sequence
        self.by_chunk = (*self.layout, sequence), T, per_sequence, self.N
        BR, BV = (max(16, next_power_of_2(size)) for size in (R, min(V, 64)))
        self.sizes = {"HK": self.HK, "R": R, "V": V, "C": chunk_size, "BR": BR}
        self.values = {"BV": BV}
        self.options = {
            "eps": estimate.eps, "sigma_floor": estimate.sigma_floor,
            "POWER": estimate.power, "SPECTRAL": estimate.spectral_norm,
        }  # fmt: skip
        # all grids have one dimension: the others are limited to 65535, and there may be more sequences or chunks
        self.chunk_grid = (self.chunks * self.HK,)
        self.large = R > 32

    def launch(self, kernel: str) -> dict[str, int]:
        warps, stages, tokens = LAUNCH[kernel][self.large]
        BC = max(16, min(tokens, next_power_of_2(self.sizes["C"])))
        return {"BC": BC, "num_warps": warps, "num_stages": stages}

    def statistics(self, x: Tokens, state: State):
        """Scratch (S, nu) before every chunk and the final states, the operator's not filled yet."""
        (_, k, v, _), (S0, _, previous, nu0, position) = x, state
        R, V, BR = (self.sizes[name] for name in ("R", "V", "BR"))
        S = S0.new_empty(self.chunks, self.HK, R, 2 * R + V)
        nu = nu0.new_empty(self.chunks, self.HK)
        final = tuple(torch.empty_like(t) for t in (S0, previous, nu0, position))
        ska_fwd_kernel_scan[((2 + cdiv(V, BR)) * self.N * self.HK,)](
            (k, v), (S0, previous, nu0, position), (S, nu), final, self.layout[1:], *self.by_sequence,
            **self.sizes, **self.launch("fwd_scan"),
        )  # fmt: skip
        return S, nu, final


def _tokens(like: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tokens as the kernels read them, in the dtype of `like` up to `MAX_LOW_PRECISION_RANK`."""
    dtype = like.dtype if like.shape[-1] <= MAX_LOW_PRECISION_RANK else torch.float32
    return tuple(t.to(dtype).contiguous() for t in tensors)


def _dense_inputs(x: Tokens, state: State) -> tuple[Tokens, State]:
    """Tokens, gain and states with contiguous memory."""
    return Tokens(*_tokens(x.q, *x[:3]), x.gain.contiguous()), State(*contiguous(*state))


@taped
@flat(*FORWARD)
def ska_forward(x: Tokens, state: State, ends: Ends, chunks: Chunks, estimate: Estimate):
    """o [B, T, H, P] in q's dtype and the five final states."""
    shape, dtype = (*x.q.shape[:3], x.v.shape[-1]), x.q.dtype
    x, state = _dense_inputs(x, state)
    launch = _Launch(x, state, ends, chunks.chunk_size, estimate)
    S, nu, (S_final, previous_final, nu_final, position_final) = launch.statistics(x, state)
    o = (x.q.new_empty if ends.lengths is None else x.q.new_zeros)(shape, dtype=dtype)
    W_final = torch.empty_like(state.operator)
    ska_fwd_kernel_read[launch.chunk_grid](
        (x.q, x.gain), (S, nu, state.operator), o, W_final, *launch.by_chunk, H=launch.H,
        **launch.sizes, **launch.values, **launch.options, **launch.launch("fwd_read"),
    )  # fmt: skip
    return o, S_final, W_final, previous_final, nu_final, position_final


@taped
@flat(Upstream, *FORWARD)
def ska_backward(upstream: Upstream, x: Tokens, state: State, ends: Ends, chunks: Chunks, estimate: Estimate):
    """Gradients of q, k, v, gain and of the first four states; the statistics are summed again."""
    fresh = torch.empty if ends.lengths is None else torch.zeros
    dq, dk, dv = (fresh(t.shape, dtype=t.dtype, device=t.device) for t in x[:3])
    (do,) = _tokens(x.q, upstream.do)
    dS_final, dW_final, dprevious_final, dnu_final = contiguous(*upstream[1:])
    x, state = _dense_inputs(x, state)
    (q, k, v, gain), (S0, W0, previous, nu0, _), chunk_size = x, state, chunks.chunk_size
    launch = _Launch(x, state, ends, chunk_size, estimate)
    S, nu, (_, _, nu_final, _) = launch.statistics(x, state)
    dS, dnu = torch.empty_like(S), torch.empty_like(nu)
    dgain = nu.new_zeros(launch.chunks, launch.H)
    dS0, dW0, dprevious, dnu0 = (torch.empty_like(t) for t in (S0, W0, previous, nu0))
    ska_bwd_kernel_operator[launch.chunk_grid](
        (q, do, gain), (S, nu, W0), dW_final, (dq, dgain, dS, dnu, dW0), *launch.by_chunk, H=launch.H,
        **launch.sizes, **launch.values, **launch.options, **launch.launch("bwd_operator"),
    )  # fmt: skip
    size = S0[0, 0].numel()
    ska_bwd_kernel_scan[(cdiv(size, SCAN_BLOCK) * launch.N * launch.HK,)](
        (dS, nu, dnu), (dS_final, nu_final, dnu_final), (dS0, dnu0), launch.layout, *launch.by_sequence,
        HK=launch.HK, SIZE=size, C=chunk_size, BLOCK=SCAN_BLOCK,
    )  # fmt: skip
    ska_bwd_kernel_dkv[launch.chunk_grid](
        (k, v), (dS, dnu), previous, dprevious_final, (dk, dv, dprevious), *launch.by_chunk,
        **launch.sizes, **launch.values, **launch.launch("bwd_dkv"),
    )  # fmt: skip
    return dq, dk, dv, dgain.sum(0), dS0, dW0, dprevious, dnu0


@taped
@flat(*STEP)
def ska_step_triton(x: Tokens, state: State, refresh: Refresh, estimate: Estimate):
    """Advance the state, or its pages, in place by one token, q, k, v [B, 1, heads, D]; o [B, 1, H, P] like q."""
    batch, _, heads, R = x.q.shape
    kv_heads, V = x.v.shape[2:]
    o = x.q.new_empty(batch, 1, heads, V)
    BR, BV = (max(16, next_power_of_2(size)) for size in (R, min(V, 64)))
    ska_step_kernel[(batch * kv_heads,)](
        *(t.contiguous() for t in x), *state, refresh.state_indices, *page_strides(refresh.state_indices, *state), o,
        estimate.eps, estimate.sigma_floor,
        H=heads, HK=kv_heads, R=R, V=V, C=refresh.chunk_size, PER_TOKEN=refresh.per_token, POWER=estimate.power,
        SPECTRAL=estimate.spectral_norm, BR=BR, BV=BV, num_warps=4 if R <= 32 else 8,
    )  # fmt: skip
    return o
