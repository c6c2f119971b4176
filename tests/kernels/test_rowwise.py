"""The rowwise functions equal the float64 reference, forward and backward, on both paths."""

import pytest
import torch
from checks import assert_close
from draw import DEVICE, randn
from ops_table import TOLERANCE

from hf_memmix_kernels.rowwise import (
    decay,
    forward_kl_,
    gated_norm,
    gated_product,
    naive_decay,
    naive_forward_kl,
    naive_gated_norm,
    naive_gated_product,
    naive_rotate,
    naive_unit_heads,
    rotate,
    unit_heads,
)

EPS = 1e-6
# B, T, H, D, and pairs of channels that rotate
HEADS = [(2, 5, 3, 32, 16), (1, 3, 2, 24, 4), (2, 1, 1, 128, 0), (1, 67, 5, 40, 20), (1, 2, 1, 5, 1)]
# the shape of y, and groups with weights of their own
ROWS = [((2, 3, 4, 32), 1), ((1, 5, 3, 24), 3), ((70, 130), 1), ((2, 1, 1000), 1), ((3, 7, 2, 48), 2)]
GATES = [("silu", True, None), ("gelu", True, None), (None, True, None), ("silu", False, 1.5), ("silu", False, None)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture
def dtype(request, backend):
    if backend == "triton" and DEVICE == "cuda" and request.param == torch.float64:
        pytest.skip("the choice by device keeps float64 off a GPU's Triton kernels")
    return request.param


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str, indirect=True)


