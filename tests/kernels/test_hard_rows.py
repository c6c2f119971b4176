"""The rowwise functions, and the convolutions with heads, with inputs near zero, all zero, equal and large."""

import pytest
import torch
from draw import DEVICE, randn
from hard_inputs import failures, rounded
from ops_table import TOLERANCE
from paths import PATHS, parametrize

from hf_memmix_kernels import naive_short_conv
from hf_memmix_kernels.rowwise import (
    decay,
    gated_norm,
    gated_product,
    naive_decay,
    naive_gated_norm,
    naive_gated_product,
    naive_unit_heads,
    unit_heads,
)
from hf_memmix_kernels.short_conv import Convolution, unit_heads_after_convolutions

EPS, SIZE = 1e-6, (1, 6, 2, 32)
SCALES = [1e-3, 1e-6, 1e-12, 30.0, 1e4]  # the square of 1e-12 still is a number in float32
FUNCTIONS = {
    "unit_heads": (unit_heads, naive_unit_heads, ("x",), {"cos": None, "sin": None, "eps": EPS}),
    "gated_norm": (gated_norm, naive_gated_norm, ("y", "gate", "weight"), {"eps": EPS}),
    "gate first": (gated_norm, naive_gated_norm, ("y", "gate", "weight"), {"eps": EPS, "norm_first": False}),
    "gelu": (gated_norm, naive_gated_norm, ("y", "gate", "weight"), {"eps": EPS, "activation": "gelu"}),
    "gated_product": (gated_product, naive_gated_product, ("gate", "up"), {}),
    "decay": (decay, naive_decay, ("x", "bias", "A_log"), {}),
}


def draw(name: str, names: tuple[str, ...], dtype: torch.dtype) -> dict:
    size = SIZE[:3] if name == "decay" else SIZE
    last = {"weight": SIZE[-1:], "bias": size[-1:], "A_log": size[-1:]}
    return {n: randn(*last.get(n, size), dtype=dtype) for n in names}


def results(fn, inputs: dict, options: dict, weights: list) -> dict:
    """Outputs, and the gradients of a linear function of them."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    out = fn(**leaves, **options)
    out = out if isinstance(out, tuple) else (out,)
    if not weights:
        weights.extend([torch.randn_like(t, dtype=torch.float64) for t in out])
    loss = sum((t.double() * w).sum() for t, w in zip(out, weights, strict=True))
    grads = torch.autograd.grad(loss, list(leaves.values()))
    named = {str(i): t.detach() for i, t in enumerate(out)}
    return named | {f"d {n}": g for n, g in zip(leaves, grads, strict=True)}


def scale_rows() -> list[tuple]:
    """The interpreter rounds bfloat16 otherwise."""
    dtypes = {path: [torch.float32, torch.bfloat16] for path in PATHS}
    if DEVICE == "cpu":
        dtypes["triton"] = [torch.float32]
    rows = [(name, scale, path) for path in PATHS for scale in SCALES for name in FUNCTIONS]
    return [(name, scale, dtype, path, path != "triton") for name, scale, path in rows for dtype in dtypes[path]]


@parametrize(("name", "scale", "dtype", "backend"), scale_rows())
def test_scales(name, scale, dtype, backend):
    """Every token at a scale; one path and dtype per call, and each input in turn."""
    fn, naive, names, options = FUNCTIONS[name]
    for scaled in names:
        inputs = draw(name, names, dtype)
        inputs[scaled] = inputs[scaled] * scale if scaled != "A_log" else inputs[scaled].clamp(-1, 1) * min(scale, 4)
        exact, weights = {n: t.double() for n, t in inputs.items()}, []
        want = results(naive, exact, options, weights)
        moved = results(naive, rounded(exact), options, weights)
        got = results(fn, inputs, options, weights)
        bad = failures(got, want, moved, lambda n: TOLERANCE[dtype] * (2 if n.startswith("d ") else 1))
        assert not bad, (scaled, bad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_zero(name, backend):
    """All results and gradients are finite, and where the reference has a gradient they equal it."""
    fn, naive, names, options = FUNCTIONS[name]
    for zero in names:
        inputs, weights = draw(name, names, torch.float32), []
        inputs[zero] = inputs[zero] * 0
        want, got = results(naive, inputs, options, weights), results(fn, inputs, options, weights)
        assert all(t.isfinite().all() for t in got.values()), zero
        known = {n: t.double() for n, t in want.items() if t.isfinite().all()}
        bad = failures(got, known, known, lambda _: 2 * TOLERANCE[torch.float32])
        assert not bad, (zero, bad)


@pytest.mark.product_rows(r"triton")  # per op, the torch and native paths at two chunks stay
@torch.no_grad()
@pytest.mark.parametrize("scale", [0.0, *SCALES])
@pytest.mark.parametrize("path", ["native", "triton"])
def test_heads_after_convolutions(path, scale, monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    dims = (16, 16, 0)
    draws = [[randn(*size, dtype=torch.float32) for size in ((1, 1, 32), (32, 4), (1, 32, 3))] for _ in dims]
    parts = [(scale * x, weight, scale * state) for x, weight, state in draws]

    def reference(change):
        found = {}
        for i, ((x, weight, state), dim) in enumerate(zip(parts, dims, strict=True)):
            exact = change({"x": x.double(), "weight": weight.double(), "state": state.double()})
            y, _ = naive_short_conv(exact["x"], exact["weight"], initial_state=exact["state"])
            found[i] = naive_unit_heads(y.unflatten(-1, (-1, dim)), None, None, EPS).flatten(2) if dim else y
        return found

    want, moved = reference(lambda x: x), reference(rounded)
    got = unit_heads_after_convolutions(
        [Convolution(x, weight, state.clone(), dim) for (x, weight, state), dim in zip(parts, dims, strict=True)],
        None, None, EPS, True, None,
    )  # fmt: skip
    got = {i: y.view(want[i].shape) for i, y in enumerate(got)}
    bad = failures(got, want, moved, lambda _: 2 * TOLERANCE[torch.float32])
    assert not bad, bad
