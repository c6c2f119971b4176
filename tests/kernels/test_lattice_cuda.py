"""The walk back of Lattice's "dec" in CUDA C++: when it runs, what it computes on a GPU, and, where a C++ compiler is
installed, what it computes in an emulator of a block of threads (cuda_emulator.cpp).
"""

import contextlib
import ctypes
import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import error
from hard_inputs import HARD

import hf_memmix_kernels as K
from hf_memmix_kernels import _cuda
from hf_memmix_kernels._chunks import checkpoint_slots
from hf_memmix_kernels._device import H200
from hf_memmix_kernels._native import compiler
from hf_memmix_kernels.lattice import launch_cuda
from hf_memmix_kernels.lattice.naive import naive_write
from hf_memmix_kernels.lattice.sizes import CHECKPOINT

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


def sharp(inputs: list) -> list:
    """k of one slot and large steps: a slot is scaled in the token, because a is near zero or large."""
    q, k, v, gamma, state = inputs
    one = F.one_hot(k.float().abs().argmax(-1), 64) * k.float().sum(-1, keepdim=True).sign()
    return [q, one.to(k.dtype), v, 6 * gamma, state]


def small_values(inputs: list) -> list:
    """v near zero, keys with a common part: what lies along a slot grows at every token if it is not removed."""
    q, k, v, gamma, state = inputs
    common = F.one_hot(torch.tensor(5, device=k.device), 64) / 2
    return [q, F.normalize(k.float() + common, dim=-1).to(k.dtype), 0.001 * v, gamma, state]


def hard(name: str):
    """The change of this row of hard_inputs.py."""
    return lambda inputs: [*HARD[name](dict(zip(("q", "k", "v", "gamma"), inputs, strict=False))).values(), inputs[4]]


CHANGED = {name: hard(name) for name in HARD if "decay" not in name} | {"sharp": sharp, "small values": small_values}
CASES = {**LENGTHS, **dict.fromkeys(CHANGED, [100]), "small values": [399]}


