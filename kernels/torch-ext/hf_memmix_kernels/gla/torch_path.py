"""gla in torch, in chunks, for any device and dtype: forward, the explicit backward and the decode step.

With G = cumsum(g) inside a chunk, D[t, j] = e^(G_t - G_j) for j <= t, and w = beta v:
    o = scale * (e^G * (q S_0) + (q k^T * D) w) + skip v,    S_C = e^(G_C) S_0 + (e^(G_C - G) * k)^T w
Inside this file tensors are [N, Hk, G, chunks, C, D], with H = Hk G heads. Tensors with Hk heads have G = 1 and are
broadcast.
"""

import torch.nn.functional as F
from torch import Tensor

from .._common import FLOOR, SequenceLayout, compute_dtype, decay_matrix, heads_of_token, scan_chunks, without_autocast
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import Inputs, Token, Upstream


class _Chunks:
    """The layout of one call, its inputs in chunks, decays, and the state before every chunk."""

    def __init__(self, a: Inputs):
        q, k, v, log_decay, beta, skip, initial_state, cu_seqlens, _, chunk_size = a
        self.layout = SequenceLayout(q.shape[0], q.shape[1], chunk_size, cu_seqlens)
        self.dtype = compute_dtype(q.dtype)
        self.kv_heads = k.shape[2]
        self.q, self.k, self.v = (self.split(t) for t in (q, k, v))
        g = self.split(log_decay[..., None])[..., 0].clamp_min(FLOOR[self.dtype])
        self.beta = None if beta is None else self.split(beta[..., None])
        self.skip = None if skip is None else skip.to(self.dtype).view(self.kv_heads, -1, 1, 1, 1)
        self.w = self.v if beta is None else self.beta * self.v
        G, self.D = decay_matrix(g)
        self.from_start = G.exp()[..., None]
        self.to_end = (G[..., -1:] - G).exp()[..., None]
        self.decay = G[..., -1].exp()
        state = initial_state.to(self.dtype).unflatten(1, (self.kv_heads, -1))
        self.states, self.final = scan_chunks((self.to_end * self.k).mT @ self.w, self.decay, state)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads, D] -> [N, Hk, heads / Hk, chunks, C, D]."""
        x = self.layout.split(x.to(self.dtype)).permute(0, 3, 1, 2, 4)
        return x.unflatten(1, (self.kv_heads, -1))

    def merge(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        return self.layout.merge(x.flatten(1, 2).permute(0, 2, 3, 1, 4)).contiguous()


@without_autocast
@flat(Inputs)
def gla_fwd_torch(a: Inputs) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in q.dtype and the final states [N, H, K, V]."""
    c = _Chunks(a)
    o = a.scale * (c.from_start * (c.q @ c.states) + ((c.q @ c.k.mT) * c.D) @ c.w)
    o = o if a.skip is None else o + c.skip * c.v
    return c.merge(o).to(a.q.dtype), c.final.flatten(1, 2)


@without_autocast
@flat(Upstream, Inputs)
def gla_bwd_torch(upstream: Upstream, a: Inputs) -> tuple[Tensor | None, ...]:
    """Returns dq, dk, dv, dlog_decay, dbeta, dskip and the gradient of the initial states."""
    c, (do, dfinal) = _Chunks(a), upstream
    do = c.split(do)
    dskip = None if a.skip is None else (do * c.v).sum((0, 3, 4, 5)).flatten()
    do, do_skip = a.scale * do, None if a.skip is None else c.skip * do
    dstate = dfinal.to(c.dtype).unflatten(1, (c.kv_heads, -1))
    # gradients of the state after each chunk, and of the initial one
    dstates, dinitial = scan_chunks((c.from_start * c.q).mT @ do, c.decay, dstate, reverse=True)

    scores, dscores = (c.q @ c.k.mT) * c.D, (do @ c.w.mT) * c.D
    dq_start = c.from_start * (do @ c.states.mT)
    dk_end = c.to_end * (c.w @ dstates.mT)
    dq = dscores @ c.k + dq_start
    dk = dscores.mT @ c.q + dk_end
    dw = scores.mT @ do + c.to_end * (c.k @ dstates)
    dv, dbeta = dw, None
    if a.beta is not None:
        dbeta = c.merge((dw * c.v).sum(-1, keepdim=True))[..., 0].to(a.beta.dtype)
        dv = c.beta * dw
    dv = dv if a.skip is None else dv + do_skip
    # g_t decays what i >= t read of the state before the chunk, what j < t leave in the state after it, what i >= t
    # read of j < t, and the state that passes through: four sums inside the chunk, none of which cancel
    pairs = (c.q @ c.k.mT) * dscores
    # the sum over j < t: if the term j = t were added and removed, its rounding would stay, large beside fast decays
    before = F.pad(pairs, (1, -1)).cumsum(-1)
    reads = (dq_start * c.q).sum(-1, keepdim=True) + before
    writes = (dk_end * c.k).sum(-1, keepdim=True)
    dg = (reads.tril() + writes.expand_as(pairs).triu(1)).sum(-2)
    dg = dg + ((dstates * c.states).sum((-1, -2)) * c.decay)[..., None]
    # the gradient of a shared head is the sum over the heads that share it
    dq, dk, dv = (
        c.merge(t if t.shape[2] == x.shape[2] else t.sum(2, keepdim=True)).to(x.dtype)
        for t, x in ((dq, c.q), (dk, c.k), (dv, c.v))
    )
    dg = c.merge(dg[..., None])[..., 0].to(a.log_decay.dtype)
    return dq.to(a.q.dtype), dk.to(a.k.dtype), dv.to(a.v.dtype), dg, dbeta, dskip, dinitial.flatten(1, 2)


@without_autocast
@flat(Token)
def gla_step_torch(token: Token) -> Tensor:
    """Read one token [B, 1, heads, D] and update the state [B, H, K, V], or its pages in `pool`, in place."""
    q, k, v, log_decay, beta, skip, pool, state_indices, scale = token
    (state,) = read_pages(state_indices, pool)
    query, keys, values = (heads_of_token(t, state.shape[1], state.dtype) for t in (q, k, v))
    decay = log_decay[:, 0].to(state.dtype).exp()[..., None, None]
    written = values if beta is None else values * beta[:, 0, :, None].to(state.dtype)
    state.mul_(decay).addcmul_(keys[..., :, None], written[..., None, :])
    write_pages(state_indices, (pool,), (state,))
    o = scale * (query[..., None, :] @ state)[..., 0, :]
    o = o if skip is None else o + skip[:, None].to(state.dtype) * values
    return o.to(q.dtype)[:, None]
