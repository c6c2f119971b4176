"""What only a GPU can show: every dtype and tile size against float64, long inputs, decode inside a CUDA graph."""

import pytest
import torch
from checks import assert_close, error, outputs_and_gradients
from ops_table import OPS, RATIO_TO_TORCH, Shape

pytestmark = pytest.mark.gpu

every_op = pytest.mark.parametrize("op", OPS, ids=str)
STEADY = 16  # numbers, of which an rms error is no longer a matter of luck
SHAPES = [
    Shape(2, 150, 4, 2, 64, 64),
    # the decay's gradient holds <state, its gradient>, a sum of random signs per head: enough heads for a steady rms
    Shape(1, 200, 8, 4, 128, 128),
    Shape(1, 130, 2, 1, 96, 48),
    Shape(2, 130, 2, 1, 64, 32),
    Shape(1, 70, 1, 1, 256, 256),
]


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype(op, dtype, shape, monkeypatch, poisoned_empty):
    """Within the table; in float32, moreover, at most twice the error of the torch path.

    That ratio is taken over as many draws as give every result `STEADY` numbers: of two equally large
    random errors of one number, the first is more than twice the second in three cases of ten.
    """
    if not op.low_precision and dtype != torch.float32:
        pytest.skip("this row makes no promise in 16 bits")
    pooled, draws = [], 1
    while len(pooled) < draws:
        inputs, state, weights = op.draw(shape, dtype), op.draw_state(shape, shape.B, dtype), []
        want = outputs_and_gradients(op, op.naive, inputs, state, weights=weights)
        got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
        assert_close(got, want, lambda name: op.tolerance(dtype, grad=name.startswith("d ")))
        if dtype != torch.float32 or op.tf32:
            return
        with monkeypatch.context() as patch:
            patch.setenv("HF_MEMMIX_BACKEND", "torch")
            theirs = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
        pooled.append((got, theirs, want))
        draws = -(-STEADY // min(t.numel() for t in want.values()))
    got, theirs, want = (
        {name: torch.stack([part[name] for part in parts]) for name in want} for parts in zip(*pooled, strict=True)
    )
    assert_close(got, want, lambda name: max(1e-6, RATIO_TO_TORCH * error(theirs[name], want[name])))


@pytest.mark.parametrize("chunk_size", [32, 64, 128])
@pytest.mark.parametrize("D", [32, 64, 128])
def test_gla_gradients_at_every_tile_size(D, chunk_size):
    """Triton 3.4 - 3.7.0 on Hopper miscompiles the transpose of an accumulator at some tile sizes."""
    op = next(op for op in OPS if op.name == "gla")
    shape = Shape(1, 300, 2, 1, D, D)
    for dtype in (torch.float16, torch.bfloat16):
        inputs, state, weights = op.draw(shape, dtype), op.draw_state(shape, 1, dtype), []
        want = outputs_and_gradients(op, op.naive, inputs, state, weights=weights)
        got = outputs_and_gradients(
            op, lambda **kw: op.fast(**kw, chunk_size=chunk_size), inputs, state, weights=weights
        )
        assert_close(got, want, lambda name, dtype=dtype: op.tolerance(dtype, grad=name.startswith("d ")))


@every_op
def test_split_of_a_long_input(op):
    """Two halves with a carried state equal the whole at a length that no other test reaches."""
    shape = Shape(2, 4096, 4, 2, 64, 64)
    inputs = op.draw(shape, torch.bfloat16)
    whole, state = op.run(op.fast, inputs)
    first, carried = op.run(op.fast, op.tokens(inputs, slice(0, 2000)))
    second, end = op.run(op.fast, op.tokens(inputs, slice(2000, None)), carried)
    limit = 2 * op.tolerance(torch.bfloat16)
    assert error(torch.cat([first, second], 1), whole) <= limit
    assert all(error(a, b) <= limit for a, b in zip(end, state, strict=True))


@every_op
def test_step_inside_a_cuda_graph(op):
    shape = Shape(2, 8, 4, 2, 128, 128)
    inputs, state = op.draw(shape, torch.bfloat16), op.draw_state(shape, 2, torch.bfloat16)
    want, want_state = op.run(op.naive, inputs, state)
    one = {name: t.clone() for name, t in op.tokens(inputs, slice(0, 1)).items()}
    mine = tuple(s.clone() for s in state)
    op.step(op, one, mine)  # compile before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = op.step(op, one, mine)
    for s, start in zip(mine, state, strict=True):
        s.copy_(start)
    outputs = []
    for t in range(shape.T):
        for name, value in op.tokens(inputs, slice(t, t + 1)).items():
            one[name].copy_(value)
        graph.replay()
        outputs.append(o.clone())
    assert error(torch.cat(outputs, 1), want) <= op.tolerance(torch.bfloat16)
    assert all(error(a, b) <= op.tolerance(torch.bfloat16) for a, b in zip(mine, want_state, strict=True))
