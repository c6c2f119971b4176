"""Lattice beyond the contract tests: every option, unit norms over 100k steps, and the values that are refused."""

import itertools

import pytest
import torch
from checks import assert_close, error, outputs_and_gradients
from draw import DEVICE, rand, randn
from lattice_rows import draw, draw_state
from ops_table import OPS, TOLERANCE, Shape

import hf_memmix_kernels as K
from hf_memmix_kernels.lattice import launch, launch_dual
from hf_memmix_kernels.lattice.naive import naive_write

LATTICE = next(op for op in OPS if op.name == "lattice")
SHAPE = Shape(1, 18, 1, 1, 24, 20)
RULES = [
    *itertools.product(("dec", "enc", "sim"), (True, False), (0.0, 0.05)),
    *itertools.product(("ttt", "delta"), (False,), (0.0, 0.05)),
]


def assert_agrees(inputs, options, state, tolerance, cu_seqlens=None):
    """`chunk_lattice` equals the float64 reference: outputs, state and every gradient."""
    weights = []
    want, got = (
        outputs_and_gradients(
            LATTICE, lambda fn=fn, **x: fn(**x, **options), inputs, state, cu_seqlens, weights=weights
        )
        for fn in (K.naive_lattice, K.chunk_lattice)
    )
    assert_close(got, want, lambda name: tolerance)


def compare(options, shape, dtype, tolerance, bounds=None):
    inputs = draw(shape, dtype)
    inputs["k"][:, 1] = 0  # TTT then has no direction
    inputs["log_decay"] = -0.05 * rand(*inputs["gamma"].shape, dtype=inputs["gamma"].dtype)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    state = draw_state(shape, shape.B if bounds is None else len(bounds) - 1, dtype)
    assert_agrees(inputs, options, state, tolerance, cu_seqlens)


def test_l1_is_a_proximal_step_that_makes_states_sparse():
    """Equation 18 minimises |S - S'|^2 / 2 + gamma lambda |S|_1, with S' the step without L1; so equation 17 falls."""
    S, k, v = (randn(*shape, dtype=torch.float64) for shape in ((6, 4), (4, 1), (6, 1)))
    gamma, lam = torch.tensor(1e-3, dtype=torch.float64, device=DEVICE), 2.0
    one = torch.ones((), device=DEVICE)
    plain, sparse = (naive_write(S, k, v, gamma, one, "dec", False, weight) for weight in (0.0, lam))

    def proximal(T):
        return (T - plain).square().sum() / 2 + gamma * lam * T.abs().sum()

    assert all(proximal(sparse) < proximal(sparse + 1e-4 * randn(6, 4, dtype=S.dtype)) for _ in range(200))

    def objective(T):  # equation 17
        return ((T / T.norm(dim=0)) @ k - v).square().sum() + lam * T.abs().sum()

    assert objective(sparse) < min(objective(S), objective(plain))
    q, k, v = (torch.nn.functional.normalize(randn(1, 40, 1, 8, dtype=S.dtype), dim=-1) for _ in range(3))
    gamma = 0.2 * torch.ones(1, 40, 1, dtype=S.dtype, device=DEVICE)
    zeros = [(K.naive_lattice(q, k, v, gamma, l1=weight)[1] == 0).sum().item() for weight in (0.0, 0.1, 0.3)]
    assert zeros[0] == 0 < zeros[1] < zeros[2]


