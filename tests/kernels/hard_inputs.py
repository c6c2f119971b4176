"""HARD, inputs that random draws of norm 1 never look like: the start of a training, padding, tokens that repeat,
gates that are saturated. Each row changes the inputs of every op of ops_table.py that has such inputs.

`failures` compares with float64, relative to the largest entry. Where float64 itself is sensitive to a small change of
the inputs, its sensitivity takes the place of the largest entry.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

VALUES, GATES = ("v", "u", "x"), ("alpha", "beta", "gamma", "gate")
# relative change of the inputs by which the sensitivity of float64 is measured: the rounding of float32
CHANGE = 1e-7
CHUNK = 64  # tokens over which kernels sum log decays


def _scaled(factor: float, *names: str) -> Callable:
    return lambda inputs: {n: t * factor if n in names else t for n, t in inputs.items()}


def _filled(value: float, *names: str) -> Callable:
    return lambda inputs: {n: torch.full_like(t, value) if n in names else t for n, t in inputs.items()}


def _first_token(*names: str) -> Callable:
    return lambda inputs: {n: t[:, :1].expand_as(t).contiguous() if n in names else t for n, t in inputs.items()}


def _common_keys(inputs: dict) -> dict:
    if "k" not in inputs:
        return inputs
    k = inputs["k"].double()
    common = F.one_hot(torch.tensor(min(5, k.shape[-1] - 1), device=k.device), k.shape[-1]) / 2
    k = F.normalize(k + common, dim=-1) * k.norm(dim=-1, keepdim=True)
    return _scaled(1e-3, *VALUES)({**inputs, "k": k.to(inputs["k"])})


def _empty_start(inputs: dict) -> dict:
    found = dict(inputs)
    for name in found.keys() & {"q", "k", *VALUES}:
        found[name] = found[name].clone()
        found[name][:, : found[name].shape[1] // 2] = 0
    return found


def _large_keys(inputs: dict) -> dict:
    """Lattice's steps gamma |k|^2 would be so large that its gradients are not finite in float32: only q is large."""
    return _scaled(30, "q", *(() if "gamma" in inputs else "k"))(inputs)


def _mixed_decay(inputs: dict) -> dict:
    if "log_decay" not in inputs:
        return inputs
    g = inputs["log_decay"]
    return {**inputs, "log_decay": torch.where(torch.rand_like(g) < 0.1, -20.0, -1e-6).to(g)}


HARD = {
    "small values": _scaled(1e-3, *VALUES),
    "tiny values": _scaled(1e-12, *VALUES),
    "no values": _scaled(0, *VALUES),
    "small values, common keys": _common_keys,
    "equal keys": _first_token("k"),
    "tiny keys": _scaled(1e-6, "k"),
    "no keys": _scaled(0, "k"),
    "no queries": _scaled(0, "q"),
    "equal tokens": _first_token("q", "k", *VALUES, *GATES, "log_decay"),
    "empty start": _empty_start,
    "slow decay": _filled(-1e-6, "log_decay"),
    "fast decay": _filled(-20, "log_decay"),
    "mixed decay": _mixed_decay,
    "closed gates": _filled(1e-6, *GATES),
    "open gates": _filled(1 - 1e-6, *GATES),
    "large values": _scaled(30, *VALUES),
    "large keys": _large_keys,
}


def rounded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float64 inputs, or states, with random relative changes of `CHANGE`; tensors of whole numbers stay.

    Chunk forms compute the decay between two tokens from the sums of log decays since the start of a chunk, so these
    sums are changed.
    """
    noise = {n: torch.randn_like(t) if (t != t.round()).any() else 0 for n, t in inputs.items()}
    found = {n: t * (1 + CHANGE * noise[n]) for n, t in inputs.items() if n != "log_decay"}
    if "log_decay" in inputs:
        parts = []
        for g in inputs["log_decay"].split(CHUNK, 1):
            change = CHANGE * g.cumsum(1) * torch.randn_like(g)
            parts.append(g + torch.cat([change[:, :1], change.diff(dim=1)], 1))
        found["log_decay"] = torch.cat(parts, 1)
    return {name: found[name] for name in inputs}


def failures(got: dict, want: dict, moved: dict, tolerance: Callable[[str], float], scale: dict | None = None) -> dict:
    """What is wrong, by the name of the result.

    An error is allowed up to tolerance(name) times the largest of: the entries of `want`, their change in `moved` (the
    results of `rounded` inputs) divided by `CHANGE`, and scale[name].
    """
    bad = {}
    for name, expected in want.items():
        assert got[name].shape == expected.shape and expected.isfinite().all(), name
        if not expected.numel():
            continue
        largest = expected.double().abs().max().item()
        condition = (moved[name] - expected).abs().max().item() / CHANGE
        limit = tolerance(name) * max(largest, condition, (scale or {}).get(name, 0))
        difference = (got[name].double() - expected).abs().max().item()
        if not difference <= limit:  # NaN is no number below the limit
            bad[name] = f"{difference:.1e} > {limit:.1e}, entries up to {largest:.1e}, condition {condition:.1e}"
    return bad
