"""The SKA op: checks of the arguments, choice of the path, registration with torch.library."""

import torch
from torch import Tensor

from .._chunks import sequence_ids
from .._common import check_cu_seqlens, check_heads, compute_dtype, dense, num_sequences
from .._dispatch import native_library, use_triton
from .._groups import flat, tensors
from .._pages import check_step_states
from .._registration import chunk_op, or_zeros, step_op
from . import torch_path
from .arguments import FORWARD, STEP, Chunks, Ends, Estimate, Refresh, State, Tokens, Upstream
from .native_path import ska_step_native
from .state import check_state, state_shapes
from .torch_path import ska_step_torch

MAX_RANK = 128
NORMALIZATIONS = ("running_max", "sequence_max")


def _chunk_path(q: Tensor):
    """The module whose ska_forward and ska_backward run: torch in float64 and above the kernels' rank."""
    if use_triton(q, "ska", q.shape[-1]) and q.dtype != torch.float64:
        from . import launch

        if q.shape[-1] <= launch.MAX_TRITON_RANK:
            return launch
    return torch_path


@chunk_op("hf_memmix::ska_fwd")
@flat(*FORWARD)
def _ska_fwd(x: Tokens, state: State, ends: Ends, chunks: Chunks, estimate: Estimate) -> tensors(6):
    outputs = _chunk_path(x.q).ska_forward(*x, *state, *ends, *chunks, *estimate)
    return tuple(t.contiguous() for t in outputs)


@_ska_fwd.register_fake
@flat(*FORWARD)
def _(x, state, *rest):
    return x.q.new_empty(*x.q.shape[:3], x.v.shape[-1]), *(t.new_empty(t.shape) for t in state)


@chunk_op("hf_memmix::ska_bwd")
@flat(Upstream, *FORWARD)
def _ska_bwd(upstream: Upstream, x: Tokens, state: State, ends: Ends, chunks: Chunks, estimate: Estimate) -> tensors(
    8
):
    grads = _chunk_path(x.q).ska_backward(*upstream, *x, *state, *ends, *chunks, *estimate)
    return tuple(t.contiguous() for t in grads)


@_ska_bwd.register_fake
@flat(Upstream, *FORWARD)
def _(upstream, x, state, *rest):
    return tuple(t.new_empty(t.shape) for t in (*x, *state[:4]))


def _setup_context(ctx, inputs, output):
    tensors, ctx.options = inputs[:-5], inputs[-5:]
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, *d_state):
    tensors = ctx.saved_tensors
    q, _, v, _, *state = tensors[:9]
    do = or_zeros(do, q, (*q.shape[:3], v.shape[-1]))
    d_state = [or_zeros(d, s) for s, d in zip(state, d_state, strict=True)]
    grads = _ska_bwd(do, *d_state[:4], *tensors, *ctx.options)
    # position counts tokens: its derivative is 1, and nothing else depends on it smoothly
    return *grads, d_state[4], *[None] * 7


_ska_fwd.register_autograd(_backward, setup_context=_setup_context)


@step_op("hf_memmix::ska_step", mutates_args=("statistics", "operator", "previous", "nu", "position"))
@flat(*STEP)
def _ska_step(x: Tokens, state: State, refresh: Refresh, estimate: Estimate) -> Tensor:
    native = not refresh.per_token and state.statistics.dtype == torch.float32
    if native and (library := native_library("ska", *x, *state)):
        return ska_step_native(library, x, state, refresh, estimate)
    step = ska_step_torch
    rank = x.q.shape[-1]
    if use_triton(x.q, "ska", rank) and state.statistics.dtype != torch.float64:
        from .launch import MAX_TRITON_RANK, ska_step_triton

        if rank <= MAX_TRITON_RANK:
            step = ska_step_triton
    return step(*x, *state, *refresh, *estimate)


@_ska_step.register_fake
def _(q, k, v, *rest):
    return q.new_empty(*q.shape[:3], v.shape[-1])


