"""COFFEE beyond the contract tests: the gates of the ablation, launch options, DEER, invalid values."""

import pytest
import torch
from checks import assert_close, error
from draw import DEVICE, rand, randn
from torch import Tensor

import hf_memmix_kernels as K
from hf_memmix_kernels.coffee.naive_deer import naive_deer_coffee


def draw(B: int, T: int, D: int, n: int, *, dtype=torch.float32, feedback="sigmoid", gate=0, filtered=False) -> dict:
    """Inputs of one call; `gate` is the number of axes of the gate, 0 for no gate."""
    inputs = {"u": randn(B, T, D, dtype=dtype), "lam": -rand(D, n, dtype=dtype), "C": randn(D, n, dtype=dtype)}
    # with strong feedback the states of a linear gate grow without bound
    scale = 0.02 if feedback == "linear" else 1.0
    inputs["w"] = None if feedback == "token" else scale * randn(D, n, dtype=dtype)
    if gate:
        inputs["gate"] = 0.2 + 0.8 * rand(*(B, T, D)[:gate], dtype=dtype)
    if filtered:
        inputs["w_filter"] = randn(D, n, dtype=dtype)
    inputs["initial_state"] = randn(B, D, n, dtype=dtype)
    return inputs


def results(fn, inputs: dict, weights: list, **options) -> dict[str, Tensor]:
    """Outputs and the gradients of every tensor, under one random linear function of the outputs."""
    leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in inputs.items()}
    y, final = fn(**leaves, **options)
    if not weights:
        weights.extend(torch.randn_like(t, dtype=torch.float64) for t in (y, final))
    loss = sum((t.double() * w).sum() for t, w in zip((y, final), weights, strict=True))
    sources = {f"d {name}": t for name, t in leaves.items() if t is not None}
    grads = torch.autograd.grad(loss, list(sources.values()))
    return {"y": y.detach(), "state": final.detach(), **dict(zip(sources, grads, strict=True))}


def agrees(fn, inputs: dict, tolerance: float = 1e-5, **options) -> None:
    """`fn` equals the float64 reference; the limit of gradients is twice as large."""
    weights, common = [], {name: options[name] for name in ("feedback", "cu_seqlens") if name in options}
    want = results(K.naive_coffee, inputs, weights, **common)
    got = results(fn, inputs, weights, **options)
    assert_close(got, want, lambda name: tolerance * (1 + name.startswith("d ")))


@pytest.mark.product_rows(r"triton-(row|filter)")  # variants of an op
@pytest.mark.parametrize("feedback", ["sigmoid", "linear", "input", "token"])
@pytest.mark.parametrize(("gate", "filtered"), [(0, True), (2, False), (3, True)], ids=["filter", "row", "both"])
def test_every_gate(feedback, gate, filtered, backend, poisoned_empty):
    """The forms of Table 6, with gates per token or per feature, with and without the output filter."""
    gate = gate or 2 * (feedback == "token")
    agrees(K.chunk_coffee, draw(2, 19, 5, 3, feedback=feedback, gate=gate, filtered=filtered), feedback=feedback)


def test_equation_4_with_its_bias():
    """Equation 4, x = (1 + lam d) x + d B u, equals the token gate with C * B in place of C."""
    inputs = draw(2, 12, 4, 3, dtype=torch.float64, feedback="token", gate=3)
    B, delta, lam, C = randn(4, 3, dtype=torch.float64), inputs["gate"][..., None], inputs["lam"], inputs["C"]
    x, outputs = torch.zeros_like(inputs["initial_state"]), []
    for k in range(12):
        x = (1 + lam * delta[:, k]) * x + delta[:, k] * B * inputs["u"][:, k, :, None]
        outputs.append((C * x).sum(-1))
    y, _ = K.chunk_coffee(inputs["u"], lam, None, C * B, gate=inputs["gate"], feedback="token")
    assert error(y, torch.stack(outputs, 1)) <= 1e-12


@pytest.mark.product_rows(r"triton-(33|64)")  # one row per kernel stays in the interpreter
@pytest.mark.parametrize("n", [1, 2, 5, 33, 64])
def test_every_number_of_states(n, backend):
    agrees(K.chunk_coffee, draw(1, 18, 3, n))


@pytest.mark.parametrize("path", ["torch", "native"])
def test_lengths_around_a_chunk(path, monkeypatch):
    """Backward computes the states of a chunk again: a part of one, one, several, and several with a rest."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    for T in (16, 64, 150):
        agrees(K.chunk_coffee, draw(2, T, 3, 2, gate=2))


LAUNCH_OPTIONS = [
    # states per thread, warps, tokens per group, short chain, segment
    ((4, 4, 8, False, 0), (4, 4, 8, False, 0)),
    ((2, 1, 16, False, 0), (2, 1, 4, False, 0)),
    ((1, 1, 4, True, 0), (1, 1, 8, False, 16)),
    ((4, 1, 8, True, 0), (4, 1, 4, False, 16)),
]


@pytest.mark.product_rows(r"(packed-\(\([14]|batched)")  # one row per kernel stays in the interpreter
@pytest.mark.parametrize("options", LAUNCH_OPTIONS, ids=str)
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 27, 37]], ids=["batched", "packed"])
def test_every_choice_of_launch_options(options, bounds, monkeypatch):
    """Launch options that are only chosen for larger inputs, with a length that is not a multiple of a group."""
    triton_path = pytest.importorskip("hf_memmix_kernels.coffee.launch")
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    forward, backward = (triton_path.LaunchOptions(*values) for values in options)
    if bounds and backward.segment:
        backward = backward._replace(segment=0)
    monkeypatch.setattr(triton_path, "forward_options", lambda *a: forward)
    monkeypatch.setattr(triton_path, "backward_options", lambda *a: backward)
    inputs = draw(1, 37, 9, 8, filtered=bounds is not None)
    if bounds:
        inputs["initial_state"] = randn(len(bounds) - 1, 9, 8, dtype=torch.float32)
    agrees(K.chunk_coffee, inputs, cu_seqlens=bounds and torch.tensor(bounds, device=DEVICE))


def test_no_sequences(backend):
    """The gradients of the parameters are zeros."""
    u = torch.zeros(0, 5, 3, device=DEVICE)
    parameters = [torch.zeros(3, 4, device=DEVICE, requires_grad=True) for _ in "lwC"]
    y, state = K.chunk_coffee(u, *parameters)
    assert y.shape == (0, 5, 3) and state.shape == (0, 3, 4)
    assert not any(grad.any() for grad in torch.autograd.grad(y.sum(), parameters))


def wild(T: int) -> dict:
    """Weights and inputs as large as in trained models, with which the first products of Newton's method overflow."""
    inputs = draw(1, T, 4, 4)
    return {**inputs, "w": 3 * inputs["w"], "u": 8 * inputs["u"], "lam": 0 * inputs["lam"]}


