"""Tests that need a GPU: every dtype and tile size against float64, long inputs, decode inside a CUDA graph."""

import pytest
import torch
from checks import assert_close, error, outputs_and_gradients
from ops_table import OPS, RATIO_TO_TORCH, Shape
from pool import Pool

pytestmark = pytest.mark.gpu

every_op = pytest.mark.parametrize("op", OPS, ids=str)
STEADY = 16  # number of elements from which an rms error varies little between draws
DRAWS = 4
SHAPES = [
    Shape(2, 150, 4, 2, 64, 64),
    # the gradient of the decay contains <state, its gradient>, one sum of random signs per head; with many heads its
    # rms varies little between draws
    Shape(1, 200, 8, 4, 128, 128),
    Shape(1, 130, 2, 1, 96, 48),
    Shape(2, 130, 2, 1, 64, 32),
    Shape(1, 70, 8, 4, 256, 256),
]


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype(op, dtype, shape, monkeypatch, poisoned_empty):
    """Errors are within the tolerances of the table; in float32 they are also at most twice those of the torch path.

    This ratio is taken over so many draws that every result has `STEADY` elements. With one element it would be
    chance: of two random errors of equal size, the first is more than twice the second in three of ten cases. It is
    taken over at least `DRAWS` draws: in an op that feeds its state back, a few features amplify rounding far more
    than all others, and one draw holds one such feature or none.
    """
    if not op.low_precision and dtype != torch.float32:
        pytest.skip("this row makes no promise in 16 bits")
    pooled, draws = [], DRAWS
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
        draws = max(DRAWS, -(-STEADY // min(t.numel() for t in want.values())))
    got, theirs, want = (
        {name: torch.stack([part[name] for part in parts]) for name in want} for parts in zip(*pooled, strict=True)
    )
    assert_close(got, want, lambda name: max(1e-6, RATIO_TO_TORCH * error(theirs[name], want[name])))


@every_op
def test_one_token(op):
    """Triton compiles other code where a size is 1; ptxas miscompiled that of gated_delta's scans."""
    shape, dtype, weights = Shape(2, 1, 4, 2, 128, 128), torch.bfloat16 if op.low_precision else torch.float32, []
    inputs, state = op.draw(shape, dtype), op.draw_state(shape, shape.B, dtype)
    want = outputs_and_gradients(op, op.naive, inputs, state, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    assert_close(got, want, lambda name: op.tolerance(dtype, grad=name.startswith("d ")))


@pytest.mark.parametrize("name", ["gated_delta", "gated_delta_channels"])
@pytest.mark.parametrize("D", [64, 128])
def test_writes_that_reflect(name, D):
    """beta = 2 and slow decays: the rounding of every chunk stays in the gradient of the state."""
    op, shape, weights = next(op for op in OPS if op.name == name), Shape(1, 192, 4, 4, D, D), []
    inputs, state = op.draw(shape, torch.bfloat16), op.draw_state(shape, 1, torch.bfloat16)
    inputs |= {"beta": torch.full_like(inputs["beta"], 2), "log_decay": 0.05 * inputs["log_decay"]}
    want = outputs_and_gradients(op, op.naive, inputs, state, weights=weights)
    got = outputs_and_gradients(op, op.fast, inputs, state, weights=weights)
    assert_close(got, want, lambda name: op.tolerance(torch.bfloat16, grad=name.startswith("d ")))


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
    """Two halves with a carried state equal the whole, for an input longer than in all other tests."""
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


@every_op
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_steps_on_pages_inside_a_cuda_graph(op, index_dtype):
    """One graph serves all steps. Between replays the rows change their order, one sequence pauses, and free rows
    share one page.

    Every sequence reads all of its own tokens; a token that it does not read at one replay, it reads at a later one.
    """
    sequences, rows, garbage = 3, 4, 0
    shape = Shape(sequences, 6, 4, 2, 128, 128)
    inputs, state = op.draw(shape, torch.bfloat16), op.draw_state(shape, sequences, torch.bfloat16)
    want, want_state = op.run(op.naive, inputs, state)
    where = [5, 2, 7]
    pool = Pool(state, where, pages=9, gap=64)
    start, untouched = pool.memory.clone(), pool.outside([garbage, *where])
    first = op.tokens(inputs, slice(0, 1))
    one = {name: t.clone() for name, t in op.rows(first, [0, 1, 2, 0]).items()}
    indices = torch.full((rows,), garbage, dtype=index_dtype, device="cuda")
    op.step(op, one, pool.states, indices)  # compile before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = op.step(op, one, pool.states, indices)
    pool.memory.copy_(start)
    done, outputs, replay = [0] * sequences, [[] for _ in range(sequences)], 0
    while min(done) < shape.T:
        order = [(row + replay) % rows for row in range(rows)]  # row -> sequence; `sequences` and more are padding
        active = [(row, n) for row, n in enumerate(order) if n < sequences and n != replay % 4 and done[n] < shape.T]
        pages = [garbage] * rows
        for row, n in active:
            pages[row] = where[n]
            for name, value in op.rows(op.tokens(inputs, slice(done[n], done[n] + 1)), slice(n, n + 1)).items():
                if name not in op.parameters:
                    one[name][row : row + 1].copy_(value)
        indices.copy_(torch.tensor(pages))
        graph.replay()
        for row, n in active:
            outputs[n].append(o[row : row + 1].clone())
            done[n] += 1
        replay += 1
    got = torch.cat([torch.cat(parts, 1) for parts in outputs])
    assert error(got, want) <= op.tolerance(torch.bfloat16)
    for pages, final in zip(pool.states, want_state, strict=True):
        assert error(pages[where], final) <= op.tolerance(torch.bfloat16)
    assert torch.equal(pool.outside([garbage, *where]), untouched)


@every_op
def test_steps_on_pages_beyond_int32(op):
    """A page that starts more than 2^31 elements of float32 into a pool of 9 GiB."""
    shape = Shape(2, 1, 4, 2, 64, 64)
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, 2, torch.float32)
    mine, pages = tuple(s.clone() for s in state), 12
    stride = 3 * 2**28  # bytes
    memory = torch.empty(pages * stride, dtype=torch.uint8, device="cuda").view(pages, stride)
    pool = Pool(state, [0, 1], pages=2, gap=64)
    views, indices = pool.carve(memory), torch.tensor([pages - 1, 3], device="cuda")
    for view, start in zip(views, state, strict=True):
        view[indices] = start
    want, got = op.step(op, inputs, mine), op.step(op, inputs, views, indices)
    assert error(got, want) <= op.tolerance(torch.float32)
    assert all(
        error(view[indices], expected) <= op.tolerance(torch.float32)
        for view, expected in zip(views, mine, strict=True)
    )


@every_op
def test_steps_on_one_shared_page_end(op):
    """Many programs write to one page at the same time, thousands of times. The kernel ends and changes no
    other page.
    """
    shape = Shape(256, 1, 4, 2, 64, 64)
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, 1, torch.float32)
    pool = Pool(state, [1], pages=3, gap=64)
    untouched = pool.outside([1])
    indices = torch.ones(shape.B, dtype=torch.int32, device="cuda")
    for _ in range(40):
        op.step(op, inputs, pool.states, indices)
    torch.cuda.synchronize()
    assert torch.equal(pool.outside([1]), untouched)
