"""The kernels' tests run every op on its torch path and its Triton path. Without a GPU, Triton's
interpreter runs it.
"""

import interpreter
import pytest
import torch

interpreter.enable()


@pytest.fixture(params=["torch", "triton"])
def backend(request, monkeypatch):
    """Both paths, chosen by the environment variable `HF_MEMMIX_BACKEND`."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", request.param)
    return request.param


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Uninitialised memory holds NaN, so a test fails if a kernel leaves an element unwritten."""
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def poison(t):
        return t.fill_(float("nan")) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", lambda *a, **kw: poison(empty(*a, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **kw: poison(empty_like(*a, **kw)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **kw: poison(new_empty(self, *a, **kw)))