def check(q, k, v, mask, factors: dict[str, Tensor | None], chunk_size: int, normalization: str, estimate: Estimate):
    """Raise ValueError unless the arguments of an SKA function fit together. Values of tensors are not checked."""
    check_heads("ska", q, k, v)
    batch, tokens, heads, rank = q.shape
    if rank > MAX_RANK:
        raise ValueError(
            f"ska: rank {rank} is over the limit of {MAX_RANK}; take a smaller rank, the paper's are 24 and 32"
        )
    if mask is not None and mask.shape != (batch, tokens):
        raise ValueError(f"ska: the action mask must be [B, T] = {(batch, tokens)}, got {tuple(mask.shape)}")
    for name, factor in factors.items():
        if factor is not None and factor.shape not in ((), (heads,)):
            raise ValueError(
                f"ska: {name} must be a scalar or one factor per head [{heads}], got {tuple(factor.shape)}"
            )
    power, eps, _, sigma_floor = estimate
    if not (isinstance(power, int) and 0 <= power <= 8):
        raise ValueError(f"ska: power={power} must be an integer of 0 .. 8; the paper's K is 2")
    if not eps > 0:
        raise ValueError(f"ska: eps={eps} must be positive; the paper's is 1e-3")
    if not 0 < sigma_floor <= 1:
        raise ValueError(f"ska: sigma_floor={sigma_floor} must be in (0, 1]; the default is 0.1")
    if chunk_size < 1:
        raise ValueError(f"ska: chunk_size={chunk_size} must be at least 1; the default is 64")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"ska: normalization={normalization!r} is not one of {NORMALIZATIONS}")


def check_ends(cu_seqlens: Tensor | None, lengths: Tensor | None, batch: int):
    """Raise ValueError unless at most one of them says where sequences end, in the right shape."""
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch)
        if lengths is not None:
            raise ValueError("ska: pass cu_seqlens (packed) or lengths (padded), not both")
    if lengths is not None and lengths.shape != (batch,):
        raise ValueError(f"ska: lengths must be [B] = {(batch,)}, got {tuple(lengths.shape)}")


def masked(k: Tensor, mask: Tensor | None) -> Tensor:
    """z = m k: a token outside of the action mask does not change the statistics. A bool mask also stops NaN."""
    if mask is None:
        return k
    mask = mask[:, :, None, None]
    return k.masked_fill(~mask, 0) if mask.dtype == torch.bool else k * mask.to(k.dtype)


def gain_of(q: Tensor, gamma: Tensor | None, eta: Tensor | None, power: int) -> Tensor:
    """eta gamma^K per head [H]: y is linear in it."""
    gain = torch.ones(q.shape[2], dtype=compute_dtype(q.dtype), device=q.device)
    gain = gain if gamma is None else gain * gamma.to(gain.dtype) ** power
    return gain if eta is None else gain * eta.to(gain.dtype)


