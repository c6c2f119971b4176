"""No interpreted kernel reads or writes outside the tensors of its launch (memcheck.py)."""

import os

import pytest
import torch
from checks import outputs_and_gradients
from memcheck import bounds_checked
from ops_table import OPS, Shape
from pool import Pool

from hf_memmix_kernels import window_step
from hf_memmix_kernels.window import window_state_shapes

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="checks interpreted kernels")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")


@pytest.mark.product_rows(r"(?!gla-packed)")  # one row per kernel stays in the interpreter
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@pytest.mark.parametrize("op", [op for op in OPS if not op.brief], ids=str)
def test_every_access_is_inside(op, packed):
    """With a size that is not a power of two, a last chunk of one token, and sequences of zero, one and several
    tokens.
    """
    shape = Shape(1, 17, 4, 2, 48, 32)
    bounds = [0, 0, 1, 17]
    inputs, state = (
        op.draw(shape, torch.float32),
        op.draw_state(shape, len(bounds) - 1 if packed else 1, torch.float32),
    )
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if packed else None
    with bounds_checked() as seen:
        outputs_and_gradients(op, op.fast, inputs, state, cu_seqlens, weights=[])
        if not packed:
            with torch.no_grad():
                one, state = op.tokens(inputs, slice(0, 1)), op.draw_state(shape, 1, torch.float32)
                op.step(op, one, state)
                op.step(op, one, Pool(state, [2], pages=3, gap=8).states, torch.tensor([2]))
    assert seen["accesses"]


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("seen", [0, 1, 8, 12, 10**18, 2**63 - 1, -5])
def test_rows_of_a_window_that_share_a_page(seen, sinks):
    """Rows that only pad a batch share a page. Whatever count of tokens it holds, no row leaves it."""
    rows, window = 6, 8
    *slots, counts = window_state_shapes(1, 2, 16, window, sinks)
    state = (*(torch.ones(shape) for shape in slots), torch.full(counts, seen))
    pool = Pool(state, [0], pages=3, gap=64)
    untouched = pool.outside([0])
    x = [torch.randn(rows, 1, heads, 16) for heads in (4, 2, 2)]
    with bounds_checked() as found, torch.no_grad():
        for _ in range(3):
            where = torch.zeros(rows, dtype=torch.int32)
            o = window_step(*x, pool.states, window=window, sinks=sinks, state_indices=where)
            assert o.isfinite().all()
    assert found["accesses"]
    assert torch.equal(pool.outside([0]), untouched)


@pytest.mark.parametrize("grouped", [False, True], ids=["flat", "grouped"])
def test_finds_an_access_outside(grouped):
    """An access one element after a tensor is found, although this memory belongs to a larger tensor. A masked lane is
    not an access.

    The tensor is an argument itself or a member of a tuple, which may be nested.
    """
    import triton
    import triton.language as tl

    @triton.jit
    def copy(source, target, length, SIZE: tl.constexpr):
        o = tl.arange(0, SIZE)
        tl.store(target + o, tl.load(source + o, mask=o < length, other=0.0))

    @triton.jit
    def copy_group(tensors, length, SIZE: tl.constexpr):
        source, rest = tensors
        none, target = rest
        o = tl.arange(0, SIZE)
        tl.store(target + o, tl.load(source + o, mask=o < length, other=0.0))

    def launch(source, target, length):
        if grouped:
            copy_group[(1,)]((source, (None, target)), length, SIZE=8)
        else:
            copy[(1,)](source, target, length, SIZE=8)

    memory, target = torch.ones(16), torch.empty(8)
    with bounds_checked() as seen:
        launch(memory[4:11], target, 7)
        assert seen["accesses"] == 2
        for source, out, length in ((memory[4:11], target, 8), (memory[4:12], target[:7], 8)):
            with pytest.raises(Exception, match="outside every argument"):
                launch(source, out, length)
    assert target.tolist() == [1] * 7 + [0]
