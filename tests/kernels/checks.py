"""Comparisons of results with the float64 reference: first all values must be finite, then the RMS ratio is
bounded.
"""

import torch
from torch import Tensor

SILENCE = 1e-2


def error(got: Tensor, want: Tensor) -> float:
    """rms(got - want) / rms(want); infinite if a value is not finite or the shape is wrong.

    An rms(want) below `SILENCE` counts as `SILENCE`: the inputs are of order one, so a result that is zero in exact
    arithmetic is the rounding error of terms of order one.
    """
    if got.shape != want.shape or not torch.isfinite(got).all():
        return float("inf")
    if not want.numel():
        return 0.0
    difference, size = ((t.double().square().mean().sqrt()) for t in (got.double() - want.double(), want))
    return (difference / size.clamp_min(SILENCE)).item()


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance) -> None:
    """Every tensor of `got` is within `tolerance(name)` of the tensor of this name in `want`; one message lists all
    failures.
    """
    assert got.keys() == want.keys()
    errors = {name: error(got[name], want[name]) for name in want}
    bad = {name: f"{e:.1e} > {tolerance(name):.0e}" for name, e in errors.items() if not e <= tolerance(name)}
    assert not bad, bad


def outputs_and_gradients(
    op, fn, inputs: dict, state: tuple | None, cu_seqlens=None, weights: list | None = None
) -> dict:
    """Outputs "o", "state0", ... and gradients "d <input>" of a random linear function of all outputs.

    `weights` holds the coefficients of the function. An empty list is filled, so that a second path can use the same.
    """
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    if state is not None:
        state = tuple(s.detach().requires_grad_() for s in state)
    o, final = op.run(fn, leaves, state, cu_seqlens)
    results = [o, *final]
    if not weights:
        weights.extend(torch.randn_like(t, dtype=torch.float64) for t in results)
    loss = sum((t.double() * w).sum() for t, w in zip(results, weights, strict=True))
    # before the first token the state is zero, so the gradient of its decay is zero in exact arithmetic
    skipped = {"log_decay"} if state is None and inputs.get("q", o).shape[1] == 1 else set()
    sources = {f"d {name}": t for name, t in leaves.items() if name not in skipped}
    sources |= {} if state is None else {f"d state{i}": s for i, s in enumerate(state)}
    grads = list(torch.autograd.grad(loss, list(sources.values())))
    named = {"o": o} | {f"state{i}": s for i, s in enumerate(final)}
    if op.name.startswith("gka") and state is not None:
        # H is symmetric, so only the symmetric part of its gradient is compared
        grads = [(g + g.mT) / 2 if name == "d state0" else g for name, g in zip(sources, grads, strict=True)]
    if op.name.startswith("lattice") and state is not None and op.options.get("project", True):
        # slots are unit vectors, so only the part of the gradient that is orthogonal to them is compared
        slots = torch.nn.functional.normalize(state[0].double(), dim=-2)
        grads[-1] = (grads[-1] - slots * (slots * grads[-1]).sum(-2, keepdim=True)).to(grads[-1])
    return {name: t.detach() for name, t in named.items()} | dict(zip(sources, grads, strict=True))
