"""GKA in torch, in chunks, for any device and dtype: forward, the explicit backward and the decode step.

Within a chunk of C tokens that starts from (H_0, U_0), with G = cumsum(g) and D[t, j] = e^(G_t - G_j) for j <= t:

    H_t x = e^(G_t) H_0 x + sum_j D[t, j] w_j k_j (k_j . x),    w = beta^2

so one iteration of the solver for all C tokens is three matrix products. The backward differentiates the solution, not
the iteration (Gated KalmaNet, Lemmas 1 and 2): z = A^-1 dx comes from the same solver. README.md derives it. Inside
this file tensors are [N, H, chunks, C, D]; `split` and `merge` convert.
"""

import functools

import torch

from .._common import FLOOR, SequenceLayout, compute_dtype, decay_matrix, scan_chunks, without_autocast
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import BACKWARD, FORWARD, STEP, Chunks, Inputs, Packing, Pages, Solver, States
from .schedule import gradient_phases, richardson_steps


class _Chunks:
    """The tensors of every chunk that forward and backward need: k, v, w, G, D, and the states before it."""

    def __init__(self, k, v, g, beta, h0, u0, ridge):
        self.k, self.v, self.ridge = k, v, ridge
        self.w = beta.square()
        self.G, self.D = decay_matrix(g)
        self.zeta = self.G.exp()  # decay since the chunk's start
        self.to_end = (self.G[..., -1:] - self.G).exp()  # decay until the chunk's end
        self.chunk_decay = self.zeta[..., -1]
        self.DW = self.D * self.w[..., None, :]
        weighted = (self.to_end * self.w)[..., None] * k
        self.H0, self.h_final = scan_chunks(k.mT @ weighted, self.chunk_decay, h0)
        self.U0, self.u_final = scan_chunks(v.mT @ weighted, self.chunk_decay, u0)
        self.norm = self._norm()

    def _norm(self):
        """|H_t|_F [..., C] by expansion of the square: no H_t is ever formed."""
        k_H0 = self.k @ self.H0
        gram = self.k @ self.k.mT
        start = self.zeta.square() * self.H0.square().sum((-1, -2))[..., None]
        cross = 2 * self.zeta * (self.DW @ (k_H0 * self.k).sum(-1, keepdim=True))[..., 0]
        own = ((self.DW @ gram.square()) * self.DW).sum(-1)
        return (start + cross + own).clamp_min(0).sqrt()

    def apply_H(self, x):
        """H_t x_t [..., C, D]."""
        return self.zeta[..., None] * (x @ self.H0) + (self.DW * (x @ self.k.mT)) @ self.k

    def solve(self, q, phases):
        """x_t = CH(H_t + ridge |H_t| I, q_t); 0 where H_t = 0."""
        norm = self.norm[..., None]
        inverse = torch.where(norm == 0, 0.0, 1 / norm)
        x = torch.zeros_like(q)
        for phase, iterations in enumerate(phases):
            r = q if phase == 0 else q - self.apply_H(x) - self.ridge * norm * x
            r = inverse * r
            *steps, last = richardson_steps(iterations, self.ridge)
            for tau in steps:
                x = x + tau * r
                r = (1 - tau * self.ridge) * r - tau * inverse * self.apply_H(r)
            x = x + last * r
        return x

    def read(self, q):
        """U_t q_t [..., C, Dv]."""
        return self.zeta[..., None] * (q @ self.U0.mT) + (self.DW * (q @ self.k.mT)) @ self.v

    def read_adjoint(self, dy):
        """U_t^T dy_t [..., C, D]."""
        return self.zeta[..., None] * (dy @ self.U0) + (self.DW * (dy @ self.v.mT)) @ self.k


class _Rows:
    """Moves inputs into chunks, repeating grouped keys head-wise, and gradients back."""

    def __init__(self, inputs: Inputs, chunk_size: int, cu_seqlens: torch.Tensor | None):
        q, k = inputs[:2]
        self.layout = SequenceLayout(q.shape[0], q.shape[1], chunk_size, cu_seqlens)
        self.groups = q.shape[2] // k.shape[2]
        self.dtype = compute_dtype(q.dtype)

    def chunks(self, inputs: Inputs, states: States, ridge: float) -> _Chunks:
        k, v = self.split_grouped(inputs.k), self.split_grouped(inputs.v)
        g = self.split(inputs.log_decay).clamp_min(FLOOR[self.dtype])
        return _Chunks(k, v, g, self.split(inputs.beta), *states, ridge)

    def split(self, x):
        x = self.layout.split(x.to(self.dtype))
        return x.movedim(3, 1)  # [N, chunks, C, H, ...] -> [N, H, chunks, C, ...]

    def split_grouped(self, x):
        return self.split(x).repeat_interleave(self.groups, 1)

    def merge(self, x):
        return self.layout.merge(x.movedim(1, 3))

    def merge_grouped(self, x):
        return self.merge(x.unflatten(1, (-1, self.groups)).sum(2))


