"""The state of SKA: its five tensors, their shapes, and checks of their values.

A state is (statistics [N, Hk, r, 2r + P] = [G | M^T | C^T], operator [N, Hk, r, P], previous key [N, Hk, r], nu [N,
Hk], position in the chunk [N, Hk]). The empty state is all zeros.
"""

import torch

from .._common import exact
from .arguments import State
from .operator import inverse, ridge_of, split_statistics


def state_shapes(batch: int, kv_heads: int, rank: int, values: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the five tensors of a state; see `chunk_ska`. The empty state is all zeros."""
    heads = (batch, kv_heads)
    return ((*heads, rank, 2 * rank + values), (*heads, rank, values), (*heads, rank), heads, heads)


def check_state(state: State, expected: tuple[tuple[int, ...], ...]) -> None:
    """Raise ValueError unless the five tensors of a state have the expected shapes."""
    got = tuple(tuple(s.shape) for s in state) if isinstance(state, (tuple, list)) else type(state).__name__
    if got != expected:
        raise ValueError(
            "ska: the state (statistics, operator, previous key, key norm, position) must have the shapes"
            f" {expected}, got {got}"
        )


def check_statistics(state: State, chunk_size: int | None = None) -> None:
    """Check the values of a state, for example of one read from a file. Waits for the device.

    Raises:
        ValueError: the Gram matrix is not finite, not symmetric or not positive semidefinite, or `position` does not
            lie in a chunk of `chunk_size` tokens, because the state was made with larger chunks.
    """
    statistics, _, _, _, position = state
    G = exact(statistics[..., : statistics.shape[-2]])
    if not torch.isfinite(statistics).all():
        raise ValueError("ska: the statistics of the state are not finite; start from an empty (zero) state")
    size = G.abs().amax((-1, -2)).clamp_min(1e-30)
    skewed = (G - G.mT).abs().amax((-1, -2)) > 1e-4 * size
    negative = torch.linalg.eigvalsh(G)[..., 0] < -1e-4 * size
    for bad, what in ((skewed, "symmetric"), (negative, "positive semidefinite")):
        if bad.any():
            place = bad.nonzero()[0].tolist()
            raise ValueError(
                f"ska: the Gram matrix of sequence {place[0]}, head {place[1]} is not {what}; the first rank columns"
                " of the statistics must be a sum of k k^T"
            )
    if chunk_size is not None and position.max() >= chunk_size:
        raise ValueError(
            f"ska: the state is {int(position.max())} tokens into a chunk, chunk_size={chunk_size} has fewer; continue"
            " with the chunk size that the state was made with"
        )


def per_token_state(state: State, *, eps: float = 1e-3) -> State:
    """The state of `ska_step(refresh_every=1)` after the tokens of a `chunk_ska` state.

    The operator's place takes P = (G + eps nu^2 I)^-1 [N, Hk, r, r]; everything else is a copy.
    """
    S, _, previous, nu, position = state
    _, P = inverse(split_statistics(S)[0], ridge_of(nu, eps), S.device.type == "cpu")
    return S.clone(), P.contiguous(), previous.clone(), nu.clone(), torch.zeros_like(position)
