"""COFFEE in torch, for any device: four operations per token forward, one backward, all else on whole chunks.

States are [n, B, D] in memory, so that the operations of a token run over one flat vector, and u [B, D] is broadcast
over the outermost axis. The backward pass recomputes the states of a chunk from its checkpoint, forms all their
Jacobians at once, and computes g_k = e_k + J_{k+1} g_{k+1} in reverse.
"""

import torch
from torch import Tensor

from .._common import SequenceLayout, compute_dtype
from .._groups import flat
from .._pages import read_pages, write_pages
from .arguments import BACKWARD, FORWARD, STEP, Inputs, Kept, Pages, Rule, Save, Start, Upstream, Wanted

# elements of the states of a chunk, which should stay in a CPU's cache
CHUNK_ELEMENTS = 2**18


def chunk_length(lanes: int) -> int:
    """Number of tokens that are processed together. Forward keeps the states before each chunk for backward."""
    return max(16, min(64, CHUNK_ELEMENTS // max(1, lanes)))


class Lanes:
    """One call's inputs in the layout of the loop: per-token [T, 1, B, D], parameters [n, B, D]."""

    def __init__(self, inputs: Inputs, feedback: str):
        u, lam, w, C, w_filter, gate = inputs
        self.dtype = compute_dtype(u.dtype)
        self.feedback = feedback
        self.batch, self.tokens, self.features = u.shape
        self.states = lam.shape[1]
        self.u = self.rows(u)
        self.gate = None if gate is None else self.rows(gate if gate.dim() == 3 else gate[..., None])
        self.lam, self.w, self.C = (self.parameter(p) for p in (lam, w, C))
        self.filter = None if w_filter is None else self.parameter(w_filter)

    def rows(self, t: Tensor) -> Tensor:
        """[B, T, D] -> [T, 1, B, D], dense: inner axes of D elements would keep torch from vectorising."""
        return t.transpose(0, 1).to(self.dtype).contiguous().unsqueeze(1)

    def parameter(self, p: Tensor) -> Tensor:
        """[D, n] -> [n, B, D], dense: a broadcast inner axis would keep torch from vectorising."""
        return p.to(self.dtype).t()[:, None].expand(self.states, self.batch, self.features).contiguous()

    def state(self, x: Tensor) -> Tensor:
        """[B, D, n] -> [n, B, D]."""
        return x.to(self.dtype).permute(2, 0, 1).contiguous()

    def open_gate(self, rows: slice) -> Tensor | None:
        """The gate of these tokens where no state takes part in it, [rows, n, B, D]."""
        u = self.u[rows].expand(-1, self.states, -1, -1)
        if self.feedback == "input":
            return torch.sigmoid_(self.w * u)
        return torch.ones_like(u, memory_format=torch.contiguous_format) if self.feedback == "token" else None

    def local(self, rows: slice, before: Tensor, phi: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """phi, the gate without its factor, and v = lam x + u, given the states [rows, n, B, D] before the tokens.

        The buffers `phi` and `v` may hold what is returned, as those of the two methods below.
        """
        fixed = self.open_gate(rows)
        if fixed is None:
            fixed = torch.mul(self.w, before, out=phi)
            fixed = fixed.sigmoid_() if self.feedback == "sigmoid" else fixed
        return fixed, torch.addcmul(self.u[rows], self.lam, before, out=v)

    def slope(self, phi: Tensor, out: Tensor) -> Tensor | None:
        """The derivative of phi by its argument; None for 1."""
        return None if self.feedback == "linear" else torch.addcmul(phi, phi, phi, value=-1, out=out)

    def jacobian(self, rows: slice, phi: Tensor, v: Tensor, J: Tensor, spare: Tensor) -> Tensor:
        """J_k = 1 + lam s_k + w s_k' v_k."""
        J = torch.mul(self.lam, phi, out=J)
        if self.feedback in ("sigmoid", "linear"):
            slope = self.slope(phi, spare)
            J += torch.mul(self.w, v, out=spare) if slope is None else slope.mul_(self.w).mul_(v)
        if self.gate is not None:
            J *= self.gate[rows]
        return J.add_(1)

    def advance(self, rows: slice, x: Tensor, out: Tensor) -> Tensor:
        """Write the states after these tokens to `out` [rows, n, B, D]; return the last one."""
        u = self.u[rows].expand(-1, self.states, -1, -1).contiguous()
        fixed = self.open_gate(rows)
        if fixed is not None and self.gate is not None:
            fixed *= self.gate[rows]
        gates = [None] * len(u) if self.gate is None else self.gate[rows].unbind()
        s, v = torch.empty_like(x), torch.empty_like(x)
        for k, (u_k, x_k) in enumerate(zip(u.unbind(), out.unbind(), strict=True)):
            if fixed is not None:
                s = fixed[k]
            else:
                torch.mul(self.w, x, out=s)
                if self.feedback == "sigmoid":
                    s.sigmoid_()
                if gates[k] is not None:
                    s.mul_(gates[k])
            torch.addcmul(u_k, self.lam, x, out=v)
            torch.addcmul(x, s, v, out=x_k)
            x = x_k
        return x

    def output(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """C x [rows, B, D] of the states [rows, n, B, D], and the filter's gain or None."""
        y = (x * self.C).sum(1)
        return y, None if self.filter is None else (x * self.filter).sum(1).sigmoid_()


def _unpack(cu_seqlens: Tensor, gate: Tensor | None, *rows: Tensor) -> tuple[SequenceLayout, Tensor, list[Tensor]]:
    """Packed [1, T, ...] as a batch of padded rows whose gate is 0 beyond their end."""
    layout = SequenceLayout(1, rows[0].shape[1], 1, cu_seqlens)
    gate = rows[0].new_ones(rows[0].shape[:2]) if gate is None else gate
    return layout, layout.split(gate).squeeze(2), [layout.split(t).squeeze(2) for t in rows]


@flat(*FORWARD)
def coffee_fwd_torch(inputs: Inputs, start: Start, rule: Rule, save: Save) -> tuple[Tensor, ...]:
    """Returns y [B, T, D], the final states [N, D, n] and the checkpoints backward needs (empty unless `save`)."""
    layout, (u, *_), (save,) = None, inputs, save
    if rule.cu_seqlens is not None:
        layout, gate, (u,) = _unpack(rule.cu_seqlens, inputs.gate, u)
        inputs = inputs._replace(u=u, gate=gate)
    lanes = Lanes(inputs, rule.feedback)
    x = lanes.state(start.initial_state)
    step = chunk_length(x.numel())
    y = u.new_empty(lanes.tokens, lanes.batch, lanes.features)
    buffer = x.new_empty(min(step, lanes.tokens), *x.shape)
    kept = []
    for first in range(0, lanes.tokens, step):
        rows = slice(first, min(first + step, lanes.tokens))
        out = buffer[: rows.stop - first]
        if save:
            kept.append(x.clone())
        x = lanes.advance(rows, x, out)
        value, gain = lanes.output(out)
        y[rows] = value if gain is None else value.mul_(gain)
    y = y.transpose(0, 1)
    y = y.contiguous() if layout is None else layout.merge(y.unsqueeze(2))
    checkpoints = torch.stack(kept) if save else x.new_empty(0, *x.shape)
    return y, x.permute(1, 2, 0).clone(memory_format=torch.contiguous_format), checkpoints


@flat(*BACKWARD)
def coffee_bwd_torch(
    upstream: Upstream, inputs: Inputs, start: Start, kept: Kept, rule: Rule, wanted: Wanted
) -> tuple[Tensor, ...]:
    """Returns du, dlam, dw, dC, dw_filter, dgate [B, T, D] (nothing without `gate_grad`) and the initial states'."""
    layout, (dy, dfinal), (gate_grad,), feedback = None, upstream, wanted, rule.feedback
    if rule.cu_seqlens is not None:
        layout, gate, (u, dy) = _unpack(rule.cu_seqlens, inputs.gate, inputs.u, dy)
        inputs = inputs._replace(u=u, gate=gate)
    lanes = Lanes(inputs, feedback)
    dy = lanes.rows(dy)
    carry = lanes.state(dfinal)
    step = chunk_length(carry.numel())
    du, dgate = (torch.empty(lanes.tokens, lanes.batch, lanes.features).to(carry) for _ in range(2))
    dlam, dw, dC, dfilter = (carry.new_zeros(lanes.states, lanes.features) for _ in range(4))
    # reused by all chunks: memory that is new to the process costs more than the arithmetic
    buffers = carry.new_empty(7, min(step, lanes.tokens), *carry.shape)
    for start in reversed(range(0, lanes.tokens, step)):
        rows = slice(start, min(start + step, lanes.tokens))
        before, phi, v, J, G, spare, after = buffers[:, : rows.stop - start].unbind()
        first = kept.checkpoints[start // step]
        lanes.advance(rows, first, after)
        torch.cat([first[None], after[:-1]], out=before)
        phi, v = lanes.local(rows, before, phi, v)
        J = lanes.jacobian(rows, phi, v, J, spare)
        dy_k = dy[rows]
        if lanes.filter is None:
            torch.mul(dy_k, lanes.C, out=G)
        else:
            value, gain = (t.unsqueeze(1) for t in lanes.output(after))
            through = dy_k * value * gain * (1 - gain)
            dy_k = dy_k * gain
            torch.addcmul(torch.mul(dy_k, lanes.C, out=G), through, lanes.filter, out=G)
            dfilter += torch.mul(through, after, out=spare).sum((0, 2))
        dC += torch.mul(dy_k, after, out=spare).sum((0, 2))
        g, slopes = G.unbind(), J.unbind()
        g[-1].add_(carry)
        for k in range(len(g) - 2, -1, -1):
            g[k].addcmul_(slopes[k + 1], g[k + 1])
        carry = slopes[0] * g[0]
        if gate_grad:
            dgate[rows] = torch.mul(G, phi, out=spare).mul_(v).sum(1)
        # the Jacobians are no longer needed
        slope = lanes.slope(phi, J)
        if lanes.gate is not None:
            G *= lanes.gate[rows]
        written = torch.mul(G, phi, out=spare)
        du[rows] = written.sum(1)
        dlam += written.mul_(before).sum((0, 2))
        if feedback != "token":
            # what reaches the argument of the gate
            inner = G.mul_(v) if slope is None else G.mul_(v).mul_(slope)
            dw += torch.mul(inner, lanes.u[rows] if feedback == "input" else before, out=spare).sum((0, 2))
            if feedback == "input":
                du[rows] += inner.mul_(lanes.w).sum(1)
    du, dgate = du.transpose(0, 1), dgate.transpose(0, 1)
    if layout is not None:
        du, dgate = layout.merge(du.unsqueeze(2)), layout.merge(dgate.unsqueeze(2))
    parameters = (t.t().contiguous() for t in (dlam, dw, dC, dfilter))
    return du, *parameters, dgate, carry.permute(1, 2, 0).contiguous()


@flat(*STEP)
def coffee_step_torch(inputs: Inputs, pages: Pages) -> Tensor:
    """One token [B, 1, D]; advances the state [B, D, n], or its pages in `pool`, in place."""
    (u, lam, w, C, w_filter, gate), (pool, state_indices, feedback) = inputs, pages
    (state,) = read_pages(state_indices, pool)
    # one token has no loop to lay out memory for: that would take longer than the token
    dtype = compute_dtype(u.dtype)
    x, token = state.to(dtype), u.to(dtype).mT
    lam, w, C = (p.to(dtype) for p in (lam, w, C))
    if feedback == "token":
        s = torch.ones_like(x)
    else:
        s = w * (token if feedback == "input" else x)
        s = s if feedback == "linear" else s.sigmoid_()
    if gate is not None:
        s = s * gate.reshape(len(u), -1, 1).to(dtype)
    x = torch.addcmul(x, s, torch.addcmul(token, lam, x))
    state.copy_(x)
    write_pages(state_indices, (pool,), (state,))
    y = (x * C).sum(-1)
    if w_filter is not None:
        y *= (x * w_filter.to(dtype)).sum(-1).sigmoid_()
    return y.to(u.dtype)[:, None]
