"""Native code on a CPU: how it is compiled, kept and loaded, what happens without a compiler, and that its functions
of several ops equal these ops. test_contract.py compares the ops themselves with their references.
"""

import ctypes
import math
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from checks import error
from ops_table import OPS, Shape
from torch.autograd import forward_ad

from hf_memmix_kernels import (
    _native,
    chunk_gka,
    chunk_gla,
    chunk_lattice,
    chunk_window,
    coffee_step,
    gka_step,
    gla_step,
    lattice_step,
    naive_window,
    short_conv_step,
    window_step,
)
from hf_memmix_kernels.gka import native_path as gka_native_path
from hf_memmix_kernels.rowwise import decay, gated_norm, rotate, unit_heads
from hf_memmix_kernels.short_conv import Convolution, unit_heads_after_convolutions
from hf_memmix_kernels.window import window_state_shapes

pytestmark = pytest.mark.skipif(_native.compiler() is None, reason="needs a C++ compiler")

ONE_STEP = """
import torch
from hf_memmix_kernels import gla_step
from hf_memmix_kernels._native import library
t = torch.ones(1, 1, 2, 8)
gla_step(t, t, t, torch.zeros(1, 1, 2), torch.zeros(1, 2, 8, 8))
assert library("gla") is not None
"""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process, with an empty cache folder; the device chooses the path. Returns this user's part of it."""
    monkeypatch.delenv("HF_MEMMIX_BACKEND", raising=False)
    monkeypatch.setenv("HF_MEMMIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_native, "_loaded", {})
    return tmp_path / "cache" / f"native-{os.getuid()}"


def gka_token(state=None):
    """The output of one `gka_step` of a fixed token, and the state after it."""
    op = next(op for op in OPS if op.name == "gka")
    torch.manual_seed(0)
    shape = Shape(2, 1, 4, 2, 24, 16)
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, 2, torch.float32)
    return gka_step(*inputs.values(), state), *state