def results(fn, leaves: dict, weight: torch.Tensor) -> dict:
    """The output with and without gradients, as native code computes only the second; the gradients of a linear
    function of it with the coefficients `weight`.
    """
    with torch.no_grad():
        plain = fn(**leaves)
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    out = fn(**leaves)
    grads = torch.autograd.grad((out.double() * weight).sum(), list(leaves.values()))
    return {"out": out.detach(), "plain": plain} | {
        f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def angles(batch, length, pairs, dtype, scale=1.3):
    """cos and sin as in a model: one row for the whole batch, a slice of a wider tensor, scaled as by YaRN."""
    angle = randn(1, length, 2 * pairs, dtype=torch.float32)[..., :pairs].expand(batch, -1, -1)
    return scale * angle.cos().to(dtype), scale * angle.sin().to(dtype)


def assert_agrees(call, functions: tuple, leaves: dict, weight: torch.Tensor, dtype=torch.float32):
    """call(function) of the leaves is the same for both functions: the op and its reference."""
    got, want = (results(call(fn), leaves, weight) for fn in functions)
    assert got["out"].dtype == dtype
    assert_close(got, want, lambda name: TOLERANCE[dtype] * (2 if name.startswith("d ") else 1))


UNIT_HEADS, GATED_NORM = (unit_heads, naive_unit_heads), (gated_norm, naive_gated_norm)


def norm(**options):
    """A call of the gated norm with these options."""
    return lambda fn: lambda y, weight, gate=None: fn(y, gate, weight, **{"eps": EPS} | options)


@pytest.mark.product_rows(r"triton-.*(float16|bfloat16|float64|67, 5)")  # one row per kernel stays in the interpreter
@every_dtype
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_unit_heads_equals_naive(shape, dtype, backend, poisoned_empty):
    batch, length, heads, size, pairs = shape
    x = randn(batch, length, heads, size, dtype=dtype)
    rotary = angles(batch, length, pairs, dtype) if pairs else (None, None)
    weight = randn(*x.shape, dtype=torch.float64)
    assert_agrees(lambda fn: lambda x: fn(x, *rotary, EPS), UNIT_HEADS, {"x": x}, weight, dtype)


@pytest.mark.product_rows(r"triton-.*(float16|bfloat16|float64|67, 5)")
@every_dtype
@pytest.mark.parametrize("shape", [shape for shape in HEADS if shape[-1]], ids=str)
def test_rotate_equals_naive(shape, dtype, backend, poisoned_empty):
    batch, length, heads, size, pairs = shape
    x, rotary = randn(batch, length, heads, size, dtype=dtype), angles(batch, length, pairs, dtype)
    weight = randn(*x.shape, dtype=torch.float64)
    assert_agrees(lambda fn: lambda x: fn(x, *rotary), (rotate, naive_rotate), {"x": x}, weight, dtype)


# on a CPU, the dtypes other than float32 run the first shape
NORMS = [(row, t) for t in DTYPES for row in ROWS if DEVICE == "cuda" or t == torch.float32 or row == ROWS[0]]


@pytest.mark.product_rows(
    r"triton-.*(float16|bfloat16|float64|130\)|1000\)|48\))", r"triton-(silu-False|.*, 32\), 1\))"
)  # one row per kernel stays in the interpreter
@pytest.mark.parametrize(("shape", "dtype"), NORMS, ids=str, indirect=["dtype"])
@pytest.mark.parametrize(("activation", "norm_first", "limit"), GATES, ids=str)
def test_gated_norm_equals_naive(shape, activation, norm_first, limit, dtype, backend, poisoned_empty):
    size, groups = shape
    leaves = {"y": randn(*size, dtype=dtype), "weight": 1 + 0.2 * randn(groups * size[-1], dtype=dtype)}
    if activation is not None:
        leaves["gate"] = randn(*size, dtype=dtype)
    call = norm(activation=activation, norm_first=norm_first, limit=limit)
    assert_agrees(call, GATED_NORM, leaves, randn(*size, dtype=torch.float64), dtype)


@pytest.mark.parametrize("programs", [512, 8, 1], ids=["1 tile", "2 tiles", "all tiles"])
def test_how_many_tiles_a_program_of_the_norm_sums(programs, backend, monkeypatch, poisoned_empty):
    """Rows of 1000 elements are 4 to a tile: 70 rows are 18 tiles, 16 of them in one program at most."""
    if backend == "triton":
        from hf_memmix_kernels.rowwise import launch

        monkeypatch.setattr(launch, "PROGRAMS", programs)
        assert launch._loops(18, 1000) == {512: 1, 8: 2, 1: 16}[programs]
    leaves = {"y": randn(70, 1000, dtype=torch.float32), "weight": 1 + 0.2 * randn(1000, dtype=torch.float32)}
    leaves["gate"] = randn(70, 1000, dtype=torch.float32)
    assert_agrees(norm(), GATED_NORM, leaves, randn(70, 1000, dtype=torch.float64))


def test_inputs_need_not_be_contiguous(backend):
    """Inputs may be slices of a fused projection, and their gradients may be transposed."""
    x = randn(2, 7, 3 * 64, dtype=torch.float32)
    rotary = angles(2, 7, 8, torch.float32)
    rotary = rotary[0], rotary[1].contiguous()  # other strides than those of cos
    part = x[..., 64:128].unflatten(-1, (2, 32))
    weight = randn(2, 2, 7, 32, dtype=torch.float64).transpose(1, 2)
    assert_agrees(lambda fn: lambda x: fn(x, *rotary, EPS), UNIT_HEADS, {"x": part}, weight)
    leaves = {"y": x[..., :64], "gate": x[..., 64:128], "weight": randn(64, dtype=torch.float32)}
    assert_agrees(norm(), GATED_NORM, leaves, randn(7, 2, 64, dtype=torch.float64).transpose(0, 1))


@every_dtype
@pytest.mark.parametrize("size", [(2, 3, 40), (5000,)], ids=str)
def test_gated_product_equals_naive(size, dtype, backend, poisoned_empty):
    leaves = {"gate": randn(*size, dtype=dtype), "up": randn(*size, dtype=dtype)}
    functions = gated_product, naive_gated_product
    assert_agrees(lambda fn: fn, functions, leaves, randn(*size, dtype=torch.float64), dtype)


@pytest.mark.parametrize("heads", [1, 2])
def test_gate_may_be_a_slice_and_is_clamped(heads, backend, poisoned_empty):
    """As in Mamba-2: the gate is a part of a fused projection, and its rows lie apart."""
    wide = randn(2, 3, 40 * heads, dtype=torch.float32)
    leaves = {"y": randn(2, 3, heads, 16, dtype=torch.float32), "weight": randn(16 * heads, dtype=torch.float32)}
    leaves["gate"] = wide[..., : 16 * heads].unflatten(-1, (heads, 16))
    call = norm(norm_first=False, gate_limit=0.7)
    assert_agrees(call, GATED_NORM, leaves, randn(2, 3, heads, 16, dtype=torch.float64))


@every_dtype
@pytest.mark.parametrize("limits", [{}, {"limit": 2.0, "smallest": 0.3, "largest": 1.5}], ids=["free", "limited"])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["dt", "g", "both"])
def test_decay_equals_naive(used, limits, dtype, backend, poisoned_empty):
    """x is a slice of a fused projection. The gradient of a result that is not used is None."""
    wide = 3 * randn(2, 70, 11, dtype=dtype)
    wide[0, 0, 4:9], wide[0, 1, 4:9] = 30, -30  # softplus(x) = x, and e^x
    full = torch.promote_types(dtype, torch.float32)
    leaves = {"x": wide[..., 4:9], "bias": randn(5, dtype=full), "A_log": randn(5, dtype=full)}
    rate = leaves["A_log"] if used != (0,) else leaves.pop("A_log")  # dt does not depend on it

    def call(fn):
        def of(x, bias, A_log=rate):
            x = torch.cat([wide[..., :4], x, wide[..., 9:]], -1)[..., 4:9]
            found = fn(x, bias, A_log, **limits)
            return sum((index + 1) * found[index] for index in used).to(dtype)

        return of

    assert_agrees(call, (decay, naive_decay), leaves, randn(2, 70, 5, dtype=torch.float64), dtype)


def test_small_steps_are_exact(backend):
    """softplus of a large negative number is its exponential, not 0."""
    x = torch.full((1, 1, 3), -40.0, device=DEVICE)
    dt, _ = decay(x, torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE))
    torch.testing.assert_close(dt, x.exp(), rtol=1e-5, atol=0)


