"""Chunk-causal SKA in torch, for any device and dtype: forward, the explicit backward and the decode step.

A sequence that starts `position` tokens into a chunk is laid out in chunks of c slots, of which the first `position`
are empty. The operator of chunk s > 0 comes from the statistics before it; that of chunk 0 is the carried one:

    S_s = S_0 + sum_{j < s} sum_{t in j} [z_t z_t^T | z_{t-1} z_t^T | z_t v_t^T],   o_t = gain W_s q_t

Inside this file tensors are [N, Hk, chunks, c, D], queries [N, Hk, chunks, groups, c, D].
"""

import torch
from torch import Tensor

from .._common import compute_dtype, without_autocast
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import FORWARD, STEP, Chunks, Ends, Estimate, Refresh, State, Tokens, Upstream
from .naive import POWER_ITERATIONS, start_vector
from .operator import Operator, inverse, ridge_of, split_statistics


class _Slots:
    """The index of every slot of every chunk in the flattened tokens, and which slots hold a token."""

    def __init__(self, k: Tensor, position: Tensor, ends: Ends, c: int):
        cu_seqlens, lengths = ends
        batch, T = k.shape[:2]
        steps = torch.arange(batch, device=k.device)
        if cu_seqlens is not None:
            starts, self.lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        else:
            starts, self.lengths = steps * T, torch.full_like(steps, T) if lengths is None else lengths.long()
        self.offset = position[:, 0].long()
        self.last = (self.offset + self.lengths) // c  # the chunk that the next token will fall into
        self.chunks, self.c, self.tokens = int(self.last.max()) + 1, c, batch * T
        slots = torch.arange(self.chunks * c, device=k.device)
        self.first = slots == self.offset[:, None]
        steps = slots - self.offset[:, None]
        self.valid = (steps >= 0) & (steps < self.lengths[:, None])
        self.end = steps == self.lengths[:, None] - 1
        self.index = torch.where(self.valid, steps + starts[:, None], 0)

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, D] -> [N, H, chunks, c, D], zero where there is no token."""
        x = torch.where(self.valid[..., None, None], x.flatten(0, 1)[self.index].to(dtype), 0)
        return x.unflatten(1, (self.chunks, self.c)).permute(0, 3, 1, 2, 4)

    def split_queries(self, x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
        """[B, T, H, D] -> [N, Hk, chunks, groups, c, D]."""
        return self.split(x, dtype).unflatten(1, (kv_heads, -1)).transpose(2, 3)

    def merge(self, x: Tensor, like: Tensor) -> Tensor:
        """[N, H, chunks, c, D] -> the shape and dtype of `like`, zero at padded tokens."""
        x = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
        out = like.new_zeros(self.tokens, *x.shape[2:])
        out[self.index[self.valid]] = x[self.valid].to(like.dtype)
        return out.view(*like.shape[:2], *x.shape[2:])

    def merge_queries(self, x: Tensor, like: Tensor) -> Tensor:
        return self.merge(x.transpose(2, 3).flatten(1, 2), like)

    def shift(self, k: Tensor, previous: Tensor) -> Tensor:
        """The key before every key [N, Hk, chunks, c, r]; `previous` [N, Hk, r] before the first."""
        flat = k.flatten(2, 3)
        flat = torch.cat([torch.zeros_like(flat[:, :, :1]), flat[:, :, :-1]], 2)
        flat = torch.where(self.first[:, None, :, None], previous[:, :, None], flat)
        return torch.where(self.valid[:, None, :, None], flat, 0).view_as(k)

    def unshift(self, d: Tensor) -> tuple[Tensor, Tensor]:
        """The adjoint of `shift`: gradients of the keys and of `previous`."""
        flat = torch.where(self.valid[:, None, :, None], d.flatten(2, 3), 0)
        d_previous = torch.where(self.first[:, None, :, None], flat, 0).sum(2)
        flat = torch.where(self.first[:, None, :, None], 0, flat)
        return torch.cat([flat[:, :, 1:], torch.zeros_like(flat[:, :, :1])], 2).view_as(d), d_previous

    def at_end(self, d: Tensor) -> Tensor:
        """[N, Hk, r] placed at each sequence's last token, zeros elsewhere."""
        d = torch.where(self.end[:, None, :, None], d[:, :, None], 0)
        return d.unflatten(2, (self.chunks, self.c))


