"""Tapes repeat what launch functions do, bit by bit, and are not played where anything could differ."""

import pytest
import torch
from checks import outputs_and_gradients
from draw import DEVICE
from ops_table import OPS, Shape
from pool import Pool

from hf_memmix_kernels import rowwise

_tape = pytest.importorskip("hf_memmix_kernels._tape")

INTERPRETED = _tape._interpreted
SHAPE = Shape(1, 20, 2, 1, 16, 16) if INTERPRETED else Shape(2, 150, 4, 2, 64, 64)


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    """Tapes are on, none is written yet, and `tapes()` gives those that are written."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    monkeypatch.setattr(_tape.switch, "on", True)
    _tape.forget()
    yield lambda: [tape for written, _ in _tape._forms for tape in written.values()]
    _tape.forget()


def assert_same(calls, monkeypatch):
    """Every call gives the same with tapes (the second writes them, the others play them) and without."""
    for call in calls:
        got = call()
        with monkeypatch.context() as patch:
            patch.setattr(_tape.switch, "on", False)
            want = call()
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert got[name].dtype == x.dtype and got[name].stride() == x.stride(), name
            assert torch.equal(got[name].nan_to_num(), x.nan_to_num()), name


@pytest.mark.parametrize("op", [op for op in OPS if not op.brief or not INTERPRETED], ids=str)
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_an_op(op, carried, tapes, monkeypatch):
    """Outputs and gradients of whole sequences."""
    weights = []

    def call(inputs, state):
        return lambda: outputs_and_gradients(op, op.fast, inputs, state, weights=weights)

    draws = [(op.draw(SHAPE, torch.float32), op.draw_state(SHAPE, SHAPE.B, torch.float32)) for _ in range(3)]
    assert_same([call(inputs, state if carried else None) for inputs, state in draws], monkeypatch)
    print("\nREFUSED", op, [t for t in tapes() if isinstance(t, str)], sum(callable(t) for t in tapes()))
    assert any(callable(tape) for tape in tapes())
