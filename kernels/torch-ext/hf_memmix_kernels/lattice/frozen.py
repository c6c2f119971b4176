"""Frozen-state mode of Lattice: gradients are taken at the state before each chunk, as in TTT. This is another model.

    s_i,t <- P_C(s_i + sum_(j <= t) al_i,j (h_j - s_i (s_i . h_j))),  y_t = S_t q_t

Here al, h and s_i are those of the start of the chunk. Karami and Mirrokni, "Lattice: Learning to Efficiently Compress
the Memory", https://arxiv.org/abs/2504.05646, eq. 13 and 14, with the mini-batches of Sun et al., "Learning to (Learn
at Test Time)", https://arxiv.org/abs/2407.04620.
"""

import torch
from torch import Tensor

from .._common import compute_dtype, without_autocast
from .naive import BASELINES
from .op import _check


@without_autocast
def frozen_lattice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    *,
    chunk_size: int,
    variant: str = "dec",
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of `chunk_lattice` with all gradients of a chunk taken at the state before its first token.

    Nothing runs token by token: a chunk is six batched products on any device, and autograd differentiates them.
    `chunk_size=1` is the recurrence itself. With larger chunks it is a different model, and the difference grows with
    the step size. Relative error of the output against the recurrence, in percent, for random q, k, v of unit norm,
    d = m = 64, 512 tokens (`python kernels/benchmarks/lattice_frozen.py`, float64):

        gamma   variant   C = 4   C = 16  C = 64
        0.1     dec       0.4     0.93    1.8
        0.1     enc       0.42    0.93    1.8
        0.1     sim       0.037   0.084   0.18
        0.5     dec       7.9     18      34
        0.5     enc       8       18      34
        0.5     sim       0.79    2.1     5.8
        1.0     dec       19      42      71
        1.0     enc       19      42      71
        1.0     sim       2.4     7.2     20

    So train and decode with the same chunk size. `LatticeMixer` does not have this mode: its decode step would have to
    keep, in addition to the state, all writes of the current chunk and the position of each row of the batch in it.

    Args:
        q, k: [B, T, H, m], m <= d <= 128.
        v: [B, T, H, d].
        gamma: step sizes >= 0 [B, T, H]. A token at gamma = 0 is padding: it writes nothing.
        chunk_size: C, which divides T. So several calls on consecutive pieces of a sequence give the same result as
            one call.
        variant: "dec", "enc" or "sim". Slots are of unit norm; there is no forget gate.
        initial_state: [B, H, d, m], normalised; None is the identity.

    Returns:
        y [B, T, H, d] in v's dtype and the final state [B, H, d, m], float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes or options do not fit, or T is not a multiple of `chunk_size`.
    """
    if variant in BASELINES:
        raise ValueError(f"frozen_lattice has no baselines: variant={variant!r} is not 'dec', 'enc' or 'sim'")
    _check(q, k, v, gamma, None, initial_state, None, variant, True, 0.0)
    B, T, H, m = q.shape
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"frozen_lattice: chunk_size={chunk_size!r} must be a number of tokens, at least 1")
    if T % chunk_size:
        raise ValueError(
            f"frozen_lattice: {T} tokens are not a multiple of chunk_size={chunk_size}; pad with tokens at gamma = 0,"
            " which end the chunk there"
        )
    dtype = compute_dtype(v.dtype)
    if initial_state is None:
        S = torch.eye(v.shape[-1], m, dtype=dtype, device=v.device).expand(B, H, -1, -1)
    else:
        S = initial_state.to(dtype)
        S = S / torch.linalg.vector_norm(S, dim=-2, keepdim=True)
    # [chunks, B, H, C, ...]
    chunks = (
        x.to(dtype).unflatten(1, (-1, chunk_size)).permute(1, 0, 3, 2, 4).unbind() for x in (q, k, v, gamma[..., None])
    )
    outputs = []
    for chunk in zip(*chunks, strict=True):
        y, S = _chunk(S, *chunk, variant)
        outputs.append(y)
    return torch.stack(outputs, 1).transpose(2, 3).reshape(v.shape).to(v.dtype), S


def _chunk(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """y [B, H, C, d] and the state after a chunk: S [B, H, d, m], q and k [B, H, C, m], v [B, H, C, d]."""
    if variant == "dec":
        h, c = k @ S.mT - v, k
    elif variant == "enc":
        h, c = v, v @ S - k
    else:
        h, c = -v, k
    alpha = -gamma * c
    # |sum_(j <= t) al_j h_j|^2 of each slot, and how much of that sum lies along the slot
    square = 2 * alpha * ((h @ h.mT).tril(-1) @ alpha) + alpha.square() * h.square().sum(-1, keepdim=True)
    square, along = square.cumsum(-2), (alpha * (h @ S)).cumsum(-2)
    # writes are orthogonal to the slot, so it cannot have become shorter: anything below 1 is rounding
    shrink = (1 + square - along.square()).clamp_min(1).rsqrt()
    read = shrink * q
    y = ((1 - along) * read) @ S.mT + (read @ alpha.mT).tril() @ h
    S = S * (1 - along[..., -1:, :]) + h.mT @ alpha
    return y, S / torch.linalg.vector_norm(S, dim=-2, keepdim=True)
