"""GKA beyond the common contract: gradients where the state forgets fast, as in a layer at its start.

There few keys fill the state. R v and E k, whose difference is the gradient of k, are then up to 50 times larger than
it, and so are the sums whose difference is the gradient of the log-decay.
"""

import pytest
import torch
import torch.nn.functional as F
from checks import assert_close, error, outputs_and_gradients
from draw import DEVICE, rand, randn
from ops_table import OPS, Shape

import hf_memmix_kernels as K
from hf_memmix_kernels.gka.schedule import gradient_phases

GKA = next(op for op in OPS if op.name == "gka")
SCHEDULE, EXACT = (12, 10), (20, 20, 20)  # a layer's default, and one that leaves a residual of 1e-7
MEAN_LOG_DECAY = -0.75
LIMITS = {"d k": 0.03, "d log_decay": 0.05}


def draw_fast(shape: Shape, dtype: torch.dtype, decays: str) -> dict[str, torch.Tensor]:
    """Inputs with a mean log-decay of -0.75: equal, uniform, or the softplus of a Gaussian variable."""
    inputs = GKA.draw(shape, dtype)
    size = inputs["log_decay"].shape
    drawn = {
        "equal": lambda: torch.ones(size, device=DEVICE),
        "uniform": lambda: rand(*size, dtype=torch.float32),
        "softplus": lambda: F.softplus(randn(*size, dtype=torch.float32)),
    }[decays]()
    log_decay = drawn * (MEAN_LOG_DECAY / drawn.mean())
    return {**inputs, "log_decay": log_decay.to(inputs["log_decay"].dtype)}


def gradients(inputs: dict, dtype: torch.dtype, schedule: tuple[int, ...], weight: torch.Tensor) -> dict:
    """o and the gradients of all inputs of <o, weight>."""
    gate_dtype = torch.promote_types(dtype, torch.float32)
    leaves = {
        name: t.detach().to(dtype if name in "qkv" else gate_dtype).requires_grad_() for name, t in inputs.items()
    }
    o, _ = K.chunk_gka(**leaves, refinement=schedule)
    grads = torch.autograd.grad((o.double() * weight).sum(), list(leaves.values()))
    return {"o": o.detach()} | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def test_the_gradient_runs_more_iterations_in_the_last_of_several_phases():
    assert gradient_phases((12, 10)) == (12, 16)
    assert gradient_phases([10, 10, 10]) == (10, 10, 16)
    assert gradient_phases((30,)) == (30,)


