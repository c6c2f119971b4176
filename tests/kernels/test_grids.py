"""Only the first dimension of a grid grows with tokens and sequences, because CUDA limits the others to 65535."""

import os

import pytest
import torch
from checks import error, outputs_and_gradients
from ops_table import DEVICE, OPS, Shape

import hf_memmix_kernels as K

LIMIT = 65535  # limit of a grid's second and third dimension; the limit of the first is 2^31 - 1

every_op = pytest.mark.parametrize("op", OPS, ids=str)


def run_everything(op, sequences: int, tokens: int, packed: bool) -> None:
    """Run forward, backward and a step with `sequences` sequences of `tokens` tokens."""
    shape = Shape(1, sequences * tokens, 4, 2, 32, 32) if packed else Shape(sequences, tokens, 4, 2, 32, 32)
    bounds = torch.arange(sequences + 1, dtype=torch.int32) * tokens if packed else None
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, sequences, torch.float32)
    outputs_and_gradients(op, op.fast, inputs, state, bounds, weights=[])
    if not packed:
        with torch.no_grad():
            op.step(op, op.tokens(inputs, slice(0, 1)), op.draw_state(shape, sequences, torch.float32))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="reads the grids of interpreted kernels")
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
@every_op
def test_tokens_and_sequences_are_on_the_first_dimension(op, packed, monkeypatch):
    """With three times as many tokens or sequences, only the first dimension of the grids changes. No kernel runs."""
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    grids = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *args, **options: grids.append(self.grid))
    small, longer, more = [
        (run_everything(op, sequences, tokens, packed), grids[:], grids.clear())[1]
        for sequences, tokens in ((2, 200), (2, 600), (6, 200))
    ]
    assert small != more
    for each in (longer, more):
        assert {grid[1:] for grid in each} == {grid[1:] for grid in small}


@pytest.mark.gpu
@every_op
def test_more_sequences_than_a_dimension_holds(op):
    """The last of 70,000 packed sequences give the same results as alone, forward and backward."""
    sequences, tokens, few = LIMIT + 4465, 2, 50
    shape = Shape(1, sequences * tokens, 1, 1, 16, 16)
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * tokens
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, sequences, torch.float32)
    weights = []
    got = outputs_and_gradients(op, op.fast, inputs, state, bounds, weights=weights)
    last = op.tokens(inputs, slice(-few * tokens, None))
    weights = [weights[0][:, -few * tokens :], *(w[-few:] for w in weights[1:])]
    want = outputs_and_gradients(op, op.fast, last, tuple(s[-few:] for s in state), bounds[: few + 1], weights=weights)
    for name, alone in want.items():
        if name.removeprefix("d ") not in op.parameters:
            among = got[name][-few:] if "state" in name else got[name][:, -few * tokens :]
            assert error(among, alone) <= op.tolerance(torch.float32), name


@pytest.mark.gpu
def test_ska_with_more_chunks_than_a_dimension_holds():
    """70,000 tokens with one operator per token equal the torch path, also in the gradients."""
    leaves = [torch.randn(1, LIMIT + 4465, 1, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    results = []
    for backend in ("triton", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_MEMMIX_BACKEND", backend)
            o, _ = K.chunk_ska(*leaves, chunk_size=1, eps=0.05)
            results.append([o, *torch.autograd.grad(o.square().sum(), leaves)])
    ska = next(op for op in OPS if op.name == "ska")
    for got, want in zip(*results, strict=True):
        assert error(got, want) <= ska.tolerance(torch.float32)