@without_autocast
@flat(*FORWARD)
def gka_forward(inputs: Inputs, states: States, packing: Packing, solver: Solver, chunks: Chunks):
    """(o [B, T, H, Dv] in q's dtype, x [B, T, H, D] in the compute dtype, final H, final U)."""
    rows = _Rows(inputs, chunks.chunk_size, packing.cu_seqlens)
    c = rows.chunks(inputs, states, solver.ridge)
    queries, mix = rows.split(inputs.q), rows.split(inputs.alpha)[..., None]
    x = c.solve(queries, solver.phases)
    o = solver.scale * c.read(queries + mix * (x - queries))
    return rows.merge(o).to(inputs.q.dtype), rows.merge(x), c.h_final, c.u_final


@without_autocast
@flat(*BACKWARD)
def gka_backward(upstream, inputs, states, kept, packing, solver, chunks):
    """Gradients (dq, dk, dv, dlog_decay, dalpha, dbeta, dh0, du0); dh0 is symmetric, as H is."""
    (phases, ridge, scale), (do, dh_final, du_final) = solver, upstream
    rows = _Rows(inputs, chunks.chunk_size, packing.cu_seqlens)
    c = rows.chunks(inputs, states, ridge)
    b, mix = rows.split(inputs.beta), rows.split(inputs.alpha)[..., None]
    queries, x, dy = rows.split(inputs.q), rows.split(kept.x), scale * rows.split(do)
    mixed = queries + mix * (x - queries)

    d_mixed = c.read_adjoint(dy)
    d_alpha = ((x - queries) * d_mixed).sum(-1)
    z = c.solve(mix * d_mixed, gradient_phases(phases))
    dq = (1 - mix) * d_mixed + z

    # E_i = sum_{t >= i} decay(i -> t) (z_t x_t^T + x_t z_t^T + ridge_t H_t): minus twice the gradient of H_i;
    # R_i is the gradient of U_i. Both run backwards over the chunks.
    ridge_t = 2 * ridge * (x * z).sum(-1) / torch.where(c.norm == 0, 1.0, c.norm)
    zeta_ridge = c.zeta * ridge_t
    by_zeta = c.zeta[..., None]
    zx = (by_zeta * z).mT @ x
    w, DT = c.w[..., None], c.D.mT
    from_start = DT @ zeta_ridge[..., None]  # sum_{t >= i} D[t, i] ridge_t zeta_t: how much of H_0 token i's sum holds
    H0_part = (zeta_ridge * c.zeta).sum(-1)[..., None, None] * c.H0
    E_add = zx + zx.mT + H0_part + c.k.mT @ (from_start * w * c.k)
    R_add = (by_zeta * dy).mT @ mixed
    E_end, E_0 = scan_chunks(E_add, c.chunk_decay, -(dh_final + dh_final.mT), reverse=True)
    R_end, R_0 = scan_chunks(R_add, c.chunk_decay, du_final, reverse=True)

    to_end = c.to_end[..., None]
    M_ridge = (DT * ridge_t[..., None, :]) @ c.D * c.w[..., None, :]
    gram = c.k @ c.k.mT
    E_k = (
        to_end * (c.k @ E_end)
        + (DT * (c.k @ x.mT)) @ z
        + (DT * (c.k @ z.mT)) @ x
        + from_start * (c.k @ c.H0)
        + (M_ridge * gram) @ c.k
    )
    R_k = to_end * (c.k @ R_end.mT) + (DT * (c.k @ mixed.mT)) @ dy
    R_v = to_end * (c.v @ R_end) + (DT * (c.v @ dy.mT)) @ mixed
    dk = w * (R_v - E_k)
    dv = w * R_k
    dw = (c.v * R_k).sum(-1) - 0.5 * (c.k * E_k).sum(-1)

    # log-decay: <dS_t, S_t> accumulates backwards from the chunk's end, so cancellation stays within a chunk
    H_end = torch.cat([c.H0[:, :, 1:], c.h_final[:, :, None]], 2)
    U_end = torch.cat([c.U0[:, :, 1:], c.u_final[:, :, None]], 2)
    carried = (R_end * U_end).sum((-1, -2)) - 0.5 * (E_end * H_end).sum((-1, -2))
    # <gradient of H_t from its own output, H_t> = -z . (A x), not -z . q: the solver leaves a residual, and only with
    # this term is a token's sum the same wherever a chunk or a sequence ends
    image = c.apply_H(x) + c.ridge * c.norm[..., None] * x
    local = (mixed * d_mixed).sum(-1) - (z * image).sum(-1)
    dg = carried[..., None] + (local - c.w * dw).flip(-1).cumsum(-1).flip(-1)

    merged = (rows.merge(dq), rows.merge_grouped(dk), rows.merge_grouped(dv))
    gates = (rows.merge(dg), rows.merge(d_alpha), rows.merge(2 * b * dw))
    return (*(d.to(t.dtype) for d, t in zip(merged, inputs[:3], strict=True)), *gates, -0.5 * E_0, R_0)


