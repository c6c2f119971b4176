"""The walks of Lattice's "dec" in CUDA C++: when they run, and on a GPU, that they compute what Triton does."""

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from checks import error

import hf_memmix_kernels as K
from hf_memmix_kernels import _cuda
from hf_memmix_kernels.lattice import launch_cuda

NAMES = ("o", "state", "dq", "dk", "dv", "dgamma", "dstate")
LENGTHS = {
    "one token": [1],
    "ragged": [1, 31, 32, 33, 200],
    "whole windows": [64, 128],
    "batched": None,
}


def draw(lengths: list[int] | None, dtype: torch.dtype, device: str) -> tuple[list, dict]:
    """q, k, v, gamma and the first state, of several sequences and 3 heads; and cu_seqlens."""
    torch.manual_seed(0)
    B, T = (2, 77) if lengths is None else (1, sum(lengths))
    N = B if lengths is None else len(lengths)
    q, k, v = (F.normalize(torch.randn(B, T, 3, 64), dim=-1) for _ in range(3))
    state = torch.linalg.qr(torch.randn(N, 3, 64, 64)).Q
    bounds = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).to(device)
    gamma = torch.rand(B, T, 3)
    gamma[:, T // 2] = 0  # padding writes nothing
    return [x.to(device, dtype) for x in (q, k, 2 * v)] + [gamma.to(device), state.to(device)], {"cu_seqlens": bounds}


def results(function, inputs: list, options: dict) -> dict[str, torch.Tensor]:
    """The op's results and all gradients, of a loss with random weights."""
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    o, state = function(*inputs[:4], initial_state=inputs[4], **options)
    weights = [torch.randn(x.shape, device=x.device, dtype=torch.float64) for x in (o, state)]
    loss = sum((x.double() * w).sum() for x, w in zip((o, state), weights, strict=True))
    return dict(zip(NAMES, (o, state, *torch.autograd.grad(loss, inputs)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_walks_against_float64(lengths, dtype, monkeypatch, poisoned_empty):
    """Errors are at most those of Triton's kernels, but for rounding in another order."""
    inputs, options = draw(lengths, dtype, "cuda")
    assert launch_cuda.can_walk(*inputs[:3], inputs[4])
    want = results(K.naive_lattice, [x.double() for x in inputs], options)
    got = results(K.chunk_lattice, inputs, options)
    monkeypatch.setattr("hf_memmix_kernels.lattice.launch.can_walk", lambda *_: False)
    triton = results(K.chunk_lattice, inputs, options)
    for name in NAMES:
        assert error(got[name], want[name]) <= 1.3 * error(triton[name], want[name]) + 2e-6, name


@pytest.mark.gpu
def test_without_gradients_nothing_is_kept():
    inputs, options = draw(LENGTHS["ragged"], torch.bfloat16, "cuda")
    with torch.no_grad():
        o, state = K.chunk_lattice(*inputs[:4], initial_state=inputs[4], **options)
    want = results(K.chunk_lattice, inputs, options)
    assert torch.equal(o, want["o"])
    assert torch.equal(state, want["state"])


@pytest.mark.gpu
def test_long_inputs_keep_slots_of_unit_norm():
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(1, 20_000, 2, 64, device="cuda"), dim=-1).bfloat16() for _ in range(3))
    gamma = torch.rand(1, 20_000, 2, device="cuda")
    _, state = K.chunk_lattice(q, k, v, gamma)
    assert (state.norm(dim=-2) - 1).abs().max() <= 1e-5


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_walks():
    inputs, _ = draw(None, torch.bfloat16, "cuda")
    with torch.no_grad():
        want = K.chunk_lattice(*inputs[:4], initial_state=inputs[4])[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = K.chunk_lattice(*inputs[:4], initial_state=inputs[4])[0]
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)


def test_sizes_are_those_of_the_source():
    source = launch_cuda.SOURCE.read_text()
    size, warps = (int(re.search(rf"\b{name} = (\d+)", source)[1]) for name in ("D", "WARPS"))
    half = int(re.search(r"\bHALF = (\d+)", source)[1])
    assert (size, warps) == (launch_cuda.SIZE, launch_cuda.WARPS)
    wide, narrow = (
        len(re.findall(r"\w+\[HALF\]\[D\]", line))
        for line in re.search(r"struct Half \{\n(.*)\n(.*)\n", source).groups()
    )
    assert 2 * half * (4 * wide * size + 2 * narrow * size + 8) + 2 * warps * size * 4 == launch_cuda.SHARED_BACK


def test_inputs_that_the_walks_do_not_take(monkeypatch):
    """They run 64 slots of size 64 in 16 bits on a GPU; all else goes to Triton or torch."""
    monkeypatch.setattr(launch_cuda, "has_nvrtc", lambda: True)
    monkeypatch.setattr(launch_cuda, "_kernels", lambda *_: ())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))

    def taken(dtype, size=64, q_dtype=None):
        x, state = torch.zeros(1, 2, 1, 64, dtype=dtype), torch.zeros(1, 1, 64, size)
        return launch_cuda.can_walk(x if q_dtype is None else x.to(q_dtype), x, x, state)

    assert taken(torch.bfloat16)
    assert taken(torch.float16)
    assert not taken(torch.float32)
    assert not taken(torch.bfloat16, size=32)
    assert not taken(torch.bfloat16, q_dtype=torch.float32)


@pytest.mark.parametrize("failure", [ImportError("no cuda-bindings"), RuntimeError("NVRTC does not compile")], ids=str)
def test_kernels_that_do_not_load_are_reported_once(failure, monkeypatch, caplog):
    def load(*_):
        raise failure

    monkeypatch.setattr(launch_cuda, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    launch_cuda._kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert launch_cuda._kernels(0, torch.bfloat16) is None
        assert launch_cuda._kernels(0, torch.bfloat16) is None
    launch_cuda._kernels.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        f"lattice: Triton's kernels run, because those in CUDA C++ do not: {failure}"
    ]


def test_nvrtc_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_NVRTC", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _cuda.has_nvrtc.cache_clear()
    assert not _cuda.has_nvrtc()
    _cuda.has_nvrtc.cache_clear()
