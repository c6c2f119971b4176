"""DEER for COFFEE in torch: Newton's method on the whole trajectory, with one linear scan over time per iteration.

With r = f(x) - x and J = df/dx at the current trajectory, Newton's update d solves d_k = J_k d_{k-1} + r_k, d_0 = 0.
This is a linear recurrence, and an associative scan because J is diagonal (Lim et al., "Parallelizing non-linear
sequential models over the sequence length"; Gonzalez et al., "Towards scalable and stable parallelization of nonlinear
RNNs"). With damping mu the update minimises sum (d_k - J_k d_{k-1} - r_k)^2 + mu sum d_k^2 instead (ELK, a trust
region).
"""

import torch
from torch import Tensor

from .torch_path import Lanes


def linear_scan(a: Tensor, b: Tensor) -> Tensor:
    """h_k = a_k h_{k-1} + b_k from h_{-1} = 0 along the first axis, in about 2 log2(T) parallel steps."""
    if len(a) == 1:
        return b
    even = len(a) // 2 * 2
    # pairs become single steps, then every first half of a pair follows from the pair before it
    odd = linear_scan(a[1::2] * a[: even - 1 : 2], torch.addcmul(b[1::2], a[1::2], b[: even - 1 : 2]))
    h = torch.empty_like(b)
    h[1::2] = odd
    h[0] = b[0]
    if len(a) > 2:
        h[2::2] = torch.addcmul(b[2::2], a[2::2], odd[: (len(a) - 1) // 2])
    return h


def tridiagonal_solve(diagonal: Tensor, below: Tensor, right: Tensor) -> Tensor:
    """Symmetric positive definite systems along the first axis by cyclic reduction.

    Args:
        diagonal: [T, ...].
        below: [T, ...], row k's coefficient of unknown k - 1; below[0] is 0.
        right: [T, ...].
    """
    T = len(diagonal)
    if T == 1:
        return right / diagonal
    # eliminate the even unknowns: odd row k loses (below_k / diagonal_{k-1}) of row k-1 and the like of row k+1
    zero = torch.zeros_like(diagonal[:1])
    odd = T // 2
    left_factor = below[1::2] / diagonal[: 2 * odd : 2]
    above = torch.cat([below[2::2], zero])[:odd]
    next_diagonal = torch.cat([diagonal[2::2], zero + 1])[:odd]
    right_factor = above / next_diagonal
    reduced = diagonal[1::2] - left_factor * below[1::2] - right_factor * above
    reduced_right = (
        right[1::2] - left_factor * right[: 2 * odd : 2] - right_factor * torch.cat([right[2::2], zero])[:odd]
    )
    coupling = -left_factor * below[: 2 * odd : 2]
    solved = tridiagonal_solve(reduced, coupling, reduced_right)
    x = torch.empty_like(right)
    x[1::2] = solved
    evens = (T + 1) // 2
    left = torch.cat([zero, solved])[:evens]
    after = torch.cat([solved, zero])[:evens]
    above_even = torch.cat([below[1::2], zero])[:evens]
    x[::2] = (right[::2] - below[::2] * left - above_even * after) / diagonal[::2]
    return x


def _damped(J: Tensor, r: Tensor, damping: float) -> Tensor:
    """The update with a trust region: (I - L)^T (I - L) d + mu d = (I - L)^T r with L the sub-diagonal J."""
    following = torch.cat([J[1:], torch.zeros_like(J[:1])])
    below = -J
    below[0] = 0
    next_r = torch.cat([r[1:], torch.zeros_like(r[:1])])
    return tridiagonal_solve(1 + damping + following.square(), below, r - following * next_r)


def newton(
    lanes: Lanes, start: Tensor, tolerance: float, max_iterations: int, damping: float
) -> tuple[Tensor | None, int]:
    """The states [T, n, B, D] after every token, or None where they did not converge; and the iterations run.

    Converged means that the last update was at most `tolerance` of 1 + |x| everywhere. Newton's method converges
    quadratically, so the remaining error is much smaller.
    """
    rows = slice(0, lanes.tokens)
    x = start.expand(lanes.tokens, *start.shape).clone()
    for iteration in range(1, max_iterations + 1):
        before = torch.cat([start[None], x[:-1]])
        phi, v = lanes.local(rows, before)
        J = lanes.jacobian(rows, phi, v)
        s = phi if lanes.gate is None else phi * lanes.gate
        r = torch.addcmul(before, s, v) - x
        update = _damped(J, r, damping) if damping else linear_scan(J, r)
        x += update
        worst = (update.abs() / (1 + x.abs())).max().item()
        if not worst < float("inf"):
            return None, iteration
        if worst <= tolerance:
            return x, iteration
    return None, max_iterations


def deer_fwd_torch(
    u: Tensor,
    lam: Tensor,
    w: Tensor,
    C: Tensor,
    w_filter: Tensor | None,
    gate: Tensor | None,
    initial_state: Tensor,
    feedback: str,
    tolerance: float,
    max_iterations: int,
    damping: float,
) -> tuple[Tensor, Tensor | None, int]:
    """y [B, T, D], the states after every token [T, n, B, D] (None without convergence) and the iterations."""
    lanes = Lanes(u, lam, w, C, w_filter, gate, feedback)
    x, iterations = newton(lanes, lanes.state(initial_state), tolerance, max_iterations, damping)
    if x is None:
        return u, None, iterations
    value, gain = lanes.output(x)
    y = value if gain is None else value * gain
    return y.transpose(0, 1).to(u.dtype).contiguous(), x, iterations