def case(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> tuple[list, dict]:
    inputs, options = draw(CASES[name], dtype, device)
    return (CHANGED[name](inputs) if name in CHANGED else inputs), options


def results(function, inputs: list, options: dict) -> dict[str, torch.Tensor]:
    """The op's results and all gradients, of a loss with random weights."""
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    o, state = function(*inputs[:4], initial_state=inputs[4], **options)
    weights = [torch.randn(x.shape, device=x.device, dtype=torch.float64) for x in (o, state)]
    loss = sum((x.double() * w).sum() for x, w in zip((o, state), weights, strict=True))
    return dict(zip(NAMES, (o, state, *torch.autograd.grad(loss, inputs)), strict=True))


@pytest.fixture(autouse=True)
def by_default(monkeypatch):
    monkeypatch.delenv("HF_MEMMIX_NVRTC", raising=False)
    _cuda.has_nvrtc.cache_clear()
    yield
    _cuda.has_nvrtc.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_walk_back_against_float64(name, dtype, monkeypatch, poisoned_empty):
    """Errors are at most those of Triton's kernels, but for rounding in another order."""
    inputs, options = case(name, dtype, "cuda")
    assert launch_cuda.can_walk_back(*inputs[:3], inputs[4])
    want = results(K.naive_lattice, [x.double() for x in inputs], options)
    got = results(K.chunk_lattice, inputs, options)
    monkeypatch.setattr("hf_memmix_kernels.lattice.launch.can_walk_back", lambda *_: False)
    triton = results(K.chunk_lattice, inputs, options)
    for output in NAMES:
        assert error(got[output], want[output]) <= 1.3 * error(triton[output], want[output]) + 2e-6, output


def moved(x: torch.Tensor) -> torch.Tensor:
    """x at an address that is no multiple of 16 bytes."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    view = buffer[1:].view(x.shape)
    return view.copy_(x)


@pytest.mark.gpu
def test_inputs_at_any_address_have_the_same_gradients(monkeypatch):
    """The kernel loads 16 bytes at a time; a view of a user's tensor may begin at any element."""
    inputs, options = case("ragged", device="cuda")
    want = results(K.chunk_lattice, inputs, options)
    o, state = torch.randn_like(want["o"]), torch.randn_like(want["state"])

    def gradients(change):
        given = [change(x.detach()).requires_grad_() for x in inputs]
        outputs = K.chunk_lattice(*given[:4], initial_state=given[4], **options)
        return torch.autograd.grad(outputs, given, [change(o), change(state)])

    for ours, expected in zip(gradients(moved), gradients(torch.clone), strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_walk_back_reads_aligned_copies(monkeypatch):
    """What the kernel would be given, on a CPU."""
    given = []
    monkeypatch.setattr(launch_cuda, "_kernel", lambda *_: lambda programs, *operands: given.extend(operands))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    (q, k, v, gamma, state), _ = case("one token")
    first = [moved(x) for x in (state, v, q, k, gamma, v, v, gamma, gamma, gamma)]
    assert all(x.data_ptr() % 16 for x in first)
    kept = torch.zeros(4)
    launch_cuda.walk_back(first[:2], first[2:5], first[5:], (kept, kept), (kept,) * 3, kept, None)
    assert len(given) == 19 and given[10] is kept
    for ours, expected in zip(given[:10], first, strict=True):
        assert ours.data_ptr() % 16 == 0 and torch.equal(
            ours, expected.float() if ours.dtype != expected.dtype else expected
        )


EMULATOR = Path(__file__).parent / "cuda_emulator.cpp"


def compile_emulator(*options: str, source: Path = launch_cuda.SOURCE) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    subprocess.run([compiler(), "-std=c++17", "-w", *options, f'-DSOURCE="{source}"', str(EMULATOR)], check=True)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Calls a kernel on CPU tensors: emulated(blocks, tensors, T, H)."""
    path = tmp_path_factory.mktemp("emulated") / "walk_back.so"
    compile_emulator("-O2", "-fPIC", "-shared", "-o", str(path))
    library = ctypes.CDLL(str(path))

    def call(blocks: int, tensors: list, *numbers: int) -> None:
        sizes = [ctypes.c_int(x) for x in numbers]
        addresses = [None if x is None else x.data_ptr() for x in tensors] + [ctypes.addressof(x) for x in sizes]
        library.walk_back(blocks, (ctypes.c_void_p * len(addresses))(*addresses))

    return call


def states(inputs: list, options: dict) -> list[tuple]:
    """(h, p, state before, state after) of every token and head [T, H, ...] by the reference, for each sequence."""
    q, k, v, gamma, first = (x.double() for x in inputs)
    bounds = options["cu_seqlens"]
    rows = [(n, slice(None)) for n in range(len(q))]
    if bounds is not None:
        rows = [(0, slice(*bounds[n : n + 2].tolist())) for n in range(len(first))]
    found = []
    for n, (row, at) in enumerate(rows):
        S, tokens = first[n], []
        for kt, vt, gt in zip(k[row, at], v[row, at], gamma[row, at], strict=True):
            h = (S @ kt[..., None])[..., 0] - vt
            p = (S.mT @ h[..., None])[..., 0]
            scalars = gt[:, None, None], torch.ones_like(gt)[:, None, None]
            after = naive_write(S, kt[..., None], vt[..., None], *scalars, "dec", True, 0.0)
            tokens.append((h, p, S, after))
            S = after
        found.append(tuple(map(torch.stack, zip(*tokens, strict=True))))
    return found


def tiles(state: torch.Tensor) -> torch.Tensor:
    return state.mT.flatten(0, 1).contiguous()


def empty(*shape) -> torch.Tensor:
    return torch.full(shape, float("nan"))


@pytest.mark.product_rows(r"(?!one token|sharp|small values\])")  # the emulator of GPU threads is slow
@pytest.mark.parametrize("name", [*LENGTHS, *sorted({"sharp", "small values", *[*CHANGED][::3]})])
def test_the_walk_back_in_the_emulator(name, emulated):
    """dz, dalpha and the first state's gradient give the gradients of the reference."""
    inputs, options = case(name)
    (q, k, v, gamma, first), bounds = inputs, options["cu_seqlens"]
    B, T, H, _ = v.shape
    leaves = [x.double().requires_grad_() for x in inputs]
    o, state = K.naive_lattice(*leaves[:4], initial_state=leaves[4], **options)
    do, dfinal = torch.randn(v.shape).bfloat16(), torch.randn(first.shape)
    _, _, want_dv, want_dgamma, want_start = torch.autograd.grad((o, state), leaves, (do.double(), dfinal.double()))
    slots = checkpoint_slots(B, T, bounds, CHECKPOINT)
    h, p, a, b = (torch.zeros(B * T, H, 64) for _ in range(4))
    kept, middle = torch.zeros(slots, H, 64, 64), torch.zeros(slots, H, 64, 64)
    for n, (found_h, found_p, before, _) in enumerate(states(inputs, options)):
        begin = n * T if bounds is None else int(bounds[n])
        at = slice(begin, begin + len(found_h))
        h[at], p[at] = found_h, found_p
        row = n * -(-T // CHECKPOINT) if bounds is None else begin // CHECKPOINT + n
        for tile, offset in ((kept, 0), (middle, CHECKPOINT // 2)):
            found = before[offset::CHECKPOINT].mT
            tile[row : row + len(found)] = found
    hh = h.square().sum(-1)
    alpha = -gamma.flatten(0, 1)[..., None] * k.flatten(0, 1).float()
    beta = (1 + alpha.square() * (hh[..., None] - p.square()).clamp_min(0)).rsqrt()
    a, b = beta * (1 - alpha * p), beta * alpha
    end, scratch = tiles(dfinal), empty(len(first) * H, 16, 4096)
    dz, dalpha, dstart = empty(B * T, H, 64), empty(B * T, H, 64), torch.full_like(end, float("nan"))
    emulated(
        len(end),
        [end, do, q, k, gamma, h, p, hh, a, b, kept, middle, dz, dalpha, dstart, scratch, bounds], T, H,
    )  # fmt: skip
    assert error(-dz, want_dv.flatten(0, 1)) <= 5e-6
    assert error(-(k.flatten(0, 1).float() * dalpha).sum(-1), want_dgamma.flatten(0, 1)) <= 1e-5
    # what lies along a slot may be left out, as the op's backward removes it
    start = tiles(first)
    got = dstart - start * (start * dstart).sum(-1, keepdim=True)
    assert error(got.view(first.shape).mT, want_start) <= 5e-6


def test_sizes_are_those_of_the_source(tmp_path):
    """The numbers that launches know, as the compiler counts them."""
    source = tmp_path / "sizes.cu"
    asserted = (
        f"D == {launch_cuda.SIZE} && WARPS == {launch_cuda.WARPS} && sizeof(Shared) == {launch_cuda.SHARED_BACK}"
    )
    source.write_text(f'{launch_cuda.SOURCE.read_text()}\nstatic_assert({asserted}, "sizes");\n')
    compile_emulator("-fsyntax-only", source=source)


def test_inputs_that_the_walk_does_not_take(monkeypatch):
    """It runs 64 slots of size 64 in 16 bits on a GPU; all else goes to Triton or torch."""
    monkeypatch.setattr(launch_cuda, "has_nvrtc", lambda: True)
    monkeypatch.setattr(launch_cuda, "_kernel", lambda *_: ())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr("hf_memmix_kernels._device.of_index", lambda _: H200)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def taken(dtype, size=64, q_dtype=None):
        x, state = torch.zeros(1, 2, 1, 64, dtype=dtype), torch.zeros(1, 1, 64, size)
        return launch_cuda.can_walk_back(x if q_dtype is None else x.to(q_dtype), x, x, state)

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
    launch_cuda._kernel.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert launch_cuda._kernel(0, torch.bfloat16) is None
        assert launch_cuda._kernel(0, torch.bfloat16) is None
    launch_cuda._kernel.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        f"lattice: Triton's kernel runs, because that in CUDA C++ does not: {failure}"
    ]


@pytest.mark.parametrize("case", ["present", "missing", "broken", "off", "no GPU"])
def test_when_nvrtc_is_used(case, monkeypatch):
    """By default where it is present."""
    bindings = types.SimpleNamespace(
        nvrtc=types.SimpleNamespace(nvrtcVersion=lambda: (case == "broken", 13, 0)), driver=""
    )
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None if case == "missing" else bindings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: case != "no GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if case == "off":
        monkeypatch.setenv("HF_MEMMIX_NVRTC", "0")
    assert _cuda.has_nvrtc() == (case == "present")