def sequence_max(k: Tensor, nu: Tensor, cu_seqlens: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The largest key norm of every whole sequence [N, Hk], at least `nu`."""
    norms = torch.linalg.vector_norm(k.to(nu.dtype), dim=-1)
    if cu_seqlens is not None:
        sequence = sequence_ids(cu_seqlens, norms.shape[1])
        return nu.scatter_reduce(0, sequence[:, None].expand_as(norms[0]), norms[0], "amax")
    if lengths is not None:
        beyond = torch.arange(norms.shape[1], device=k.device) >= lengths[:, None]
        norms = norms.masked_fill(beyond[..., None], 0)
    return torch.maximum(nu, norms.amax(1))


def chunk_ska(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    gamma: Tensor | None = None,
    eta: Tensor | None = None,
    *,
    power: int = 2,
    eps: float = 1e-3,
    chunk_size: int = 64,
    spectral_norm: bool = True,
    sigma_floor: float = 0.1,
    normalization: str = "running_max",
    initial_state: tuple[Tensor, ...] | None = None,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Spectral Koopman Attention, chunk-causal ("Echo", equations (7) to (13)).

    With z = mask k, G = sum z_t z_t^T, M = sum z_t z_{t-1}^T, C = sum v_t z_t^T over all chunks before the token's,
    nu the largest |z| among them and P = (G + eps nu^2 I)^-1:

        o_t = eta (gamma / max(sigma, sigma_floor))^K C P (M P)^K q_t,    sigma = |L^-1 M L^-T|_2,  P = (L L^T)^-1

    sigma is detached and estimated by 6 power iterations. The first chunk of a fresh sequence reads zero.

    Args:
        q: queries [B, T, H, r], r <= 128; Triton runs r <= 64, the torch path larger ranks.
        k: keys [B, T, Hk, r] with Hk dividing H; query head h reads key head h // (H / Hk).
        v: values [B, T, Hk, P], P <= 256.
        mask: action mask [B, T], bool or a factor. A token with mask 0 is not stored, and forms no pair (t, t-1).
        gamma, eta: scalars or [H]; None is 1. The paper initialises them with 1 and 1.5.
        power: K >= 0; 0 is ridge regression.
        eps: ridge, in units of nu^2.
        chunk_size: tokens between two estimates of the operator; part of the model. 1 re-estimates at every token.
        spectral_norm: divide by sigma.
        sigma_floor: smallest divisor; A_w has norm <= 1, so a small sigma would only amplify noise.
        normalization: "running_max" is causal; "sequence_max", the paper's, takes nu over the whole sequence.
        initial_state: (statistics [N, Hk, r, 2r + P] = [G | M^T | C^T], operator [N, Hk, r, P], previous key
            [N, Hk, r], nu [N, Hk], position in the chunk [N, Hk]) before the first token; None is zeros. Their values
            are not checked, see `check_ska_state`.
        cu_seqlens: boundaries [N + 1] of packed sequences; B is 1 then. Without it N = B.
        lengths: [B]; tokens of row b from lengths[b] on are padding: their o is zero and they do not change the state.

    Returns:
        o [B, T, H, P] in q's dtype and the final state, float32 (float64 for float64 inputs). Differentiable in every
        tensor and through both results, `position` excepted.

    Raises:
        ValueError: shapes or options do not fit; on a CPU also statistics that are not positive definite.
    """
    estimate = Estimate(power, float(eps), spectral_norm, float(sigma_floor))
    check(q, k, v, mask, {"gamma": gamma, "eta": eta}, chunk_size, normalization, estimate)
    check_ends(cu_seqlens, lengths, q.shape[0])
    dtype = compute_dtype(q.dtype)
    shapes = state_shapes(num_sequences(q.shape[0], cu_seqlens), k.shape[2], q.shape[3], v.shape[3])
    if initial_state is None:
        state = tuple(q.new_zeros(shape, dtype=dtype) for shape in shapes)
    else:
        check_state(initial_state, shapes)
        state = tuple(s.to(dtype) for s in initial_state)
    z = masked(k, mask)
    if normalization == "sequence_max":
        state = (*state[:3], sequence_max(z, state[3], cu_seqlens, lengths), state[4])
    x = Tokens(q, z, v, gain_of(q, gamma, eta, power))
    o, *final = _ska_fwd(*x, *state, dense(cu_seqlens), dense(lengths), chunk_size, *estimate)
    return o, tuple(final)


def ska_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    gamma: Tensor | None,
    eta: Tensor | None,
    state: tuple[Tensor, ...],
    *,
    power: int = 2,
    eps: float = 1e-3,
    chunk_size: int = 64,
    refresh_every: int | None = None,
    spectral_norm: bool = True,
    sigma_floor: float = 0.1,
    state_indices: Tensor | None = None,
) -> Tensor:
    """One decoding step of `chunk_ska`, without autograd.

    Args:
        q, k, v: [B, 1, H, r], [B, 1, Hk, r], [B, 1, Hk, P]; mask [B, 1]; gamma, eta: as in `chunk_ska`.
        state: as in `chunk_ska`, contiguous, updated IN PLACE; with `state_indices` pages [pages, ...] of each tensor.
        chunk_size: tokens between two estimates of the operator, the same as in training.
        refresh_every: None is `chunk_size`. 1 is the paper's re-estimation at every token, the model of
            `chunk_ska(chunk_size=1)`: rank-one updates of P = (G + eps nu^2 I)^-1 at O(r^2) per token. P is computed
            anew where a key exceeds nu and after every `chunk_size` tokens. Its state comes from `per_token_state`.
        state_indices: int32 or int64 [B], the page of each row; see kernels/README.md. On a CPU too, statistics that
            are not positive definite then raise nothing: they may lie in a page that no sequence reads.

    Returns:
        o [B, 1, H, P] in q's dtype.

    Raises:
        ValueError: more than one token, shapes or options that do not fit, a state that is not contiguous.
    """
    estimate = Estimate(power, float(eps), spectral_norm, float(sigma_floor))
    check(q, k, v, mask, {"gamma": gamma, "eta": eta}, chunk_size, "running_max", estimate)
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
    check_step_states("ska_step", q.shape[1], state, expected, state_indices)
    x = Tokens(q, masked(k, mask), v, gain_of(q, gamma, eta, power))
    return _ska_step(*x, *state, state_indices, chunk_size, per_token, *estimate)
