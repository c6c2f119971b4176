"""How near do iterative solvers come to the exact ridge regression, and their gradients to its gradients?

    python training/experiments/gka/solvers.py --out gka_solvers.json --plot

The rows are the panels of Figure 1 of the paper, on a CPU. "forward" (its panel a) solves random problems with
gradient descent (GD), with Nesterov's momentum (AGD), with conjugate gradients (CG) and by the Chebyshev iteration
(CH). "layer" (b, d) compares the gradients of q and k of one layer with the exact solver's, and "network" (c, e)
those of all weights of a Llama whose attention is the ridge regression. "implicit" gradients come from one more solve
(Lemma 2 of the paper), "autograd" ones from differentiating the iterations. "ridge" is Figure 8: CH at the ridges of
Appendix G, lambda = a |H|, and at the constant lambda of Appendix F.1.

Solvers run in float32, and in bfloat16 in the rows "rounded". The reference of all gradients is torch.linalg.solve in
float64.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.harness import execute
from hf_memmix.training.experiments.common.options import PlottedOptions, draw_if_asked
from hf_memmix.training.experiments.gka.solvers_report import plot

RIDGE = 0.02
RIDGES = (0.01, 0.02, 0.05, 0.1)  # Appendix G
CONSTANT = 0.25  # Appendix F.1
WAYS = ("implicit", "autograd")
TINY = 1e-30  # conjugate gradients divide by a residual that may be zero


def gradient_descent(A: Tensor, b: Tensor, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Iterates of A x = b from 0, with the best constant step.

    A [..., D, D]; b [..., D]; low, high [..., 1]: bounds of the eigenvalues of A. So are the arguments of all solvers.
    """
    x = torch.zeros_like(b)
    while True:
        x = x + 2 / (low + high) * (b - product(A, x))
        yield x