def _exclusive(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """first + the sums of x [N, Hk, chunks, ...] before every chunk, and after all of them."""
    first = first[:, :, None]
    sums = torch.cat([first, first + x.cumsum(2)], 2)
    return sums[:, :, :-1], sums[:, :, -1].clone()


class _Forward:
    """The results of the forward pass that the backward pass also needs."""

    def __init__(self, x: Tokens, state: State, ends: Ends, chunks: Chunks, estimate: Estimate):
        (q, k, v, gain), (S0, W0, previous, nu0, position) = x, state
        dtype = compute_dtype(q.dtype)
        self.slots = slots = _Slots(k, position, ends, chunks.chunk_size)
        kv_heads = k.shape[2]
        self.q = slots.split_queries(q, kv_heads, dtype)
        self.k, self.v = slots.split(k, dtype), slots.split(v, dtype)
        self.gain = gain.view(1, kv_heads, 1, -1, 1, 1)
        self.before = slots.shift(self.k, previous)
        kT = self.k.mT
        sums = torch.cat([kT @ self.k, self.before.mT @ self.k, kT @ self.v], -1)
        self.S, self.S_final = _exclusive(sums, S0)
        self.norms = torch.linalg.vector_norm(self.k, dim=-1)
        running = torch.cat([nu0[:, :, None], self.norms.amax(-1)], 2).cummax(2).values
        self.nu, self.nu_final = running[:, :, :-1], running[:, :, -1].clone()
        # looking at the factorisation's result would wait for a GPU
        check = q.device.type == "cpu"
        self.operator = Operator(self.S[:, :, 1:], self.nu[:, :, 1:], estimate, check)
        self.WT = torch.cat([W0[:, :, None], self.operator.WT], 2)

    def final_state(self, state: State):
        _, _, previous, _, position = state
        slots = self.slots
        last = slots.last.view(-1, 1, 1, 1, 1).expand(-1, self.k.shape[1], 1, *self.WT.shape[3:])
        end = torch.where(slots.end[:, None, :, None], self.k.flatten(2, 3), 0).sum(2)
        empty = (slots.lengths == 0)[:, None, None]
        filled = (slots.offset + slots.lengths) % slots.c
        return (
            self.S_final,
            self.WT.gather(2, last)[:, :, 0],
            torch.where(empty, previous, end),
            self.nu_final,
            filled[:, None].expand_as(position).to(position.dtype),
        )


@without_autocast
@flat(*FORWARD)
def ska_forward(x: Tokens, state: State, ends: Ends, chunks: Chunks, estimate: Estimate):
    """o [B, T, H, P] in q's dtype and the five final states."""
    f = _Forward(x, state, ends, chunks, estimate)
    o = f.gain * (f.q @ f.WT[:, :, :, None])
    return f.slots.merge_queries(o, x.q), *f.final_state(state)


@without_autocast
@flat(Upstream, *FORWARD)
def ska_backward(upstream: Upstream, x: Tokens, state: State, ends: Ends, chunks: Chunks, estimate: Estimate):
    """Gradients of q, k, v, gain and of the first four states."""
    (q, k, v, gain), f = x, _Forward(x, state, ends, chunks, estimate)
    do, dS_final, dW_final, dprevious_final, dnu_final = upstream
    slots = f.slots
    do = slots.split_queries(do, k.shape[2], f.q.dtype)
    dq = do @ f.WT.mT[:, :, :, None]
    dgain = (dq * f.q).sum((0, 2, 4, 5)).view_as(gain)
    dWT = (f.q.mT @ (f.gain * do)).sum(3)
    at_last = torch.arange(slots.chunks, device=q.device) == slots.last[:, None]
    dWT = dWT + at_last[:, None, :, None, None] * dW_final[:, :, None]

    dS, dnu = f.operator.backward(dWT[:, :, 1:])
    # a chunk's statistics are read by all later chunks: sums from the end
    later, all_of_them = _exclusive(dS.flip(2), dS_final)
    dS = torch.cat([all_of_them[:, :, None], later.flip(2)], 2)
    dG, dMT, dCT = split_statistics(dS)
    dk = f.k @ (dG + dG.mT) + f.before @ dMT + f.v @ dCT.mT
    dv = f.k @ dCT
    dbefore, dprevious = slots.unshift(f.k @ dMT.mT)
    empty = (slots.lengths == 0)[:, None, None]
    dk = dk + dbefore + slots.at_end(dprevious_final)
    dprevious = dprevious + torch.where(empty, dprevious_final, 0)

    # nu's gradient goes to the key that set the maximum, chunk by chunk from the end
    carried, received = dnu_final, []
    for s in range(slots.chunks - 1, -1, -1):
        after = f.nu[:, :, s + 1] if s + 1 < slots.chunks else f.nu_final
        grows = after > f.nu[:, :, s]
        received.append(torch.where(grows, carried, 0))
        carried = torch.where(grows, 0, carried) + (dnu[:, :, s - 1] if s else 0)
    received = torch.stack(received[::-1], 2)[..., None]
    chosen = f.norms == f.norms.amax(-1, keepdim=True)
    weight = received * chosen / chosen.sum(-1, keepdim=True) / f.norms.clamp_min(torch.finfo(f.norms.dtype).tiny)
    dk = dk + weight[..., None] * f.k
    return (
        slots.merge_queries(f.gain * dq, q), slots.merge(dk, k), slots.merge(dv, v), dgain,
        dS[:, :, 0].clone(), dWT[:, :, 0].clone(), dprevious, carried,
    )  # fmt: skip


def _read_per_token(S, P, nu, q, estimate: Estimate):
    """C (P M)^K P q / sigma^K by products with vectors: q [N, Hk, groups, r], all else [N, Hk, ...]."""
    power, eps, spectral_norm, sigma_floor = estimate
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
        sigma = ((a * (P @ a)).sum((-1, -2)) / length).clamp_min(0).sqrt()
        scale = sigma.clamp_min(sigma_floor) ** -power
    x = q @ P
    for _ in range(power):
        x = x @ MT @ P
    return scale[..., None, None] * (x @ CT)


def estimate_again(
    state: State, due: Tensor, estimate: Estimate, per_token: bool = False, check: bool = True, refuse: bool = True
) -> None:
    """Compute the operator, or with `per_token` P, of the heads that are `due` [N, Hk] from their statistics, and let
    a chunk begin; in place. `check`, `refuse`: see `inverse`."""
    S, W, _, nu, position = state
    if per_token:
        _, new = inverse(split_statistics(S)[0], ridge_of(nu, estimate.eps), check, refuse)
    else:
        new = Operator(S, nu, estimate, check, refuse).WT
    W.copy_(torch.where(due[..., None, None], new, W))
    position.masked_fill_(due, 0)


@without_autocast
@flat(*STEP)
def ska_step_torch(x: Tokens, pools: State, refresh: Refresh, estimate: Estimate):
    """Advance the state, or its pages, in place by one token, q, k, v [B, 1, heads, D]; o [B, 1, H, P] like q."""
    (q, k, v, gain), (state_indices, chunk_size, per_token) = x, refresh
    S, W, previous, nu, position = read_pages(state_indices, *pools)
    queries = q[:, 0].to(S.dtype).unflatten(1, (k.shape[2], -1))
    z, values = k[:, 0].to(S.dtype), v[:, 0].to(S.dtype)
    read = _read_per_token(S, W, nu, queries, estimate) if per_token else queries @ W
    o = read.flatten(1, 2) * gain[:, None]
    norm = torch.linalg.vector_norm(z, dim=-1)
    grown = norm > nu if per_token else None
    nu.copy_(torch.maximum(nu, norm))
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
        # among pages one may be garbage, which must not stop the others
        refuse = state_indices is None
        estimate_again(State(S, W, previous, nu, position), due, estimate, per_token, check, refuse)
    write_pages(state_indices, pools, (S, W, previous, nu, position))
    return o.to(q.dtype)[:, None]
