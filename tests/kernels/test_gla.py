"""gla beyond the contract tests: rows of a tile after the end of a sequence."""

import numpy as np
import pytest
import torch

import hf_memmix_kernels as K


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads what the interpreter computes in rows nobody stores")
@pytest.mark.parametrize("cu_seqlens", [None, [0, 20, 21, 40]], ids=["plain", "packed"])
def test_gla_computes_no_infinite_values_after_the_end(cu_seqlens, monkeypatch):
    """In a row after the end, the decay until the end would be e to a large power; inf times a zero score is NaN."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    q, k, v = (torch.randn(1, 40, 1, 16, requires_grad=True) for _ in range(3))
    log_decay = torch.full((1, 40, 1), -100.0, requires_grad=True)
    boundaries = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    with np.errstate(invalid="raise"):
        o, state = K.chunk_gla(q, k, v, log_decay, cu_seqlens=boundaries, chunk_size=64)
        (o.sum() + state.sum()).backward()
