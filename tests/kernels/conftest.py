"""The kernels' tests run every op on its torch path, its native path and its Triton path. Without a GPU, Triton's
interpreter runs it.
"""

from pathlib import Path

import interpreter
import pytest
import torch

import hf_memmix_kernels


@pytest.hookimpl(trylast=True)  # after tests/conftest.py has switched the interpreter on
def pytest_configure():
    interpreter.enable()


# ops with native code; those of them whose whole forward and backward pass is native, not only the step
NATIVE = {path.parent.name for path in Path(hf_memmix_kernels.__file__).parent.glob("*/native.cpp")}
NATIVE_CHUNKS = NATIVE - {"rowwise", "window", "ska"}


@pytest.fixture(params=["torch", "native", "triton"])
def backend(request, monkeypatch):
    """Every path, chosen by the environment variable `HF_MEMMIX_BACKEND`."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", request.param)
    return request.param


@pytest.fixture(autouse=True)
def without_tapes(monkeypatch):
    """Tests change what launch functions read, which a tape does not notice. test_tape.py switches tapes on again."""
    try:
        from hf_memmix_kernels import _tape
    except ImportError:  # no Triton
        return
    monkeypatch.setattr(_tape, "ENABLED", False)


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Uninitialised memory holds NaN, so a test fails if a kernel leaves an element unwritten."""
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def poison(t):
        return t.fill_(float("nan")) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", lambda *a, **kw: poison(empty(*a, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **kw: poison(empty_like(*a, **kw)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **kw: poison(new_empty(self, *a, **kw)))


def runs_native_code(item: pytest.Item) -> bool:
    """Whether a test of the native path would run native code; otherwise it repeats the test of the torch path."""
    if torch.cuda.is_available():
        return False
    op = item.callspec.params.get("op")
    name = (
        item.path.stem.removeprefix("test_").removeprefix("guards_")
        if op is None
        else max((n for n in (*NATIVE, "") if op.name.startswith(n)), key=len)
    )
    return name == "rowwise" or name in NATIVE_CHUNKS or (name in NATIVE and "step" in item.name)


def cannot_run(item: pytest.Item) -> bool:
    """Whether a test needs a GPU that is not here, or would run native code that the op does not have."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return True
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("backend") == "native" and not runs_native_code(item)


def pytest_collection_modifyitems(config, items):
    """Deselect tests that cannot run here: skipped, they would hide those that should have run."""
    without = {item for item in items if cannot_run(item)}
    if without:
        config.hook.pytest_deselected(items=[*without])
        items[:] = [item for item in items if item not in without]
