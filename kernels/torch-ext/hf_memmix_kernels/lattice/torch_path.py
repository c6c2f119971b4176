"""Lattice in torch, for any device: one batched update per token, and its exact adjoint.

An update changes a slot only by s_i' = a_i s_i + b_i h. The adjoint of the scalars a_i, b_i therefore needs two inner
products per slot, s_i . g_i and h . g_i. Forward keeps a state every 64 tokens for backward. Here states are
[G, m, d], with slots as rows and G = sequences * heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._common import SequenceLayout, compute_dtype, without_autocast
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import BACKWARD, FORWARD, STEP, Inputs, Kept, Pages, Rule, Save, Start, Upstream
from .naive import BASELINES
from .sizes import CHECKPOINT


class Write(NamedTuple):
    """The values that the adjoint of one update reads. `norm` is |s_i| before the update; `size` is the divisor after
    it, or None.
    """

    S: Tensor
    h: Tensor
    p: Tensor | None
    c: Tensor
    alpha: Tensor
    keep: Tensor
    norm: Tensor | None
    size: Tensor | None
    shrunk: Tensor | None
    next: Tensor


def _inner(S: Tensor, x: Tensor) -> Tensor:
    """s_i . x for every slot: [G, m]."""
    return torch.bmm(S, x[..., None])[..., 0]


def _sum(S: Tensor, x: Tensor) -> Tensor:
    """sum_i x_i s_i: [G, d]."""
    return torch.bmm(x[:, None], S)[:, 0]


def _inverse_norm(z: Tensor) -> Tensor:
    """1 / |z| [G, 1]; 0 where z = 0, because TTT's gradient is undefined there and the update writes nothing."""
    size = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return torch.where(size > 0, size.reciprocal(), 0)


def write(S: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor, variant, project, l1) -> Write:
    """One update of S [G, m, d] by k [G, m], v [G, d], gamma and mu [G, 1]."""
    baseline = variant in BASELINES
    norm = None if project or baseline else torch.linalg.vector_norm(S, dim=-1)
    if variant in ("enc", "sim"):
        h = v if variant == "enc" else -v
    else:
        z = _sum(S, k if norm is None else k / norm)
        if variant == "ttt":
            inverse = _inverse_norm(z)
            unit = z * inverse
            h = (unit * (unit * v).sum(-1, keepdim=True) - v) * inverse
        else:
            h = z - v
    p, c, keep = None, k, mu
    if not baseline:
        p = _inner(S, h)
        if variant == "enc":
            c = (p if norm is None else p / norm) - k
    alpha = -gamma * c if norm is None else -gamma * c / norm
    if not baseline:
        keep = mu - (alpha * p if norm is None else alpha * p / norm.square())
    new = keep[..., None] * S + alpha[..., None] * h[:, None]
    shrunk = size = None
    if l1:
        kept = new.sign() * (new.abs() - (gamma * l1)[..., None]).clamp_min(0)
        shrunk = kept.any(-1, keepdim=True)
        new = torch.where(shrunk, kept, new)
    if project:
        size = torch.linalg.vector_norm(new, dim=-1, keepdim=True)
        new = new / size
    return Write(S, h, p, c, alpha, keep, norm, size, shrunk, new)


