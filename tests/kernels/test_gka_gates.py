"""GKA's gates in one call, of one token and of whole sequences: as by the layers, in eager and compiled programs."""

import pytest
import torch
from checks import error
from draw import DEVICE
from ops_table import TOLERANCE

from hf_memmix_kernels.gka import gates_of_products, gates_of_token, op_gates
from hf_memmix_kernels.rowwise import decay

EPS = 1e-6


def arguments(batch, heads, hidden, dtype, device="cpu"):
    torch.manual_seed(0)
    x = torch.randn(batch, 1, hidden, dtype=dtype, device=device)
    weights = [torch.randn(heads, hidden, dtype=dtype, device=device) / hidden**0.5 for _ in range(3)]
    biases = [None, *(torch.randn(heads, dtype=dtype, device=device) for _ in range(2))]
    return x, weights, biases, torch.randn(heads, device=device), torch.randn(heads, device=device), EPS


def expected(x, weights, biases, dt_bias, A_log, eps):
    """The gates by the products of the layers, in float64."""
    layers = zip(weights, biases, strict=True)
    logits = [torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in layers]
    return decay(logits[0], dt_bias, A_log)[1], logits[1].sigmoid() + eps, logits[2].sigmoid()


def assert_gates(got, want, dtype):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float32 and g.shape == w.shape and error(g, w) <= TOLERANCE[dtype]


# heads and the hidden size are not multiples of a block of the kernel; the last size takes two blocks
SIZES = ((1, 4, 40), (3, 5, 64), (2, 1, 2100))
CASES = [("triton", dtype, size) for dtype in (torch.float32, torch.bfloat16, torch.float16) for size in SIZES]
if DEVICE == "cpu":  # native code, which has no float16
    CASES += [("native", dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in SIZES[:2]]


@torch.no_grad()
@pytest.mark.parametrize(("path", "dtype", "size"), CASES)
def test_gates_equal_the_projections(path, dtype, size, monkeypatch):
    batch, heads, hidden = size
    given = arguments(batch, heads, hidden, dtype, DEVICE)
    want = expected(*given)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    assert_gates(gates_of_token(*given), want, dtype)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    assert gates_of_token(*given) is None


@torch.no_grad()
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_compiled_program_calls_one_op(path, monkeypatch):
    """On a GPU, in the place of three matrix products and their activations."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    monkeypatch.setattr(op_gates, "op_is_faster", lambda x: True)
    given, calls = arguments(2, 4, 40, torch.bfloat16, DEVICE), []

    def record(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    got = torch.compile(gates_of_token, backend=record, fullgraph=True)(*given)
    assert_gates(got, expected(*given), torch.bfloat16)
    assert [name for name in calls if "getitem" not in name] == ["hf_memmix.gka_gates.default"]
    x, weights, biases, *rest = given
    torch.library.opcheck(
        op_gates._gates_op, (x, *weights, *biases, *rest), test_utils=("test_schema", "test_faketensor")
    )


class Sharded(torch.Tensor):
    """As DTensor: what its memory holds is not the whole tensor."""


def test_the_layers_run_where_one_call_would_be_wrong(monkeypatch):
    """With gradients, under autocast, in float64, with parts of weights, under torch.func, and with many rows."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    x, weights, biases, *rest = arguments(1, 4, 40, torch.float32, DEVICE)
    assert gates_of_token(x, weights, biases, *rest) is None
    with torch.no_grad():
        assert gates_of_token(x, weights, biases, *rest) is not None
        with torch.autocast(DEVICE, torch.bfloat16):
            assert gates_of_token(x, weights, biases, *rest) is None
        assert gates_of_token(*arguments(1, 4, 40, torch.float64, DEVICE)) is None
        sharded = weights[0].as_subclass(Sharded)
        assert gates_of_token(x, [sharded, *weights[1:]], biases, *rest) is None
        assert gates_of_token(x, [weights[0].T.contiguous().T, *weights[1:]], biases, *rest) is None
        found = []
        torch.func.vmap(lambda row: found.append(gates_of_token(row, weights, biases, *rest)) or row)(x[None])
        assert found == [None]
        assert gates_of_token(*arguments(op_gates.MAX_ROWS + 1, 4, 40, torch.float32, DEVICE)) is None


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_gates_of_whole_sequences(dtype, monkeypatch):
    """From the products of the layers, which need not be contiguous; without gradients only."""
    torch.manual_seed(0)
    wide = torch.randn(2, 300, 3, 5, dtype=dtype, device=DEVICE)
    logits, dt_bias, A_log = wide.unbind(2), torch.randn(5, device=DEVICE), torch.randn(5, device=DEVICE)
    z = [x.double() for x in logits]
    want = decay(z[0], dt_bias, A_log)[1], z[1].sigmoid() + EPS, z[2].sigmoid()
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    assert gates_of_products(*logits, dt_bias, A_log, EPS) is None  # gradients are on
    with torch.no_grad():
        assert_gates(gates_of_products(*logits, dt_bias, A_log, EPS), want, torch.float32)
        assert gates_of_products(*(x[:0] for x in logits), dt_bias, A_log, EPS) is None
        monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
        assert gates_of_products(*logits, dt_bias, A_log, EPS) is None