@functools.cache
def _step_weights(iterations: int, ridge: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The steps tau of `richardson_steps` as a tensor [iterations + 1]."""
    return torch.tensor(richardson_steps(iterations, ridge), dtype=dtype, device=device)


def _solve_token(h: torch.Tensor, q: torch.Tensor, phases: list[int], ridge: float) -> torch.Tensor:
    """x [B, H, D] with (H + ridge |H| I) x = q for one token, and x = 0 where H is zero; one operator per iteration.

    The polynomial is that of `_Chunks.solve`: with A = H / |H|, a step r <- r - tau (A + ridge I) r is one `baddbmm`.
    The residuals of a phase are kept, so that x, their sum weighted by tau, is one more product.
    """
    dim = q.shape[-1]
    norm = torch.linalg.vector_norm(h, dim=(-2, -1), keepdim=True)
    inverse = torch.where(norm == 0, 0.0, 1 / norm)
    a = (h * inverse).view(-1, dim, dim)
    # H is symmetric, so the vectors can be rows; on a CPU this takes a third of the time of columns
    right = (q[..., None, :] * inverse).reshape(-1, 1, dim)
    x = None
    for iterations in phases:
        r = right if x is None else torch.baddbmm(right - ridge * x, x, a, alpha=-1)
        residuals = r.new_empty(iterations + 1, *r.shape)
        residuals[0] = r
        rows = residuals.unbind()
        for tau, before, after in zip(richardson_steps(iterations, ridge), rows, rows[1:], strict=False):
            torch.baddbmm(before, before, a, beta=1 - tau * ridge, alpha=-tau, out=after)
        weights = _step_weights(iterations, ridge, r.dtype, r.device)
        found = (weights @ residuals.view(iterations + 1, -1)).view_as(r)
        x = found if x is None else x + found
    return x.view_as(q)


@without_autocast
@flat(*STEP)
def gka_step_torch(inputs: Inputs, pools: States, pages: Pages, solver: Solver):
    """Advance (h, u), or their pages, in place by the one token of q, k, v [B, 1, heads, D].

    Returns o [B, 1, H, Dv] in q's dtype.
    """
    (q, k, v, log_decay, alpha, beta), (phases, ridge, scale) = inputs, solver
    h, u = read_pages(pages.state_indices, *pools)
    groups = q.shape[2] // k.shape[2]
    queries, keys, values = (t[:, 0].to(h.dtype) for t in (q, k, v))
    if groups > 1:
        keys, values = (t.repeat_interleave(groups, 1) for t in (keys, values))
    decay = log_decay[:, 0].to(h.dtype).exp()[..., None, None]
    written = (beta[:, 0].to(h.dtype).square()[..., None] * keys)[..., None, :]
    h.mul_(decay).addcmul_(keys[..., :, None], written)
    u.mul_(decay).addcmul_(values[..., :, None], written)
    write_pages(pages.state_indices, pools, (h, u))
    x = _solve_token(h, queries, phases, ridge)
    mixed = queries + alpha[:, 0].to(h.dtype)[..., None] * (x - queries)
    return (scale * (mixed[..., None, :] @ u.mT)[..., 0, :]).to(q.dtype)[:, None]