def _ttt_adjoint(z: Tensor, v: Tensor, h: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of z and v through h = -P(z) v / |z|."""
    inverse = _inverse_norm(z)
    unit = z * inverse
    along_v, along_h = ((unit * x).sum(-1, keepdim=True) for x in (v, dh))
    dv = (unit * along_h - dh) * inverse
    dunit = (along_v * dh + along_h * v) * inverse
    dz = (dunit - unit * (unit * dunit).sum(-1, keepdim=True)) * inverse
    return dz - unit * inverse * (h * dh).sum(-1, keepdim=True), dv


def write_adjoint(g: Tensor, w: Write, k, v, gamma, variant, project, l1) -> tuple[Tensor, ...]:
    """Gradients of S, k, v, gamma and mu from the gradient g [G, m, d] of the slots after the update."""
    baseline, norm = variant in BASELINES, w.norm
    if project:
        g = (g - w.next * (w.next * g).sum(-1, keepdim=True)) / w.size
    dgamma = 0
    if l1:
        # the threshold has the sign of the shrunk value; entries that were shrunk to zero have gradient 0
        passed = torch.where(w.shrunk, g * (w.next != 0), g)
        dgamma = -l1 * (torch.where(w.shrunk, w.next.sign(), 0) * g).sum((-1, -2))[:, None]
        g = passed
    dkeep, dalpha = (w.S * g).sum(-1), _inner(g, w.h)
    dmu = dkeep.sum(-1, keepdim=True)
    dh = _sum(g, w.alpha)
    dS = w.keep[..., None] * g
    if not baseline:
        back = 1 if norm is None else norm.square().reciprocal()
        dalpha = dalpha - w.p * back * dkeep
        dp = -w.alpha * back * dkeep
        if norm is not None:
            dnorm = 2 * w.alpha * w.p * back / norm * dkeep - dalpha * w.alpha / norm
    scaled = dalpha if norm is None else dalpha / norm
    dc = -gamma * scaled
    dgamma = dgamma - (w.c * scaled).sum(-1, keepdim=True)
    if variant == "enc":
        dk = -dc
        dp = dp + (dc if norm is None else dc / norm)
        if norm is not None:
            dnorm = dnorm - dc * w.p / norm.square()
    else:
        dk = dc
    if not baseline:
        dh = dh + _sum(w.S, dp)
        dS = dS + dp[..., None] * w.h[:, None]
    if variant in ("enc", "sim"):
        dv = dh if variant == "enc" else -dh
    else:
        read = k if norm is None else k / norm
        dz, dv = _ttt_adjoint(_sum(w.S, k), v, w.h, dh) if variant == "ttt" else (dh, -dh)
        dread = _inner(w.S, dz)
        dS = dS + read[..., None] * dz[:, None]
        dk = dk + (dread if norm is None else dread / norm)
        if norm is not None:
            dnorm = dnorm - dread * read / norm
    if norm is not None:
        dS = dS + (dnorm / norm)[..., None] * w.S
    return dS, dk, dv, dgamma, dmu


def _steps(layout: SequenceLayout, dtype: torch.dtype, *inputs: Tensor | None) -> list[tuple]:
    """The inputs [B, T, H, ...] of every token, [G, ...] each; [B, T, H] becomes [G, 1]."""
    columns = []
    for x in inputs:
        if x is None:
            columns.append([None] * layout.padded)
            continue
        x = layout.split(x.to(dtype)).flatten(1, 2)
        x = x[..., None] if x.dim() == 3 else x
        columns.append(x.transpose(0, 1).flatten(1, 2).unbind(0))
    return list(zip(*columns, strict=True))


def _gather(steps: list[Tensor], layout: SequenceLayout, like: Tensor) -> Tensor:
    """The inverse of `_steps` for one input, in its shape and dtype."""
    x = torch.stack(steps).unflatten(1, (-1, like.shape[2])).transpose(0, 1)
    return layout.merge(x[:, :, None]).reshape(like.shape).to(like.dtype)


def _inputs(layout: SequenceLayout, dtype: torch.dtype, k, v, gamma, log_decay) -> list[tuple]:
    steps = _steps(layout, dtype, k, v, gamma, log_decay)
    return [(*x, torch.ones_like(x[2]) if decay is None else decay.exp()) for *x, decay in steps]


@without_autocast
@flat(*FORWARD)
def lattice_fwd_torch(inputs: Inputs, start: Start, rule: Rule, save: Save):
    """o, the final state [N, H, d, m] and the states before every 64th token [windows, G, m, d]."""
    q, k, v, gamma, log_decay = inputs
    (initial_state, cu_seqlens), (save,) = start, save
    dtype = compute_dtype(q.dtype)
    layout = SequenceLayout(q.shape[0], q.shape[1], 1, cu_seqlens)
    S = initial_state.to(dtype).flatten(0, 1).mT.contiguous()
    outputs, kept = [], []
    reads = _steps(layout, dtype, q)
    for t, x in enumerate(_inputs(layout, dtype, k, v, gamma, log_decay)):
        if save and t % CHECKPOINT == 0:
            kept.append(S)
        S = write(S, *x, *rule).next
        outputs.append(_sum(S, *reads[t]))
    kept = torch.stack(kept) if save else S.new_empty(0, *S.shape)
    return _gather(outputs, layout, v), S.mT.unflatten(0, initial_state.shape[:2]), kept


@without_autocast
@flat(*BACKWARD)
def lattice_bwd_torch(upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule):
    """Gradients of q, k, v, gamma, log_decay (or None) and the initial state."""
    (do, dfinal), (q, k, v, gamma, log_decay) = upstream, inputs
    (initial_state, cu_seqlens), (kept,) = start, kept
    dtype = compute_dtype(q.dtype)
    layout = SequenceLayout(q.shape[0], q.shape[1], 1, cu_seqlens)
    inputs, reads = _inputs(layout, dtype, k, v, gamma, log_decay), _steps(layout, dtype, q, do)
    g = dfinal.to(dtype).flatten(0, 1).mT
    grads = [[None] * layout.padded for _ in range(5)]
    for window in reversed(range(len(kept))):
        tokens = range(window * CHECKPOINT, min((window + 1) * CHECKPOINT, layout.padded))
        S, writes = kept[window], []
        for t in tokens:
            writes.append(write(S, *inputs[t], *rule))
            S = writes[-1].next
        for t, w in zip(reversed(tokens), reversed(writes), strict=True):
            (q_t, do_t), (k_t, v_t, gamma_t, mu_t) = reads[t], inputs[t]
            g = g + q_t[..., None] * do_t[:, None]
            g, dk, dv, dgamma, dmu = write_adjoint(g, w, k_t, v_t, gamma_t, *rule)
            for grad, value in zip(grads, (_inner(w.next, do_t), dk, dv, dgamma, dmu * mu_t), strict=True):
                grad[t] = value
    likes = (q, k, v, gamma, log_decay)
    found = [None if like is None else _gather(x, layout, like) for x, like in zip(grads, likes, strict=True)]
    return *found, g.mT.unflatten(0, initial_state.shape[:2])


@without_autocast
@flat(*STEP)
def lattice_step_torch(inputs: Inputs, pages: Pages, rule: Rule):
    """Update the state [B, H, d, m], or its pages in `pool`, in place by one token; returns o [B, 1, H, d]."""
    (q, k, v, gamma, log_decay), (pool, state_indices) = inputs, pages
    (state,) = read_pages(state_indices, pool)
    # [B, 1, H, ...] as [G, ...]
    q_t, k_t, v_t = (x.to(state.dtype).flatten(0, 2) for x in (q, k, v))
    gamma = gamma.to(state.dtype).reshape(-1, 1)
    mu = torch.ones_like(gamma) if log_decay is None else log_decay.to(state.dtype).reshape(-1, 1).exp()
    S = write(state.flatten(0, 1).mT.contiguous(), k_t, v_t, gamma, mu, *rule).next
    state.copy_(S.mT.view_as(state))
    write_pages(state_indices, (pool,), (state,))
    return _sum(S, q_t).view(v.shape).to(v.dtype)