def test_rows_of_zeros(backend):
    """For a row of zeros, as at padding, the output is zero and the gradient is finite."""
    x = torch.zeros(1, 2, 2, 16, device=DEVICE, requires_grad=True)
    y = unit_heads(x, None, None, EPS)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not y.any()
    torch.testing.assert_close(dx, torch.full_like(x, 1 / EPS))


@pytest.mark.parametrize("limit", [None, 1.5])
def test_nan_goes_through(limit, backend):
    y = randn(4, 16, dtype=torch.float32)
    y[2, 3] = float("nan")
    out = gated_norm(y, torch.ones_like(y), torch.ones(16, device=DEVICE), EPS, norm_first=False, limit=limit)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("size", [(0, 3, 2, 16), (2, 0, 2, 16)], ids=str)
def test_no_rows(size, backend):
    x = torch.zeros(*size, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    out = gated_norm(unit_heads(x, None, None, EPS), x, weight, EPS)
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert out.shape == x.shape
    assert grads[0].shape == x.shape
    assert not grads[1].any()


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_compiled_code_sees_plain_operators(backend):
    """torch.compile traces plain operators, which it can fuse, and the results equal those of the kernels."""
    leaves = randn(2, 5, 3, 32, dtype=torch.float32), randn(2, 5, 3, 32, dtype=torch.float32)
    weight = torch.ones(32, device=DEVICE)

    def call(x, gate):
        return gated_norm(unit_heads(x, None, None, EPS), gate, weight, EPS)

    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    got = torch.compile(call, fullgraph=True, backend=record)(*leaves)
    assert len(graphs) == 1
    torch.testing.assert_close(got, call(*leaves))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: unit_heads(x[0], None, None, EPS), "must be \\[B, T, H, D\\]"),
        (lambda x, w: unit_heads(x, x[..., 0, :4], None, EPS), "or neither"),
        (lambda x, w: unit_heads(x, x[..., 0, :12], x[..., 0, :12], EPS), "0 < 2 r <= 16"),
        (lambda x, w: rotate(x, x[..., 0, :12], x[..., 0, :12]), "0 < 2 r <= 16"),
        (lambda x, w: gated_norm(x, x[:1], w, EPS), "shape of y"),
        (lambda x, w: gated_norm(x, x, w[:3], EPS), "weight must be \\[D=16\\]"),
        (lambda x, w: gated_norm(x, x, w, EPS, activation="relu"), "'relu' is not one of"),
        (lambda x, w: decay(x[0], w[:4], w), r"bias and A_log \[H\], got \(3, 4, 16\), \(4,\)"),
        (lambda x, w: gated_product(x, w), "one shape and dtype"),
    ],
)
def test_bad_input_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3, 4, 16), torch.ones(16))


# rows, vocabulary, and the size of the logits: a certain teacher's probabilities are zero in float32
LOGITS = [(3, 4099, 1.0), (2, 2048, 30.0), (1, 5, 300.0), (4, 1, 1.0)]


@pytest.mark.product_rows(r"triton-.*(float16|bfloat16|float64)")
@every_dtype
@pytest.mark.parametrize("shape", LOGITS, ids=str)
def test_forward_kl_and_its_gradient_equal_naive(shape, dtype, backend, poisoned_empty):
    rows, size, scale = shape
    wide = scale * randn(rows, size + 3, dtype=torch.float32)
    student, teacher = wide.to(dtype)[:, :size], (wide + 0.5 * randn(rows, size + 3, dtype=torch.float32)).to(dtype)
    teacher, weight = teacher[:, 3:].contiguous(), torch.arange(rows, device=DEVICE).float()
    leaf = student.detach().clone().requires_grad_()
    want = naive_forward_kl(leaf, teacher)
    gradient = torch.autograd.grad((want * weight).sum(), leaf)[0]
    rest = wide.to(dtype)[:, size:].clone()
    got = forward_kl_(student, teacher, weight)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(
        {"kl": got, "d student": student}, {"kl": want.detach(), "d student": gradient}, lambda name: TOLERANCE[dtype]
    )
    assert rest.isfinite().all()


def test_forward_kl_keeps_the_digits_of_large_logits(backend):
    """A normaliser of 3000 in float32 would be rounded by 1e-4, and with it all probabilities."""
    student, teacher = 3000 + randn(2, 3, 700, dtype=torch.float32)
    leaf = student.double().requires_grad_()
    want = naive_forward_kl(leaf, teacher.double())
    gradient = torch.autograd.grad(want.sum(), leaf)[0]
    got = forward_kl_(student, teacher)
    for ours, exact in ((got, want.detach()), (student, gradient)):
        assert (ours.double() - exact).norm() <= 2e-6 * exact.norm()


def test_forward_kl_of_hidden_words_is_finite_and_nan_stays(backend):
    student, teacher = randn(2, 64, dtype=torch.float32), randn(2, 64, dtype=torch.float32)
    student[:, 5], teacher[:, 5:9] = float("-inf"), float("-inf")
    kl = forward_kl_(student, teacher)
    assert kl.isfinite().all() and (kl > 0).all() and student.isfinite().all() and (student[:, 5] == 0).all()
    student[1, 3] = float("nan")
    assert forward_kl_(student, teacher).isfinite().tolist() == [True, False]
