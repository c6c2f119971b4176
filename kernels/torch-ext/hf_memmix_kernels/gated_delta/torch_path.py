"""The gated delta rule in torch, in chunks, for any device and dtype: forward, the explicit backward, the decode step.

With G = cumsum(g) inside a chunk and x_t the error of token t, v_t minus what the decayed memory returns for k_t:
    (I + A Diag(beta)) X = V - (e^G * K) S_0,          A_tj = sum_d k_t k_j e^(G_t - G_j) for j < t
    o = scale * ((e^G * Q) S_0 + B Diag(beta) X),      B_tj = sum_d q_t k_j e^(G_t - G_j) for j <= t
    S_C = e^(G_C) S_0 + (beta e^(G_C - G) * K)^T X
Inside this file tensors are [N, Hk, R, chunks, C, D], with H = Hk R heads. Tensors with Hk heads have R = 1 and are
broadcast. `decays.py` has what differs between one decay per head and one per channel.
"""

import torch
from torch import Tensor

from .._common import FLOOR, SequenceLayout, compute_dtype, heads_of_token, without_autocast
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import Inputs, Token, Upstream
from .decays import ChannelDecays, HeadDecays

CHUNK = 64


class _Chunks:
    """The layout of one call, its inputs in chunks, and the states before every chunk.

    `T` is the inverse of I + A Diag(beta), `W` = T (e^G * K), `X` the errors.
    """

    def __init__(self, a: Inputs):
        q, k, v, log_decay, beta, initial_state, cu_seqlens, _ = a
        self.layout = SequenceLayout(q.shape[0], q.shape[1], CHUNK, cu_seqlens)
        self.dtype = compute_dtype(q.dtype)
        self.key_heads = k.shape[2]
        self.q, self.k, self.v = (self.split(t) for t in (q, k, v))
        self.beta = self.split(beta[..., None])
        per_head = log_decay.dim() == 3
        g = self.split(log_decay[..., None] if per_head else log_decay).clamp_min(FLOOR[self.dtype])
        self.decays = d = HeadDecays(g) if per_head else ChannelDecays(g)
        self.A, self.B = d.pairs((self.k, self.q), self.k)
        self.A = self.A.tril(-1)
        eye = torch.eye(CHUNK, dtype=self.dtype, device=q.device)
        self.T = torch.linalg.solve_triangular(eye + self.A * self.beta.mT, eye, upper=False, unitriangular=True)
        self.q_start, self.k_start, self.k_end = d.from_start * self.q, d.from_start * self.k, d.to_end * self.k
        self.W = self.T @ self.k_start
        self.states, self.X, self.final = self._scan(initial_state.to(self.dtype).unflatten(1, (self.key_heads, -1)))

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads, D] -> [N, Hk, heads / Hk, chunks, C, D]."""
        x = self.layout.split(x.to(self.dtype)).permute(0, 3, 1, 2, 4)
        return x.unflatten(1, (self.key_heads, -1))

    def merge(self, x: Tensor) -> Tensor:
        """The inverse of `split`."""
        return self.layout.merge(x.flatten(1, 2).permute(0, 2, 3, 1, 4)).contiguous()

    def _scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states before every chunk, the errors, and the last state."""
        states, errors = [], []
        inputs = (self.T @ self.v, self.W, self.decays.whole, (self.beta * self.k_end).mT)
        for values, W, decay, writes in zip(*(t.unbind(3) for t in inputs), strict=True):
            states.append(state)
            errors.append(values - W @ state)
            state = decay * state + writes @ errors[-1]
        return torch.stack(states, 3), torch.stack(errors, 3), state

    def scan_back(self, do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the states after every chunk, of beta X, and of the first state."""
        dstates, dwrites = [], []
        inputs = (self.q_start.mT @ do, self.B.mT @ do, self.W.mT, self.decays.whole, self.k_end, self.beta)
        for read, within, W, decay, keys, beta in reversed(list(zip(*(t.unbind(3) for t in inputs), strict=True))):
            dstates.append(dstate)
            dwrites.append(within + keys @ dstate)
            dstate = decay * dstate + read - W @ (beta * dwrites[-1])
        return torch.stack(dstates[::-1], 3), torch.stack(dwrites[::-1], 3), dstate


@without_autocast
@flat(Inputs)
def gated_delta_fwd_torch(a: Inputs) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] in q.dtype and the final states [N, H, K, V]."""
    c = _Chunks(a)
    o = a.scale * (c.q_start @ c.states + c.B @ (c.beta * c.X))
    return c.merge(o).to(a.q.dtype), c.final.flatten(1, 2)


@without_autocast
@flat(Upstream, Inputs)
def gated_delta_bwd_torch(upstream: Upstream, a: Inputs) -> tuple[Tensor, ...]:
    """Returns dq, dk, dv, dlog_decay, dbeta and the gradient of the initial states."""
    c = _Chunks(a)
    d, do = c.decays, a.scale * c.split(upstream.do)
    dstates, dwrites, dinitial = c.scan_back(do, upstream.dfinal.to(c.dtype).unflatten(1, (c.key_heads, -1)))
    dv = dX = c.T.mT @ (c.beta * dwrites)
    between = dX @ c.X.mT
    dbeta = (c.X * dwrites).sum(-1, keepdim=True) - (c.A * between).sum(-2)[..., None]
    dA, dB = -(between * c.beta.mT).tril(-1), (do @ (c.beta * c.X).mT).tril()
    dq_start = d.from_start * (do @ c.states.mT)
    dk_start = -d.from_start * (dX @ c.states.mT)
    dk_end = d.to_end * ((c.beta * c.X) @ dstates.mT)
    (dk_rows, dq_rows), dk_columns, dg = d.pairs_backward((dA, dB), (c.A, c.B), (c.k, c.q), c.k)
    # g_t decays what i >= t read of the state before the chunk, what j < t leave in the state after it, and the state
    # that passes through; beside what i >= t read of j < t
    dg = dg + d.gradient(dq_start * c.q + dk_start * c.k, dk_end * c.k, dstates * c.states)
    # the gradient of a shared head is the sum over the heads that share it
    dq, dk, dv = (
        c.merge(t if t.shape[2] == x.shape[2] else t.sum(2, keepdim=True)).to(x.dtype)
        for t, x in ((dq_start + dq_rows, c.q), (dk_start + dk_end + dk_rows + dk_columns, c.k), (dv, c.v))
    )
    dg, dbeta = c.merge(dg).to(a.log_decay.dtype), c.merge(dbeta)[..., 0].to(a.beta.dtype)
    dg = dg[..., 0] if a.log_decay.dim() == 3 else dg
    return dq.to(a.q.dtype), dk.to(a.k.dtype), dv.to(a.v.dtype), dg, dbeta, dinitial.flatten(1, 2)


@without_autocast
@flat(Token)
def gated_delta_step_torch(token: Token) -> Tensor:
    """Read one token [B, 1, heads, D] and update the state [B, H, K, V], or its pages, in place."""
    q, k, v, log_decay, beta, pool, state_indices, scale = token
    (state,) = read_pages(state_indices, pool)
    query, keys, values = (heads_of_token(t, state.shape[1], state.dtype) for t in (q, k, v))
    g = log_decay[:, 0].to(state.dtype).exp()
    state.mul_(g[..., None, None] if g.dim() == 2 else g[..., None])
    errors = values - (keys[..., None, :] @ state)[..., 0, :]
    state.addcmul_(keys[..., :, None], (beta[:, 0, :, None].to(state.dtype) * errors)[..., None, :])
    write_pages(state_indices, (pool,), (state,))
    return (scale * (query[..., None, :] @ state)[..., 0, :]).to(q.dtype)[:, None]