@pytest.mark.parametrize("decays", ["equal", "uniform", "softplus"])
def test_fast_decays_converge(decays, monkeypatch):
    """The schedule alone, in float32 on the torch path: what it leaves unsolved is within the limits."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    inputs = draw_fast(Shape(1, 150, 2, 1, 64, 64), torch.float32, decays)
    weight = torch.randn(1, 150, 2, 64, dtype=torch.float64, device=DEVICE)
    want = gradients(inputs, torch.float64, EXACT, weight)
    got = gradients(inputs, torch.float32, SCHEDULE, weight)
    for name, limit in LIMITS.items():
        assert error(got[name], want[name]) <= limit, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decays", ["equal", "uniform", "softplus"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_fast_decays_in_16_bits(D, decays, dtype, monkeypatch):
    """dk within 3 % and the gradient of the log-decay within 5 % of float64; all others as in every other regime."""
    inputs = draw_fast(Shape(1, 520, 8, 4, D, D), dtype, decays)
    weight = torch.randn(1, 520, 8, D, dtype=dtype, device=DEVICE).double()
    got = gradients(inputs, dtype, SCHEDULE, weight)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    want = gradients(inputs, torch.float64, EXACT, weight)
    assert_close(got, want, lambda name: LIMITS.get(name, 0.02))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("s", "Dv"), [(16, 64), (32, 64), (24, 128), (32, 128), (64, 128), (64, 256), (128, 256)])
def test_states_of_a_sketch_in_16_bits(s, Dv, dtype, monkeypatch):
    """Keys of s numbers beside values of Dv, as a sketch makes them: the errors of states of equal sizes."""
    inputs = GKA.draw(Shape(1, 520, 8, 4, s, Dv), dtype)
    weight = torch.randn(1, 520, 8, Dv, dtype=dtype, device=DEVICE).double()
    got = gradients(inputs, dtype, SCHEDULE, weight)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    want = gradients(inputs, torch.float64, EXACT, weight)
    assert_close(got, want, lambda name: LIMITS.get(name, 0.02))


@pytest.mark.gpu
@pytest.mark.parametrize("s", [16, 24, 32, 64])
def test_steps_on_the_states_of_a_sketch(s):
    """Decode steps in bf16 beside the recurrence in float64."""
    shape, dtype = Shape(3, 12, 8, 4, s, 128), torch.bfloat16
    inputs, state = GKA.draw(shape, dtype), GKA.draw_state(shape, shape.B, dtype)
    want, want_state = K.naive_gka(**inputs, refinement=SCHEDULE, initial_state=state)
    steps = [
        K.gka_step(**{n: x[:, t : t + 1] for n, x in inputs.items()}, state=state, refinement=SCHEDULE)
        for t in range(shape.T)
    ]
    got = torch.cat(steps, 1)
    assert_close({"o": got, "H": state[0], "U": state[1]}, {"o": want, "H": want_state[0], "U": want_state[1]},
                 lambda name: 5e-3)  # fmt: skip


@pytest.mark.product_rows(r"triton-(?!3\])")  # one row per kernel stays in the interpreter
@pytest.mark.product_rows(r"(torch-(1|3|24)|native-(1|16|24))\]")  # the reference of GKA solves per token
@pytest.mark.parametrize("s", [1, 3, 16, 24])
def test_keys_narrower_than_values(s, backend):
    """The kernels that read H alone have tiles of its size, and the decode step too; in float32 beside float64."""
    shape = Shape(1, 70, 1, 1, s, 40)
    inputs, state = GKA.draw(shape, torch.float32), GKA.draw_state(shape, 1, torch.float32)
    weights = []
    want = outputs_and_gradients(GKA, GKA.naive, inputs, state, weights=weights)
    got = outputs_and_gradients(GKA, GKA.fast, inputs, state, weights=weights)
    assert_close(got, want, lambda name: GKA.tolerance(torch.float32, grad=name.startswith("d ")))
    one = GKA.tokens(inputs, slice(0, 1))
    o, after = GKA.run(GKA.naive, one, state)
    mine = tuple(t.clone() for t in state)
    assert error(GKA.step(GKA, one, mine), o) <= GKA.tolerance(torch.float32)
    assert all(error(a, b) <= GKA.tolerance(torch.float32) for a, b in zip(mine, after, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1e-6, 1e4])
def test_any_size_of_the_gradient(factor):
    """The solver's float16 holds gradients of any size: scaled back, the results are those of size one."""
    inputs = GKA.draw(Shape(1, 200, 2, 2, 64, 64), torch.bfloat16)
    weight = torch.randn(1, 200, 2, 64, dtype=torch.float64, device=DEVICE)
    want = gradients(inputs, torch.bfloat16, SCHEDULE, weight)
    got = gradients(inputs, torch.bfloat16, SCHEDULE, factor * weight)
    for name in ("d q", "d k", "d v"):
        assert error(got[name] / factor, want[name]) <= 0.02, name


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_keys_of_any_size(factor):
    """Keys and their gradients without unit norm: the solver's float16 holds the scaled keys and states."""
    inputs = GKA.draw(Shape(1, 200, 2, 2, 64, 64), torch.bfloat16)
    inputs["k"] = inputs["k"] * factor
    weight = torch.randn(1, 200, 2, 64, dtype=torch.float64, device=DEVICE)
    got = gradients(inputs, torch.bfloat16, SCHEDULE, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MEMMIX_BACKEND", "torch")
        want = gradients(inputs, torch.float64, SCHEDULE, weight)
    assert error(got["o"] / factor, want["o"] / factor) <= 0.02
    assert error(got["d v"] / factor, want["d v"] / factor) <= 0.02


def test_a_step_reads_queries_in_any_layout(backend):
    q, k, v = (randn(2, 1, 8, 2, dtype=torch.float32).mT for _ in "qkv")  # [2, 1, 2, 8], heads last in memory
    log_decay, states = -rand(2, 1, 2, dtype=torch.float32), GKA.draw_state(Shape(2, 1, 2, 2, 8, 8), 2, torch.float32)
    results = []
    for inputs in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        now = tuple(state.clone() for state in states)
        results.append((K.gka_step(*inputs, log_decay, None, None, now), *now))
    assert all(error(got, want) <= 1e-6 for got, want in zip(*results, strict=True))


def test_a_step_without_any_key_reads_zero(backend):
    """Both states are zero, and so is the norm by which the solver divides."""
    shape = Shape(1, 1, 2, 1, 32, 32)
    inputs = GKA.draw(shape, torch.float32)
    state = tuple(torch.zeros_like(s) for s in GKA.draw_state(shape, 1, torch.float32))
    o = GKA.step(GKA, inputs | {"k": 0 * inputs["k"]}, state)
    assert all((t == 0).all() for t in (o, *state))