def nesterov(A: Tensor, b: Tensor, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Gradient descent with Nesterov's momentum for strongly convex problems."""
    root = (high / low).sqrt()
    x = ahead = torch.zeros_like(b)
    while True:
        last, x = x, ahead + (b - product(A, ahead)) / high
        ahead = x + (root - 1) / (root + 1) * (x - last)
        yield x


def conjugate_gradients(A: Tensor, b: Tensor, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Hestenes and Stiefel; the bounds are not needed."""
    x, r = torch.zeros_like(b), b
    p, size = r, (r * r).sum(-1, keepdim=True)
    while True:
        image = product(A, p)
        step = size / (p * image).sum(-1, keepdim=True).clamp_min(TINY)
        x, r = x + step * p, r - step * image
        last, size = size, (r * r).sum(-1, keepdim=True)
        p = r + size / last.clamp_min(TINY) * p
        yield x


def chebyshev(A: Tensor, b: Tensor, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Algorithm 1 of the paper, with omega_0 = 2."""
    rho, step = (high - low) / (high + low), 2 / (high + low)
    before, x, omega = torch.zeros_like(b), step * b, 2.0
    while True:
        yield x
        omega = 4 / (4 - rho * rho * omega)
        x, before = x - omega * step * (product(A, x) - b) + (omega - 1) * (x - before), x


SOLVERS = {"GD": gradient_descent, "AGD": nesterov, "CG": conjugate_gradients, "CH": chebyshev}
COMPARED = ("CG", "CH")  # in the panels of gradients


def product(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x[..., None])[..., 0]


def after(solver: str, iterations: int, *problem: Tensor) -> Tensor:
    """The iterate of a solver after so many iterations."""
    iterates = SOLVERS[solver](*problem)
    for _ in range(iterations - 1):
        next(iterates)
    return next(iterates)


class Implicit(torch.autograd.Function):
    """x of a solver; its gradient is another solve of the same solver, dq = A^-1 dx, dA = -dq x^T (Table 1)."""

    @staticmethod
    def forward(ctx, A, q, low, high, solver, iterations):
        x = after(solver, iterations, A, q, low, high)
        ctx.save_for_backward(A, low, high, x)
        ctx.solver, ctx.iterations = solver, iterations
        return x

    @staticmethod
    def backward(ctx, dx):
        A, low, high, x = ctx.saved_tensors
        dq = after(ctx.solver, ctx.iterations, A, dx, low, high)
        return -dq[..., :, None] * x[..., None, :], dq, None, None, None, None


def problems(k: Tensor, ridge: float, constant: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """A_t = H_t + lambda_t I [B, T, H, D, D] of all tokens, and bounds of its eigenvalues [B, T, H, 1].

    lambda_t = ridge |H_t|, or the ridge itself if `constant`.
    """
    H = torch.einsum("bthi,bthj->bthij", k, k).cumsum(1)
    size = torch.linalg.matrix_norm(H)[..., None]
    lam = torch.full_like(size, ridge) if constant else ridge * size
    A = H + lam[..., None] * torch.eye(k.shape[-1], dtype=k.dtype)
    return A, lam.detach(), (size + lam).detach()


def solution(A: Tensor, q: Tensor, low: Tensor, high: Tensor, solver: str, way: str, iterations: int) -> Tensor:
    """x of A x = q; `solver` "exact" is torch.linalg.solve."""
    if solver == "exact":
        return torch.linalg.solve(A, q)
    if way == "implicit":
        return Implicit.apply(A, q, low, high, solver, iterations)
    return after(solver, iterations, A, q, low, high)


def ridge_regression(q: Tensor, k: Tensor, v: Tensor, *how) -> Tensor:
    """y_t = sum_{i <= t} v_i (k_i . x_t) [B, T, H, D] with A_t x_t = q_t; `how`: the last arguments of `solution`."""
    x = solution(*_arguments(q, k), *how)
    scores = torch.einsum("bthd,bshd->bhts", x, k).tril()
    return torch.einsum("bhts,bshd->bthd", scores, v)


def _arguments(q, k):
    A, low, high = problems(k, RIDGE)
    return A, q, low, high


class RidgeAttention(nn.Module):
    """The ridge regression in the place of a Llama's attention, with its projections; q and k have unit norm."""

    def __init__(self, attention, how: list):
        super().__init__()
        self.attention, self.how = attention, how

    def forward(self, hidden_states, **kwargs):
        own = self.attention
        q, k, v = (f(hidden_states).unflatten(-1, (-1, own.head_dim)) for f in (own.q_proj, own.k_proj, own.v_proj))
        y = ridge_regression(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, *self.how)
        return own.o_proj(y.flatten(2)), None


def random_unit(generator: torch.Generator, *size: int) -> Tensor:
    return F.normalize(torch.randn(*size, generator=generator, dtype=torch.float64), dim=-1)


def relative_difference(got: list[Tensor], want: list[Tensor]) -> float:
    """|got - want| / |want| of all tensors together; infinite if a number is not finite."""
    difference = sum((g.double() - w).square().sum() for g, w in zip(got, want, strict=True))
    return (difference / sum(w.square().sum() for w in want)).sqrt().nan_to_num(float("inf")).item()


def layer_gradients(args, dtype: torch.dtype, *how) -> list[Tensor]:
    """Gradients of q and k of one layer, for a random gradient of its output."""
    generator = torch.Generator().manual_seed(0)
    size = (1, args.length, args.heads, args.head_dim)
    q, k = (random_unit(generator, *size).to(dtype).requires_grad_() for _ in range(2))
    v, weight = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return list(torch.autograd.grad((ridge_regression(q, k, v, *how) * weight).sum(), [q, k]))


def network_gradients(args, dtype: torch.dtype, *how) -> list[Tensor]:
    """Gradients of all weights of a Llama of `args.layers` layers on random tokens."""
    torch.manual_seed(0)
    hidden = args.heads * args.head_dim
    config = LlamaConfig(
        vocab_size=5000, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads, head_dim=args.head_dim,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    for layer in model.model.layers:
        layer.self_attn = RidgeAttention(layer.self_attn, how)
    ids = torch.randint(5000, (1, args.length), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    return list(torch.autograd.grad(loss, list(model.parameters())))


GRADIENTS = {"layer": layer_gradients, "network": network_gradients}


def rows_to_run(done: list[dict], args) -> list[dict]:
    rows = [{"panel": "forward", "solver": solver} for solver in SOLVERS]
    rows += [{"panel": "rounded", "solver": solver} for solver in COMPARED]
    rows += [{"panel": "ridge", "ridge": ridge, "constant": False} for ridge in RIDGES]
    rows.append({"panel": "ridge", "ridge": CONSTANT, "constant": True})
    rows += [
        {"panel": panel, "solver": solver, "way": way} for panel in GRADIENTS for solver in COMPARED for way in WAYS
    ]
    return rows


@torch.no_grad()
def residuals(args, solver: str, ridge: float, constant: bool, dtype: torch.dtype) -> dict:
    """The largest |A x - q| over all problems after each iteration of a solver in `dtype`, the mean |H x - q| after
    the last one, and the largest condition number.
    """
    generator = torch.Generator().manual_seed(0)
    size = (1, args.problems, args.heads, args.head_dim)
    q, k = (random_unit(generator, *size).float() for _ in range(2))
    A, low, high = problems(k, ridge, constant)
    # the paper divides A by |H| here, which changes neither condition number nor residual
    iterates, found = SOLVERS[solver](*(t.to(dtype) for t in (A, q, low, high))), []
    for _ in range(max(args.iterations)):
        x = next(iterates).float()
        found.append((product(A, x) - q).norm(dim=-1).max().item())
    unregularised = (product(A, x) - low * x - q).norm(dim=-1)
    return {"residuals": found, "true_residual": unregularised.mean().item(), "condition": (high / low).max().item()}


def run(row: dict, args) -> dict:
    if row["panel"] not in GRADIENTS:
        dtype = torch.bfloat16 if row["panel"] == "rounded" else torch.float32
        return residuals(args, row.get("solver", "CH"), row.get("ridge", RIDGE), row.get("constant", False), dtype)
    gradients = GRADIENTS[row["panel"]]
    want = gradients(args, torch.float64, "exact", "", 0)
    got = [gradients(args, torch.float32, row["solver"], row["way"], count) for count in args.iterations]
    exact = gradients(args, torch.float32, "exact", "", 0)
    return {
        "differences": [relative_difference(found, want) for found in got],
        "exact_in_float32": relative_difference(exact, want),
    }


class Options(PlottedOptions):
    problems: Annotated[int, typer.Option(help="tokens of the forward panels: problems per head")] = 1024
    length: Annotated[int, typer.Option(help="tokens of the panels of gradients")] = 256
    heads: int = 2
    head_dim: int = 128
    layers: Annotated[int, typer.Option(help="layers of the network")] = 5
    iterations: Annotated[list[int], typer.Option(help="iterations to compare; repeatable")] = (
        *(1, 2, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40),
    )


@command(Options)
def main(args) -> None:
    """Measure every solver and write the results."""
    results = execute("gka_solvers", __file__, args, rows_to_run)
    draw_if_asked(args, plot, results)


if __name__ == "__main__":
    typer.run(main)
