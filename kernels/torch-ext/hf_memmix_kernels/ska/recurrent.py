"""SKA, one token: read the operator, add the token to the statistics in place, refresh the operator when it is time.

o = gain W q;  G += z z^T, M += z z_prev^T, C += v z^T, nu = max(nu, |z|);  W anew after every chunk_size tokens
"""

import torch
from torch import Tensor

from .._dispatch import use_triton
from .naive import POWER_ITERATIONS, start_vector
from .op import State, check, check_state, gain_of, masked, state_shapes
from .operator import Operator, inverse, ridge_of, split_statistics


def _read_per_token(S, P, nu, q, power, eps, spectral_norm, sigma_floor):
    """C (P M)^K P q / sigma^K by products with vectors: q [N, Hk, groups, r], all else [N, Hk, ...]."""
    G, MT, CT = split_statistics(S)
    scale = torch.ones_like(nu)
    if spectral_norm and power:
        u = start_vector(P.shape[-1], P.dtype, P.device)[:, None].expand(*P.shape[:-1], 1)
        for _ in range(POWER_ITERATIONS):
            new = P @ (MT.mT @ (P @ (MT @ u)))
            size = new.abs().amax(-2, keepdim=True)
            u = torch.where(size > 0, new / size, u)
        a = MT @ u
        length = (u * (G @ u + ridge_of(nu, eps)[..., None, None] * u)).sum((-1, -2))
        # without a key both are zero, and the statistics that it multiplies too
        sigma = ((a * (P @ a)).sum((-1, -2)).clamp_min(0) / length.clamp_min(torch.finfo(P.dtype).tiny)).sqrt()
        scale = sigma.clamp_min(sigma_floor) ** -power
    x = q @ P
    for _ in range(power):
        x = x @ MT @ P
    return scale[..., None, None] * (x @ CT)


def _step_torch(
    q, k, v, gain, S, W, previous, nu, position, chunk_size, per_token, power, eps, spectral_norm, sigma_floor
):
    options = (power, eps, spectral_norm, sigma_floor)
    queries = q[:, 0].to(S.dtype).unflatten(1, (k.shape[2], -1))
    z, values = k[:, 0].to(S.dtype), v[:, 0].to(S.dtype)
    read = _read_per_token(S, W, nu, queries, *options) if per_token else queries @ W
    o = read.flatten(1, 2) * gain[:, None]
    grown = torch.linalg.vector_norm(z, dim=-1) > nu
    nu.copy_(torch.maximum(nu, torch.linalg.vector_norm(z, dim=-1)))
    G, MT, CT = split_statistics(S)
    G += z[..., :, None] * z[..., None, :]
    MT += previous[..., :, None] * z[..., None, :]
    CT += z[..., :, None] * values[..., None, :]
    previous.copy_(z)
    position += 1
    due = position >= chunk_size
    if per_token:
        w = (W @ z[..., None])[..., 0]
        W -= w[..., :, None] * (w / (1 + (z * w).sum(-1, keepdim=True)))[..., None, :]
        due |= grown
    check = q.device.type == "cpu"
    if not check or due.any():  # a GPU is not asked: it may be recording a graph
        new = inverse(G, ridge_of(nu, eps), check)[1] if per_token else Operator(S, nu, *options, check).WT
        W.copy_(torch.where(due[..., None, None], new, W))
        position.masked_fill_(due, 0)
    return o.to(q.dtype)[:, None]


@torch.library.custom_op("hf_memmix::ska_step", mutates_args=("statistics", "operator", "previous", "nu", "position"))
def _ska_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor,
    statistics: Tensor,
    operator: Tensor,
    previous: Tensor,
    nu: Tensor,
    position: Tensor,
    chunk_size: int,
    per_token: bool,
    power: int,
    eps: float,
    spectral_norm: bool,
    sigma_floor: float,
) -> Tensor:
    step = _step_torch
    if use_triton(q) and statistics.dtype != torch.float64:
        from .recurrent_triton import MAX_TRITON_RANK, ska_step_triton

        if q.shape[-1] <= MAX_TRITON_RANK:
            step = ska_step_triton
    return step(
        q, k, v, gain, statistics, operator, previous, nu, position,
        chunk_size, per_token, power, eps, spectral_norm, sigma_floor,
    )  # fmt: skip


@_ska_step.register_fake
def _(q, k, v, *rest):
    return q.new_empty(*q.shape[:3], v.shape[-1])


def ska_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    gamma: Tensor | None,
    eta: Tensor | None,
    state: State,
    *,
    power: int = 2,
    eps: float = 1e-3,
    chunk_size: int = 64,
    refresh_every: int | None = None,
    spectral_norm: bool = True,
    sigma_floor: float = 0.1,
) -> Tensor:
    """One decoding step of `chunk_ska`, without autograd.

    Args:
        q, k, v: [B, 1, H, r], [B, 1, Hk, r], [B, 1, Hk, P]; mask [B, 1]; gamma, eta: as in `chunk_ska`.
        state: as in `chunk_ska`, contiguous, updated IN PLACE.
        chunk_size: tokens between two estimates of the operator, the same as in training.
        refresh_every: None is `chunk_size`. 1 is the paper's re-estimation at every token, the model of
            `chunk_ska(chunk_size=1)`: rank-one updates of P = (G + eps nu^2 I)^-1 at O(r^2) a token, P anew where a
            key exceeds nu and after every `chunk_size` tokens. Its state comes from `per_token_state`.

    Returns:
        o [B, 1, H, P] in q's dtype.

    Raises:
        ValueError: more than one token, shapes or options that do not fit, a state that is not contiguous.
    """
    check(q, k, v, mask, gamma, eta, state, power, eps, chunk_size, sigma_floor, "running_max")
    if q.shape[1] != 1:
        raise ValueError(f"ska_step advances by one token, got {q.shape[1]}; use chunk_ska for several")
    if refresh_every not in (None, 1, chunk_size):
        raise ValueError(
            f"ska_step: refresh_every={refresh_every} must be 1 or chunk_size={chunk_size}; the operator cannot be"
            " refreshed within a chunk otherwise"
        )
    per_token = refresh_every == 1 and chunk_size > 1
    batch, rank, values = q.shape[0], q.shape[3], v.shape[3]
    expected = state_shapes(batch, k.shape[2], rank, values)
    if per_token:
        expected = (expected[0], (*expected[2], rank), *expected[2:])
    check_state(state, expected)
    if not all(s.is_contiguous() for s in state):
        raise ValueError("ska_step updates its state in place: pass contiguous tensors, e.g. by .contiguous()")
    return _ska_step(
        q, masked(k, mask), v, gain_of(q, gamma, eta, power), *state,
        chunk_size, per_token, power, float(eps), spectral_norm, float(sigma_floor),
    )  # fmt: skip


def per_token_state(state: State, *, eps: float = 1e-3) -> State:
    """The state of `ska_step(refresh_every=1)` after the tokens of a `chunk_ska` state.

    The operator's place takes P = (G + eps nu^2 I)^-1 [N, Hk, r, r]; everything else is a copy.
    """
    S, _, previous, nu, position = state
    _, P = inverse(split_statistics(S)[0], ridge_of(nu, eps), S.device.type == "cpu")
    return S.clone(), P.contiguous(), previous.clone(), nu.clone(), torch.zeros_like(position)