def on_torch_path(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setenv("HF_MEMMIX_BACKEND", "torch")
        return call()


def test_it_is_compiled_once_and_prints_nothing(fresh, monkeypatch, capfd):
    first = gka_token()
    (kept,) = fresh.iterdir()
    assert kept.name.startswith("gka-") and kept.suffix == ".so"
    monkeypatch.setattr(_native, "_loaded", {})
    monkeypatch.setattr(_native, "_run", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert all(torch.equal(a, b) for a, b in zip(first, gka_token(), strict=True))
    assert [path.name for path in fresh.iterdir()] == [kept.name]
    assert capfd.readouterr() == ("", "")


def a_compiler(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no C\\+\\+ compiler"),
        ("echo unknown flag >&2; exit 1", "unknown flag"),
        ("sleep 20; exit 1", "timed out"),
        ("printf 'Fehler \\374' >&2; exit 1", "Fehler"),
        ("echo rubbish > $(echo $* | sed 's/.* -o //')", "cannot be compiled"),
    ],
    ids=["none", "fails", "hangs", "writes no UTF-8", "writes rubbish"],
)
def test_without_a_working_compiler_the_torch_path_runs(script, message, fresh, tmp_path, monkeypatch, capfd):
    start = time.monotonic()
    command = str(tmp_path / "missing") if script is None else a_compiler(tmp_path / "c++", script)
    monkeypatch.setenv("CXX", command)
    monkeypatch.setattr(_native, "SECONDS", 0.5)
    want = on_torch_path(monkeypatch, gka_token)
    assert all(torch.equal(a, b) for a, b in zip(gka_token(), want, strict=True))
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    with pytest.raises(ValueError, match=f"(?s)HF_MEMMIX_BACKEND=native.*{message}.*unset it"):
        gka_token()
    assert time.monotonic() - start < 15, "waited for a child of the compiler"


@pytest.mark.product  # a new process
def test_a_cache_folder_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    """The code is compiled for this process alone."""
    want = on_torch_path(monkeypatch, gka_token)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_MEMMIX_CACHE", str(tmp_path / "file" / "cache"))
    got = gka_token()
    assert _native.library("gka") is not None
    assert all(error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.product  # a new process
def test_a_file_that_was_cut_off_is_compiled_again(fresh, monkeypatch):
    """The loader would crash the process on it."""
    want = gka_token()
    (kept,) = fresh.iterdir()
    complete = kept.read_bytes()
    kept.unlink()  # this process has it in memory
    kept.write_bytes(complete[: len(complete) // 2])
    monkeypatch.setattr(_native, "_loaded", {})
    assert all(torch.equal(a, b) for a, b in zip(gka_token(), want, strict=True))
    assert [path.read_bytes() for path in fresh.iterdir()] == [complete]


@pytest.mark.product  # its parts have tests
def test_code_of_others_is_not_loaded(fresh, monkeypatch):
    """In a cache that others can write, they could replace the code that this user runs."""
    gka_token()
    (kept,) = fresh.iterdir()
    assert fresh.stat().st_mode & 0o777 == 0o700
    fresh.chmod(0o777)
    loaded, load = [], _native.ctypes.CDLL
    monkeypatch.setattr(_native.ctypes, "CDLL", lambda path: loaded.append(path) or load(path))
    monkeypatch.setattr(_native, "_loaded", {})
    assert _native.library("gka", needed=True) is not None
    assert len(loaded) == 1 and loaded != [str(kept)]


def test_a_user_without_a_home(fresh, monkeypatch):
    monkeypatch.delenv("HF_MEMMIX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_native.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert _native.library("gla", needed=True) is not None


@pytest.mark.product  # a new process
def test_two_processes_at_once(fresh):
    command = [sys.executable, "-c", ONE_STEP]
    processes = [subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(p.communicate(timeout=300)[1], p.returncode) for p in processes] == [("", 0), ("", 0)]
    (kept,) = fresh.iterdir()
    assert kept.suffix == ".so"


def test_two_threads_at_once(fresh, monkeypatch):
    calls, compile_once = [], _native.compile_source
    monkeypatch.setattr(_native, "compile_source", lambda *args: calls.append(args) or compile_once(*args))
    threads = [threading.Thread(target=_native.library, args=("gla",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and _native.library("gla") is not None


def test_a_changed_source_is_compiled_anew(fresh, monkeypatch, tmp_path):
    keys = {_native._key(_native.ROOT / "gla" / "native.cpp", _native.compiler())}
    keys.add(_native._key(_native.ROOT / "gka" / "native.cpp", _native.compiler()))
    monkeypatch.setattr(_native, "_processor", lambda: "another processor")
    keys.add(_native._key(_native.ROOT / "gka" / "native.cpp", _native.compiler()))
    assert len(keys) == 3


ELEMENTWISE = """
#include "native.h"
EXPORT void elementwise(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = NAME(x[i]);
}
"""


@pytest.mark.parametrize(
    ("name", "function", "units"), [("exponential", torch.exp, 2), ("softplus", torch.nn.functional.softplus, 4)]
)
def test_a_function_of_numbers_is_right_for_every_argument(name, function, units, tmp_path):
    """Each exponent of 2 and both ends: e^-inf came out between e^-88 and e^-87.68 once, where a gate is all but
    closed."""
    source = tmp_path / "native.cpp"
    source.write_text(ELEMENTWISE.replace("native.h", str(_native.ROOT / "native.h")).replace("NAME", name))
    code = ctypes.CDLL(str(_native.compile_source(source, tmp_path, name, _native.compiler())))
    ends = torch.tensor([math.inf, 1e30, 88.7229, 88.72283, -87.336544, -87.34, -88.0, -104.0, -1e30])
    x = torch.cat([torch.linspace(-90, 90, 1_000_001), ends, -ends])
    y = torch.empty_like(x)
    code.elementwise(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y)), ctypes.c_int64(x.numel()))
    truth = function(x.double())
    rounded = truth.float().double()  # infinity where float32 ends
    rounded[truth < 2.0**-126] = 0
    finite = rounded.isfinite() & (rounded > 0)
    assert torch.equal(y[~finite].double(), rounded[~finite])
    assert ((y.double() - rounded).abs() / rounded)[finite].max() < units * 2.0**-23
    x.fill_(math.nan)
    code.elementwise(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y)), ctypes.c_int64(x.numel()))
    assert y.isnan().all()


@pytest.mark.parametrize("name", ["gka", "lattice_dec", "lattice_enc", "coffee", "gla", "gated_delta"])
def test_threads_do_not_change_the_result(name, monkeypatch):
    op = next((op for op in OPS if op.name == name), next(op for op in OPS if op.name.startswith(name[:7])))
    shape = Shape(3, 70, 4, 4, 16, 16)
    inputs, state = op.draw(shape, torch.float32), op.draw_state(shape, 3, torch.float32)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")

    def gradients():
        leaves = {k: t.clone().requires_grad_() for k, t in inputs.items()}
        o, final = op.run(op.fast, leaves, state)
        return o, *final, *torch.autograd.grad(o.square().sum() + sum(s.sum() for s in final), list(leaves.values()))

    alone = gradients()
    monkeypatch.setattr(_native, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), alone, strict=True))


@pytest.mark.parametrize("own", [False, True], ids=["torch's threads", "own threads"])
def test_threads_divide_the_rows_and_hand_on_an_interrupt(own, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    if own:
        monkeypatch.setattr(_native, "_in_torchs_threads", lambda: None)
    found = []
    _native.over_rows(lambda first, last: found.extend(range(first, last)), 20, 1e9)
    assert sorted(found) == list(range(20))

    def interrupted(first, last):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _native.over_rows(interrupted, 20, 1e9)


def pages_or_rows(paged: bool, *rows):
    """Rows as they are, or in the pages 2, 0, 3 of a pool."""
    if not paged:
        return rows, None
    indices, pools = torch.tensor([2, 0, 3]), []
    for row in rows:
        pool = torch.zeros(5, *row.shape[1:], dtype=row.dtype)
        pool[indices] = row
        pools.append(pool)
    return tuple(pools), indices


@torch.no_grad()
@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_equal_convolutions_and_unit_heads(dtype, rotated, paged, path, monkeypatch):
    torch.manual_seed(0)
    sizes = {"q": (32, 16), "k": (16, 16)} | ({"v": (24, 0)} if rotated else {})
    x = [torch.randn(3, 1, channels, dtype=dtype) for channels, _ in sizes.values()]
    weights = [torch.randn(channels, 4, dtype=dtype) for channels, _ in sizes.values()]
    states = [torch.randn(3, channels, 3, dtype=dtype) for channels, _ in sizes.values()]
    angles = tuple(torch.randn(3, 1, 5, dtype=dtype) for _ in "cs") if rotated else (None, None)

    pools, indices = pages_or_rows(paged, *[s.clone() for s in states])
    convolutions = [
        Convolution(*parts, dim) for *parts, (_, dim) in zip(x, weights, pools, sizes.values(), strict=True)
    ]
    monkeypatch.setenv("HF_MEMMIX_BACKEND", path)
    got = unit_heads_after_convolutions(convolutions, *angles, 1e-6, True, indices)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "torch")
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    for i, (_, dim) in enumerate(sizes.values()):
        want = short_conv_step(x[i], weights[i], None, states[i], "silu")
        want = unit_heads(want.unflatten(-1, (-1, dim)), *angles, 1e-6).flatten(2) if dim else want
        assert error(got[i], want) <= tolerance
        assert torch.equal(pools[i] if indices is None else pools[i][indices], states[i])


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("dim", [5, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_a_window_equals_naive(dtype, dim, paged, monkeypatch):
    """Heads of part and whole registers, groups of five heads, rows with 0, 9 and 60 tokens, in several threads."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    monkeypatch.setattr(_native, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    torch.manual_seed(0)
    window, sinks, past = 18, 3, (0, 9, 60)
    q, k, v = (torch.randn(3, 61, heads, dim).to(dtype) for heads in (10, 2, 2))
    logits = torch.randn(10)
    shapes = window_state_shapes(3, 2, dim, window, sinks)
    states = [torch.zeros(s, dtype=t) for s, t in zip(shapes, (dtype, dtype, torch.long), strict=True)]
    for row, count in enumerate(past):
        if count:
            _, found = chunk_window(*(t[row : row + 1, :count] for t in (q, k, v)), window=window, sinks=sinks)
            for state, part in zip(states, found, strict=True):
                state[row] = part[0]
    given = {"window": window, "sinks": sinks, "softcap": 3.0, "sink_logits": logits}
    token = [torch.stack([t[row, count] for row, count in enumerate(past)])[:, None] for t in (q, k, v)]
    pools, indices = pages_or_rows(paged, *states)
    got = window_step(*token, pools, state_indices=indices, **given)
    for row, count in enumerate(past):
        want = naive_window(*(t[row : row + 1, : count + 1] for t in (q, k, v)), **given)[:, -1:]
        assert error(got[row : row + 1], want) < (1e-6 if dtype == torch.float32 else 4e-3)
        page = row if indices is None else indices[row]
        slot = count if count < sinks else sinks + (count - sinks) % window
        assert torch.equal(pools[0][page, slot], token[1][row, 0]) and (pools[2][page] == count + 1).all()


def test_gradients_take_the_torch_path(monkeypatch):
    """Native code of the rowwise functions has no gradient."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    x = torch.randn(1, 1, 2, 8, requires_grad=True)
    unit_heads(x, None, None, 1e-6).sum().backward()
    assert torch.isfinite(x.grad).all() and x.grad.any()


@pytest.mark.parametrize(("name", "wrapped"), [("gka", "v"), ("lattice", "v"), ("coffee", "u"), ("gla", "v")])
def test_torch_func_gives_the_gradient_of_native_code(name, wrapped, monkeypatch):
    """Tensors that torch.func wraps have no memory for native code; what reads them is the torch path."""
    op = next(op for op in OPS if op.name.startswith(name))
    inputs = op.draw(Shape(1, 70, 2, 2, 16, 16), torch.float32)
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")

    def loss(v):
        return op.run(op.fast, inputs | {wrapped: v})[0].square().sum()

    leaf = inputs[wrapped].clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    assert error(torch.func.grad(loss)(inputs[wrapped]), want) <= op.tolerance(torch.float32, grad=True)


# ---- what only native code could get wrong: it reads memory by its address


WINDOW = (torch.float32, torch.float32, torch.long)  # the dtypes of its states


def steps_and_sequences():
    """Outputs of every function with native code, for fixed inputs."""
    torch.manual_seed(0)
    cpu = {"dtype": torch.float32, "device": "cpu"}
    q, k, v = (torch.randn(2, 1, 2, 8, **cpu) for _ in "qkv")
    gates, states = torch.rand(2, 1, 2, **cpu), [torch.randn(2, 2, 8, 8, **cpu) for _ in "abcd"]
    states[0] = states[0] @ states[0].mT
    x, weight = torch.randn(2, 1, 8, **cpu), torch.randn(8, 4, **cpu)
    found = [gla_step(q, k, v, -gates, states[2]), gka_step(q, k, v, -gates, None, None, tuple(states[:2]))]
    found.append(lattice_step(q, k, v, gates, state=torch.nn.functional.normalize(states[3], dim=-2)))
    found.append(coffee_step(x, -weight.abs(), weight, weight, state=torch.zeros(2, 8, 4, **cpu)))
    ring = [
        torch.zeros(s, device="cpu", dtype=d) for s, d in zip(window_state_shapes(2, 2, 8, 4, 1), WINDOW, strict=True)
    ]
    found.append(window_step(q, k, v, ring, window=4, sinks=1))
    found.append(short_conv_step(x, weight, None, torch.zeros(2, 8, 3, **cpu)))
    found += [unit_heads(q, None, None, 1e-6), rotate(q, gates, gates), *decay(x, weight[:, 0], weight[:, 1])]
    found.append(gated_norm(q, k, weight[:, 0], 1e-6))
    leaf = q.clone().requires_grad_()
    for call in (chunk_gka, chunk_lattice, chunk_gla):
        o, final = call(leaf, k, v, gates if call is chunk_lattice else -gates)
        found += [o.detach(), *torch.autograd.grad(o.square().sum(), leaf)]
    return found


@pytest.mark.parametrize(
    ("setting", "value"),
    [(torch.set_default_dtype, dtype) for dtype in (torch.bfloat16, torch.float64)]
    + [(torch.set_default_device, "meta")],
    ids=lambda value: getattr(value, "__name__", str(value)),  # the same in every process
)
def test_default_dtype_and_device_do_not_matter(setting, value, monkeypatch):
    """Memory for results that had another dtype would be too small, on another device it would be none."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    want = steps_and_sequences()
    for cached in (gka_native_path._schedule, _native._equal_starts):
        cached.cache_clear()
    before = torch.get_default_dtype() if setting is torch.set_default_dtype else None
    try:
        setting(value)
        got = steps_and_sequences()
    finally:
        setting(before)
    assert all(g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_tensors_of_several_devices_are_refused(monkeypatch):
    """By the torch path: native code would read address 0."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    t, gates = torch.ones(1, 1, 2, 8), torch.zeros(1, 1, 2)
    state, meta = torch.zeros(1, 2, 8, 8), torch.ones(8, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        gated_norm(t, None, meta, 1e-6)
    with pytest.raises(RuntimeError, match="meta"):
        gla_step(t, t, t, gates, state.to("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        chunk_gka(t, t, t.to("meta"), gates)
    with pytest.raises(RuntimeError, match="meta"):
        lattice_step(t, t, t, gates.to("meta"), state=state)


@pytest.mark.parametrize("page", [-1, 3])
def test_pages_that_do_not_exist_are_refused(page, monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    t, pool, indices = torch.ones(2, 1, 2, 8), torch.zeros(3, 2, 8, 8), torch.tensor([0, page])
    with pytest.raises(IndexError, match=f"page {page}.*0 to 2"):
        gla_step(t, t, t, torch.zeros(2, 1, 2), pool, state_indices=indices)
    assert not pool.any()


@pytest.mark.parametrize("op", [chunk_gka, chunk_lattice, chunk_gla])
def test_packed_boundaries(op, monkeypatch):
    """Boundaries outside of the tokens are refused; the output of tokens of no sequence is zero."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    t, gates = torch.ones(1, 6, 2, 8), torch.zeros(1, 6, 2)
    for wrong in ([0, 7], [0, 4, 2, 6], [-1, 6]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 6"):
            op(t, t, t, gates, cu_seqlens=torch.tensor(wrong))
    o, _ = op(t, t, t, gates, cu_seqlens=torch.tensor([0, 0, 4]))
    assert torch.equal(o[:, :4], op(t[:, :4], t[:, :4], t[:, :4], gates[:, :4])[0]) and not o[:, 4:].any()


def test_no_rows(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    t, gates = torch.ones(0, 3, 2, 8), torch.zeros(0, 3, 2)
    for op in (chunk_gka, chunk_lattice, chunk_gla):
        assert op(t, t, t, gates)[0].shape == t.shape


def test_nan_stays_in_its_sequence(monkeypatch):
    """One thread computes both sequences of GKA. The second one begins with padding, where H is zero."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    op = next(op for op in OPS if op.name == "gka")
    inputs = op.draw(Shape(2, 20, 1, 1, 9, 9), torch.float32)
    inputs["k"][0, 3] = float("nan")
    inputs["beta"][1, :5] = 0
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    grads = torch.autograd.grad(op.run(op.fast, leaves, None)[0].sum(), list(leaves.values()))
    assert not torch.isfinite(grads[1][0]).all()
    for name, grad in zip(leaves, grads, strict=True):
        assert torch.isfinite(grad[1]).all(), name


def test_autograd_knows_that_a_step_wrote_the_state(monkeypatch):
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    t, gates = torch.ones(1, 1, 2, 8, requires_grad=True), torch.zeros(1, 1, 2)
    state = torch.ones(1, 2, 8, 8)
    loss = (t.sum() * state).sum()
    gla_step(t, t, t, gates, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@torch.no_grad()
def test_forward_derivatives_and_traces(monkeypatch):
    """Native code has no forward-mode derivative, and torch.jit.trace does not see it: the torch path runs."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "native")
    x, tangent = torch.randn(2, 1, 1, 2, 8)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(unit_heads(forward_ad.make_dual(x, tangent), None, None, 0.0)).tangent
    _, want = torch.autograd.functional.jvp(lambda x: x / x.norm(dim=-1, keepdim=True), x, tangent)
    assert error(found, want) < 1e-6
    traced = torch.jit.trace(lambda x: unit_heads(x, None, None, 1e-6), (torch.ones_like(x),))
    assert error(traced(x), unit_heads(x, None, None, 1e-6)) < 1e-6


@pytest.mark.product  # a new process
def test_a_fork_while_another_thread_compiles(fresh):
    """The child does not wait for the parent's thread."""
    code = """
import os, threading, time
from hf_memmix_kernels import _native
load = _native._load
_native._load = lambda op: time.sleep(1) or load(op)
thread = threading.Thread(target=_native.library, args=("gla",))
thread.start()
time.sleep(0.3)
child = os.fork()
if not child:
    os._exit(_native.library("gla") is None)
assert os.waitpid(child, 0)[1] == 0
thread.join()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