def test_deer_equals_the_recurrence():
    """Newton's updates shrink quadratically where states forget; with steep gates they overflow in float32."""
    inputs = draw(2, 64, 3, 4, dtype=torch.float64)
    y, state, updates = naive_deer_coffee(**inputs, iterations=12)
    want, want_state = K.naive_coffee(**inputs)
    assert error(y, want) <= 1e-9 and error(state, want_state) <= 1e-9
    assert updates[-1] <= 1e-12 < updates[0]
    _, _, steep = naive_deer_coffee(**wild(64), iterations=6)
    assert not max(steep) <= torch.finfo(torch.float32).max ** 0.5


def test_bad_values_are_named():
    lam = torch.tensor([[0.0, -2.0], [-1.0, -0.5]])
    K.check_coffee(lam, torch.zeros(1, 2, 2))
    for bad in (lam + 0.25, lam - 0.25, lam * float("nan")):
        with pytest.raises(ValueError, match="must be in \\[-2, 0\\]"):
            K.check_coffee(bad)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="2 values that are not finite"):
            K.check_coffee(lam, torch.tensor([[[0.0, value], [1.0, value]]]))


@pytest.mark.product  # many tokens or iterations
@pytest.mark.parametrize(("backend", "pieces"), [("native", 64), ("torch", 8)])
def test_stays_bounded_over_a_million_steps(backend, pieces, monkeypatch):
    """2^20 tokens of +-1 in pieces with a carried state, with lambda from -2 to 0; an eighth without native code.

    |x'| <= |1 + lam s| |x| + s: a state is bounded by the sum of all inputs, and by 1 / |lam| for lam in [-1, 0).
    """
    if DEVICE == "cpu":
        monkeypatch.setenv("HF_MEMMIX_BACKEND", backend)
    lam, w = torch.meshgrid(torch.tensor([0.0, -1e-3, -1.0, -2.0]), torch.tensor([3.0, -3.0, 0.0]), indexing="ij")
    lam, w = lam.reshape(1, -1).to(DEVICE), w.reshape(1, -1).to(DEVICE)
    state = torch.zeros(1, *lam.shape, device=DEVICE)
    for _ in range(pieces):
        u = torch.where(rand(1, 2**14, 1, dtype=torch.float32) < 0.5, -1.0, 1.0)
        y, state = K.chunk_coffee(u, lam, w, torch.ones_like(lam), initial_state=state)
        assert torch.isfinite(y).all()
    assert state.abs().max() <= 2**20
    inside = (lam >= -1) & (lam < 0)
    assert (state[0][inside] * lam[inside]).abs().max() <= 1 + 1e-4


@pytest.mark.gpu
def test_the_gate_by_hardware_tanh():
    """Its error against float64: 4e-6 of 1, and for tanh itself 1.1e-5 of its value, at every argument."""
    import triton
    import triton.language as tl

    from hf_memmix_kernels.coffee.kernels.tiles import INSTRUCTIONS, argument, sigmoid

    @triton.jit
    def gate_of(x, y, SIZE: tl.constexpr, MATH: tl.constexpr):
        o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(y + o, sigmoid(argument(tl.load(x + o), MATH), MATH))

    x = torch.cat([torch.linspace(-90, 90, 2**20), torch.linspace(-4, 4, 2**20), torch.linspace(-1e-3, 1e-3, 2**20)])
    x = x.to(DEVICE)
    y = torch.empty_like(x)
    gate_of[(x.numel() // 1024,)](x, y, SIZE=1024, MATH=INSTRUCTIONS.value)
    off = y.double() - x.double().sigmoid()
    assert torch.isfinite(y).all() and ((y >= 0) & (y <= 1)).all()
    assert off.abs().max() <= 4e-6
    # 2 s - 1 = tanh(x / 2); below 0.01 the rounding of s, not of tanh, is what is left
    tanh = (0.5 * x.double()).tanh()
    large = tanh.abs() > 0.01
    assert ((2 * off).abs() / tanh.abs())[large].max() <= 1.1e-5 + 2**-23 / 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_errors_of_the_gate_do_not_add_up(dtype):
    """4,096 tokens, half of the states with lambda near 0, which forget nothing: the last 64 tokens err as all do."""
    inputs = draw(2, 4096, 64, 16, dtype=dtype)
    inputs["lam"][::2] *= 1e-3
    y, state = K.chunk_coffee(**inputs)
    want, want_state = K.naive_coffee(**inputs)
    limit = 2e-3 if dtype == torch.float16 else 5e-3
    assert error(y, want) <= limit and error(y[:, -64:], want[:, -64:]) <= limit
    assert error(state, want_state) <= limit