@pytest.mark.product_rows(r"triton-.*-0\.0\]")  # variants of an op
@pytest.mark.parametrize(("variant", "project", "l1"), RULES)
def test_every_rule_in_float64(variant, project, l1, backend):
    """Packed sequences with a forget gate. Only float64 is compared, because soft thresholds have kinks."""
    if backend == "triton" and DEVICE == "cuda":
        pytest.skip("the choice by device keeps float64 off a GPU's Triton kernels")
    bounds = [0, 0, 17, 18] if backend == "torch" else None
    options = {"variant": variant, "project": project, "l1": l1}
    shape = SHAPE if backend == "torch" else SHAPE._replace(T=3)
    compare(options, shape, torch.float64, 1e-10, bounds)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "project", "l1"), [rule for rule in RULES if not rule[2]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rule_on_a_gpu(variant, project, l1, dtype):
    options = {"variant": variant, "project": project, "l1": l1}
    compare(options, Shape(2, 150, 2, 2, 64, 64), dtype, 2 * TOLERANCE[dtype], None)


@pytest.mark.product  # many tokens or iterations
@pytest.mark.parametrize("variant", ["enc", "sim"])
def test_a_slot_whose_old_value_is_erased(variant, backend):
    """In one token of the second window, keep = 1 + gamma c p = 0, so the kernels must not divide by it. Packed input.

    Only the first of two heads has such a token; the backward of the second head runs another kernel.
    """
    if backend == "triton" and DEVICE == "cuda":
        pytest.skip("the choice by device keeps float64 off a GPU's Triton kernels")
    options, shape = {"variant": variant}, Shape(1, 70, 1, 1, 4, 5)
    inputs, state = draw(shape, torch.float64), draw_state(shape, 3, torch.float64)
    inputs, state = {name: torch.cat([x, x], 2) for name, x in inputs.items()}, (torch.cat([state[0]] * 2, 1),)
    cu_seqlens = torch.tensor([0, 0, 3, 70], device=DEVICE)
    for t in (1, 69):
        rows = slice(3 if t == 69 else 0, t)
        sequence = 2 if t == 69 else 1
        before = {name: x[:, rows] for name, x in inputs.items()}
        _, slots = K.naive_lattice(**before, **options, initial_state=state[0][sequence, None])
        inputs["v"][0, t, 0], inputs["gamma"][0, t, 0] = slots[0, 0, :, 2], 1
        inputs["k"][0, t, 0, 2] = 2 if variant == "enc" else 1
    assert_agrees(inputs, options, state, 1e-10, cu_seqlens)


@pytest.mark.product  # many tokens or iterations
@pytest.mark.parametrize("a", [0.5, 0.01, -0.9])
@pytest.mark.parametrize("variant", ["dec", "enc", "sim"])
def test_a_slot_that_decays_all_along(variant, a, backend, monkeypatch):
    """v stays near a slot for most of a window, so s' = a s + b h has about the given a in every one of these tokens.

    The product of small a over a window is too small to divide by; other kernels compute such windows.
    """
    if backend == "triton" and DEVICE == "cuda":
        pytest.skip("the choice by device keeps float64 off a GPU's Triton kernels")
    options, shape = {"variant": variant}, Shape(1, 66, 1, 1, 4, 5)
    inputs, state = draw(shape, torch.float64), draw_state(shape, 1, torch.float64)
    near = torch.nn.functional.normalize(state[0][0, :, :, 0] + 0.02 * randn(60, 1, 5, dtype=torch.float64), dim=-1)
    inputs["gamma"][:, :60] = 0.75
    if variant == "dec":  # the token reads only this slot, so h is the slot minus v
        inputs["v"][0, :60] = near * (1 + (1 - a) / 0.75)
        inputs["k"][:, :60] = torch.eye(4, dtype=torch.float64)[0]
    else:
        inputs["v"][0, :60] = near
        inputs["k"][:, :60, :, 0] = (1 - a) / 0.75 + (1 if variant == "enc" else 0)
    refused = []
    if backend == "triton":
        module, name = (
            (launch, "lattice_slots_levels_kernel")
            if variant == "dec"
            else (launch_dual, "lattice_read_levels_kernel")
        )
        kernel = getattr(module, name)

        class Spy:
            def __getitem__(self, grid):
                def run(*args, **options):
                    refused.append(next(x for x in args if getattr(x, "dtype", None) == torch.int32))
                    return kernel[grid](*args, **options)

                return run

        monkeypatch.setattr(module, name, Spy())
    assert_agrees(inputs, options, state, 1e-10)
    # in "dec" the error and a grow when a slot has changed its sign
    assert backend != "triton" or refused[0].tolist() == [abs(a) < 0.6 or variant == "dec", False]


def test_forget_gate_is_a_larger_step():
    """P_C(mu s + Delta) = P_C(s + Delta / mu) holds in the op and in the reference."""
    inputs = draw(SHAPE, torch.float64)
    log_decay = -rand(*inputs["gamma"].shape, dtype=torch.float64)
    (o, state) = K.naive_lattice(**inputs, log_decay=log_decay)
    larger = {**inputs, "gamma": inputs["gamma"] * (-log_decay).exp()}
    for got, want in zip(K.naive_lattice(**larger), (o, state), strict=True):
        assert error(got, want) <= 1e-12


def test_total_decay_is_finite():
    inputs = {name: t.requires_grad_() for name, t in draw(SHAPE, torch.float32).items()}
    log_decay = torch.full_like(inputs["gamma"], -1e4)
    o, state = K.chunk_lattice(**inputs, log_decay=log_decay)
    grads = torch.autograd.grad(o.sum() + state.sum(), list(inputs.values()))
    assert all(torch.isfinite(t).all() for t in (o, state, *grads))


@pytest.mark.product  # many tokens or iterations
@pytest.mark.parametrize("variant", ["dec", "enc", "sim"])
def test_norms_stay_one_for_100k_steps(variant):
    """25 calls of 4000 steps in float32 with a carried state, two slots of size four."""
    shape = Shape(1, 4000, 1, 1, 2, 4)
    inputs = {name: t.to(DEVICE) for name, t in draw(shape, torch.float32).items()}
    state, worst = None, 0.0
    for _ in range(25):
        _, state = K.chunk_lattice(**inputs, variant=variant, initial_state=state)
        worst = max(worst, (torch.linalg.vector_norm(state.double(), dim=-2) - 1).abs().max().item())
    assert worst <= 1e-5


def test_values_that_are_checked():
    """Numbers that are not finite, by the name of their tensor; negative steps; states whose norms are not one."""
    inputs, (state,) = draw(SHAPE, torch.float32), draw_state(SHAPE, 1, torch.float32)
    K.check_lattice(**inputs, state=state)
    K.check_lattice(gamma=inputs["gamma"] * 0)
    wrong = [(name, (0, 3), float("nan"), f"{name} holds") for name in ("q", "k", "v", "gamma")]
    wrong += [("gamma", (0, 3), -0.5, "gamma=-0.5")]
    slot = (0, 0, slice(None), 3)
    norms = ((0.0, "norm 0"), (1.1, "norm 1.1"), (float("inf"), "not finite"))
    wrong += [("state", slot, factor * state[slot], message) for factor, message in norms]
    for name, place, value, message in wrong:
        bad = {**inputs, "state": state}[name].clone()
        bad[place] = value
        with pytest.raises(ValueError, match=message):
            K.check_lattice(**{name: bad})


def test_default_start_is_orthonormal():
    inputs = draw(SHAPE, torch.float64)
    eye = torch.eye(24, 20, dtype=torch.float64, device=DEVICE)[None, None]
    for a, b in zip(K.chunk_lattice(**inputs), K.naive_lattice(**inputs, initial_state=eye), strict=True):
        assert error(a, b) <= 1e-12


def test_step_refuses_a_state_it_cannot_write():
    inputs = {name: t[:, :1] for name, t in draw(SHAPE, torch.float32).items()}
    with pytest.raises(ValueError, match="contiguous"):
        K.lattice_step(**inputs, state=draw_state(SHAPE, 1, torch.float32)[0].mT.contiguous().mT)
