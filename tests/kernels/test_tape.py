"""Tapes repeat what launch functions do, bit by bit, and are not played where anything could differ."""

import copy
import functools
import gc
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from checks import outputs_and_gradients
from draw import DEVICE, randn
from ops_table import OPS, Shape

from hf_memmix_kernels import chunk_window, rowwise

_tape = pytest.importorskip("hf_memmix_kernels._tape")
_player = pytest.importorskip("hf_memmix_kernels._player")
_launcher = pytest.importorskip("hf_memmix_kernels._launcher")
_recorder = pytest.importorskip("hf_memmix_kernels._recorder")
rowwise_launch = pytest.importorskip("hf_memmix_kernels.rowwise.launch")

INTERPRETED = _tape.interpreted
SHAPE = Shape(1, 5, 2, 1, 16, 16) if INTERPRETED else Shape(2, 150, 4, 2, 64, 64)
# the slow interpreter runs one row of those that call the same launch functions, the one with the most tensors
SAME_LAUNCHES = {"gka", "gka_sketched", "coffee"}
ROWS = [op for op in OPS if not (INTERPRETED and (op.brief or op.sequential or op.name in SAME_LAUNCHES))]
every_row = pytest.mark.parametrize("op", ROWS, ids=str)
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    """Tapes are on, none is written yet, and `tapes()` gives those that are written, or why not."""
    monkeypatch.setenv("HF_MEMMIX_BACKEND", "triton")
    monkeypatch.setattr(_tape, "ENABLED", True)
    _tape.forget()
    yield lambda: [tape for written, _ in _tape._tables for tape in written.values()]
    _tape.forget()


def numbers(*shape):
    return randn(*shape, dtype=torch.float32)


def without_tapes(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tape, "ENABLED", False)
        return call()


def assert_same(got: dict, want: dict):
    """Equal bit by bit (NaN equals NaN), with the same strides."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype and got[name].stride() == x.stride(), name
        assert torch.equal(got[name].nan_to_num(), x.nan_to_num()), name


def check_op(op, dtype, carried: bool, tapes, change=lambda x: x):
    """Three draws: the first call is without a tape, the second writes it, the third plays it."""
    weights = []
    for count in range(3):
        inputs = {name: change(x) for name, x in op.draw(SHAPE, dtype).items()}
        state = op.draw_state(SHAPE, SHAPE.B, dtype) if carried else None
        call = functools.partial(outputs_and_gradients, op, op.fast, inputs, state, weights=weights)
        found = call()
        if count:
            assert_same(found, without_tapes(call))
    assert any(callable(tape) for tape in tapes())


def check_step(op, dtype):
    for _ in range(3):
        inputs, state = op.draw(SHAPE, dtype), op.draw_state(SHAPE, SHAPE.B, dtype)
        one, ends = op.tokens(inputs, slice(0, 1)), []
        for run in (functools.partial.__call__, without_tapes):
            mine = tuple(s.clone() for s in state)
            o = run(functools.partial(op.step, op, one, mine))
            ends.append({"o": o} | {f"state{i}": s for i, s in enumerate(mine)})
        assert_same(*ends)


@every_row
def test_an_op(op, tapes):
    """Outputs and gradients of whole sequences, and the decode step."""
    check_op(op, torch.float32, False, tapes)
    check_step(op, torch.float32)


@gpu
@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_an_op_on_a_gpu(op, dtype, carried, tapes):
    if not op.low_precision and dtype != torch.float32:
        pytest.skip("this row makes no promise in 16 bits")
    check_op(op, dtype, carried, tapes)
    check_step(op, dtype)


def misaligned(x):
    """The same numbers, one element after an aligned address."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


@gpu
@every_row
def test_addresses_that_are_not_aligned(op, tapes):
    """Aligned calls have tapes when the others come, and both have after that."""
    for change in (lambda x: x, misaligned, lambda x: x, misaligned):
        check_op(op, torch.bfloat16 if op.low_precision else torch.float32, False, tapes, change)


def rowwise_calls(dtype):
    """The rowwise functions and their gradients."""
    draw = lambda *shape, of=dtype: randn(*shape, dtype=of).requires_grad_()  # noqa: E731
    angles = randn(2, 6, 4, dtype=dtype).cos(), randn(2, 6, 4, dtype=dtype).sin()
    f32 = torch.promote_types(dtype, torch.float32)
    cases = {
        "unit_heads": (lambda x: rowwise.unit_heads(x, *angles, 1e-6), [draw(2, 6, 2, 8)]),
        "rotate": (lambda x: rowwise.rotate(x, *angles), [draw(2, 6, 2, 8)]),
        "gated_norm": (lambda *x: rowwise.gated_norm(*x, 1e-6), [draw(2, 6, 2, 8), draw(2, 6, 2, 8), draw(8)]),
        "gated_product": (rowwise.gated_product, [draw(2, 6, 16), draw(2, 6, 16)]),
        "decay": (lambda *x: torch.stack(rowwise.decay(*x)), [draw(2, 6, 4), draw(4, of=f32), draw(4, of=f32)]),
    }

    def run(function, tensors):
        out = function(*tensors)
        grads = torch.autograd.grad(out.double().square().sum(), tensors)
        return {"out": out.detach()} | {str(i): grad for i, grad in enumerate(grads)}

    return {name: lambda f=f, x=x: run(f, x) for name, (f, x) in cases.items()}


@pytest.mark.parametrize("name", ["unit_heads", "rotate", "gated_norm", "gated_product", "decay"])
def test_rowwise_functions(name, tapes):
    for _ in range(3):
        call = rowwise_calls(torch.float32)[name]
        assert_same(call(), without_tapes(call))
    assert [callable(tape) for tape in tapes()] == [True, True]


@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_a_window(carried, tapes):
    """Forward and backward, which have no row of `OPS`."""
    heads = (2, 1, 1)
    for _ in range(3):
        q, k, v = (numbers(2, 9, n, 16).requires_grad_() for n in heads)
        seen = torch.tensor([[1], [30]], device=DEVICE)
        state = (numbers(2, 10, 1, 16), numbers(2, 10, 1, 16), seen) if carried else None

        def call(x=(q, k, v), state=state):
            o, _ = chunk_window(*x, window=8, sinks=2, initial_state=state)
            grads = torch.autograd.grad(o.square().sum(), x)
            return {"o": o.detach()} | dict(zip("qkv", grads, strict=True))

        assert_same(call(), without_tapes(call))
    assert [callable(tape) for tape in tapes()] == [True, True]


def product(*tensors):
    return rowwise_launch.gated_product_fwd_triton(*tensors)


def test_one_tensor_for_two_arguments(tapes):
    """A tape that was written with one tensor in two places reads two tensors later."""
    x, y = numbers(4, 16), numbers(4, 16)
    for a, b in ((x, x), (x, x), (x, y), (y, x)):
        assert torch.equal(product(a, b), without_tapes(lambda a=a, b=b: product(a, b)))
    assert [callable(tape) for tape in tapes()] == [True]


def test_two_arguments_in_one_storage(tapes):
    """Tensors are told apart by identity, not by their memory."""
    for places in ((0, 1), (0, 1), (2, 0), (1, 3)):
        parts = numbers(4, 4, 16)
        a, b = (parts[i] for i in places)
        assert torch.equal(product(a, b), without_tapes(lambda a=a, b=b: product(a, b)))
    assert [callable(tape) for tape in tapes()] == [True]


def test_a_result_keeps_nothing_alive():
    for _ in range(3):
        x, y = numbers(4, 16), numbers(4, 16)
        out, gone = product(x, y), weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None
        assert out.shape == (4, 16)


@_tape.taped
def reads_a_number(x):
    return product(x, x + x.max().item())


@_tape.taped
def reads_a_copy(x):
    return product(x, x + x.to("meta").shape[0])


@_tape.taped
def uses_another_tensor(x):
    return product(x, OTHER)


OTHER = torch.ones(4, 16, device=DEVICE)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (reads_a_number, "not an operator of"),
        (reads_a_copy, "a tensor on meta"),
        (uses_another_tensor, "neither an argument"),
    ],
)
def test_what_a_tape_cannot_repeat_is_refused(function, reason, tapes):
    for _ in range(4):
        x = numbers(4, 16)
        assert torch.equal(function(x), function.__wrapped__(x))
    assert any(isinstance(tape, str) and reason in tape for tape in tapes())


def test_a_kernel_in_cuda_is_refused(tapes):
    @_tape.taped
    def launches_otherwise(x):
        _tape.refuse("a kernel in CUDA C++")
        return product(x, x)

    for _ in range(3):
        launches_otherwise(numbers(4, 16))
    assert "a kernel in CUDA C++" in tapes()


def test_an_error_of_the_recorder_is_not_the_users(tapes, monkeypatch):
    """The call has done its work; only its tape is missing."""
    monkeypatch.setattr(_recorder.inspect, "signature", lambda function: 1 / 0)
    for _ in range(3):
        x = numbers(4, 16)
        assert torch.equal(product(x, x), without_tapes(lambda x=x: product(x, x)))
    assert tapes() == ["ZeroDivisionError: division by zero"]


def test_a_kernel_can_be_copied():
    kernel = rowwise_launch.gated_product_fwd_kernel
    assert copy.copy(kernel).function is kernel.function


def test_results_carry_nothing(tmp_path):
    """They can be saved and loaded, also those of the call that was written down."""
    x = numbers(4, 16)
    for _ in range(3):
        out = product(x, x)
        assert not vars(out)
        torch.save(out, tmp_path / "out.pt")
        assert torch.equal(torch.load(tmp_path / "out.pt"), out)


@pytest.mark.parametrize(
    "where", ["mode", "transform", "hook", "exit", "debug", "instrumented", "autocast", "subclass"]
)
def test_what_else_sees_a_call_gets_it(where, tapes, monkeypatch):
    """A dispatch mode, a transform, a hook of Triton's or a subclass: the call is as without tapes."""
    x = numbers(4, 16)
    for _ in range(2):
        product(x, x)
    (written,) = (written for written, _ in _tape._tables if written)
    played = []
    (form,) = written
    written[form] = lambda *_: played.append(True)
    product(x, x)
    assert played
    played.clear()
    if where == "mode":
        with Passing() as mode:
            product(x, x)
        assert mode.seen
    elif where == "transform":
        monkeypatch.setattr(torch._C, "_are_functorch_transforms_active", lambda: True)
        product(x, x)
    elif where == "hook":
        monkeypatch.setattr(_tape._runtime.launch_enter_hook, "calls", [lambda metadata: None])
        product(x, x)
    elif where == "exit":
        monkeypatch.setattr(_tape._runtime.launch_exit_hook, "calls", [lambda metadata: None])
        product(x, x)
    elif where == "instrumented":
        monkeypatch.setattr(_tape._compilation, "instrumentation_mode", "fpsan")
        product(x, x)
    elif where == "autocast":
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            product(x, x)
    elif where == "debug":
        monkeypatch.setattr(_tape._runtime, "debug", True)
        product(x, x)
    else:
        product(x.as_subclass(Sub), x)
    assert not played


class Sub(torch.Tensor):
    pass


class Passing(torch.utils._python_dispatch.TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


NUMBERS = [None, True, False, 0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**40, -1, -16, 0.0, -0.0, 1.0, 2.0, "a", "1"]


def test_a_form_knows_what_triton_knows():
    """Two arguments for which Triton compiles two kernels, or which differ at all, have two forms."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    base = torch.zeros(64, dtype=torch.uint8)
    dtypes = torch.float32, torch.bfloat16, torch.int32
    tensors = [base[start : start + 16].view(dtype) for dtype in dtypes for start in (0, 4, 16)]
    values = NUMBERS + tensors + [(1, 2), (2, 1), [1, 2], (1,), ()]
    for a, b in itertools.combinations(values, 2):
        same = _tape._form(-1, (a,)) == _tape._form(-1, (b,))
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            kinds = [native_specialize_impl(backend, x, False, True, True) for x in (a, b)]
            assert not same or kinds[0] == kinds[1], (a, b)
        else:
            assert not same, (a, b)
    assert _tape._form(-1, (tensors[0],)) == _tape._form(-1, (tensors[2],))  # 16 bytes apart: the same kernel


@pytest.mark.parametrize("change", ["shape", "stride", "number", "order"])
def test_another_form_has_another_tape(change):
    x = numbers(4, 16)
    other = {
        "shape": (x[:2].contiguous(), 2), "stride": (numbers(16, 4).T, 2), "number": (x, 3), "order": (2, x),
    }[change]  # fmt: skip
    assert _tape._form(-1 if DEVICE == "cpu" else 0, (x, 2)) != _tape._form(-1 if DEVICE == "cpu" else 0, other)


def test_arguments_without_a_form():
    """Another device, a subclass, and objects of other types."""
    x = torch.zeros(4)
    assert _tape._form(0, (x,)) is None
    assert _tape._form(0, (1,)) != _tape._form(1, (1,))
    assert _tape._form(-1, (x.as_subclass(Sub),)) is None
    assert _tape._form(-1, ({"a": 1},)) is None
    assert _tape._form(-1, ((1.5,),)) is None


def test_forms_are_forgotten_when_they_are_too_many(monkeypatch, tapes):
    monkeypatch.setattr(_tape, "MOST_FORMS", 3)
    for size in (1, 1, 2, 2, 3, 3, 4):
        product(numbers(size, 16), numbers(size, 16))
    assert len(tapes()) == 0
    for _ in range(2):
        product(numbers(4, 16), numbers(4, 16))
    assert len(tapes()) == 1


class Compiled:
    """Stands for a kernel that Triton has compiled, with its launcher: it notes what it is launched with."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, scratch: int = 0):
        self.launches, self.calls = [], []
        self.run = SimpleNamespace(
            launch=self.launch, launch_cooperative_grid=True, launch_pdl=False, num_ctas=1, gsan_enabled=False,
            global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            arg_annotations=["notes"], kernel_signature=b"signature",
        )  # fmt: skip

    def launch(self, *args):
        self.launches.append(args)

    def __getitem__(self, grid):
        return lambda *args, stream: self.calls.append((grid, stream, args))


class Function:
    """Stands for a function with `triton.jit`."""

    def __init__(self, compiled: Compiled):
        self.compiled, self.fn, self.arg_names = compiled, self.kernel, ["x", "parts", "y", "n", "scale", "BLOCK"]

    @staticmethod
    def kernel(x, parts, y, n, scale, BLOCK):
        pass

    def run(self, *args, **kwargs):
        return self.compiled


@pytest.fixture
def by_address(monkeypatch):
    """The function that plays a call's tape as on a GPU, on stream 5 of GPU 3."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 2 + device, raising=False)
    monkeypatch.setattr(_recorder, "interpreted", True)  # nothing calls Triton's hooks

    def written(function, *args):
        recorder = _recorder.Recorder(args)
        recorder.run(function)
        return _player.player(recorder, by_address=True)

    return written


def steps_of(play) -> list[str]:
    """What each step calls, and whether it forgets tensors afterwards."""
    names = {torch.empty_strided: "allocate"}
    called = [
        names.get(getattr(step.call, "func", None), getattr(step.call, "__name__", "operator")) for step in play.steps
    ]
    frees = [getattr(step.after, "__name__", None) == "forget" for step in play.steps]
    return [name + ", free" * free for name, free in zip(called, frees, strict=True)]


VERSIONS = [*_launcher.LAYOUTS, (99, 0)]  # the last one has Triton's own call


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_a_launch_gets_addresses(version, by_address, monkeypatch):
    """Offsets of views, tuples, None and numbers; views that only kernels read are not made."""
    monkeypatch.setattr(_launcher, "_version", lambda: version)
    compiled = Compiled()
    kernel = _recorder.launched(Function(compiled))

    def launch(x, n, y):
        both = x.new_empty(2, 4)
        low, high = both
        kernel[(3,)](x[1], (low, None, high.view(torch.int32)[1:]), y, n, -0.0, BLOCK=64, num_warps=4)
        return None, high, both

    play = by_address(launch, torch.zeros(2, 4, device=DEVICE), 6, torch.zeros(8, device=DEVICE)[4:])
    for _ in range(2):
        x, y = torch.zeros(2, 4, device=DEVICE), torch.zeros(9, device=DEVICE)[1:5]
        nothing, high, both = play(x, 6, y)
        assert nothing is None and high.data_ptr() == both[1].data_ptr() and both.shape == (2, 4)
        given = x.data_ptr() + 16, (both.data_ptr(), None, both.data_ptr() + 20), y.data_ptr(), 6, -0.0, 64
        if version not in _launcher.LAYOUTS:
            assert str(compiled.calls[-1]) == str(((3, 1, 1), 5, given))
            continue
        start, args = compiled.launches[-1][:7], compiled.launches[-1][7:]
        assert start == (3, 1, 1, 5, 7, True, False)
        row = (None, None, (4, 1, 0), None, None, None, *given)
        apart = ((4, 1, 0), None, None, None, None, None, ["notes"], b"signature", given)
        assert str(args) == str(row if version == (3, 6) else apart)
    assert steps_of(play) == ["allocate", "unbind.int", "launch, free"]  # of the views, those of `both`


def test_a_kernel_with_scratch_memory_is_launched_by_triton(by_address):
    """Which allocates the memory."""
    compiled = Compiled(scratch=16)
    kernel = _recorder.launched(Function(compiled))
    play = by_address(lambda x: kernel[(1,)](x, (), x, 1, 1.0, BLOCK=1), torch.zeros(4, device=DEVICE))
    play(torch.zeros(4, device=DEVICE))
    assert len(compiled.calls) == 1 and not compiled.launches


def test_a_launch_is_as_by_triton(monkeypatch):
    """What Triton's launcher in C gets: of the installed version, whose launcher may have moved."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(driver.triton.runtime.driver, "_active", SimpleNamespace())
    compiled, args = Compiled(), (16, (32, None), 2.0, True)
    call, form = _launcher.launch_of(compiled, (3, 2), 5, args)
    call(*form)
    launch = functools.partial(driver.CudaLauncher.__call__, compiled.run)
    launch(3, 2, 1, 5, compiled.function, compiled.packed_metadata, None, None, None, *args)
    mine, triton = compiled.launches
    assert mine == triton


def test_memory_is_freed_after_its_last_use(by_address):
    """Scratch is gone before the next allocation, as in the launch function."""
    x = torch.zeros(4, device=DEVICE)
    kernel = _recorder.launched(Function(Compiled()))

    def launch(x):
        scratch = x.new_empty(1024)
        kernel[(1,)](x, (scratch,), x, 1, 1.0, BLOCK=1)
        del scratch
        out = torch.empty_like(x)
        kernel[(1,)](x, (out,), x, 1, 1.0, BLOCK=1)
        return out

    def launch_views(x):
        low, high = x.new_empty(2, 1024)
        kernel[(1,)](x, (low,), x, 1, 1.0, BLOCK=1)
        kernel[(1,)](x, (high,), x, 2, 1.0, BLOCK=1)
        return torch.empty_like(x)

    # after both views are read
    assert steps_of(by_address(launch_views, x)) == ["allocate", "launch", "launch, free", "allocate"]
    assert steps_of(by_address(launch, x)) == ["allocate", "launch, free", "allocate", "launch"]


@gpu
def test_a_tape_in_a_cuda_graph(tapes):
    """A graph captures what a tape does, with memory of the graph's."""
    x = numbers(4, 16)
    for _ in range(2):
        product(x, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x, x)
    for _ in range(2):
        x.copy_(numbers(4, 16))
        graph.replay()
        assert torch.equal(out, without_tapes(lambda: product(x, x)))
    assert [callable(tape) for tape in tapes()] == [True]


@gpu
def test_a_tape_on_another_stream(tapes):
    """Kernels are launched on the current stream: after what was launched there before."""
    x = numbers(4, 16)
    for _ in range(2):
        product(x, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.fill_(2.0)
        out = product(x, x)
    stream.synchronize()
    assert torch.equal(out, without_tapes(lambda: product(x, x)))


@gpu
def test_a_tensor_of_the_cpu_is_refused_as_without_tapes():
    x = numbers(4, 16)
    for _ in range(3):
        product(x, x)
    with pytest.raises(ValueError, match="cannot be accessed"):
        product(x, x.cpu())


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_its_own_tape(tapes):
    """A compiled kernel belongs to one GPU."""
    for _ in range(3):
        for index in range(2):
            with torch.cuda.device(index):
                x = torch.randn(4, 16, device="cuda")
                assert torch.equal(product(x, x), without_tapes(lambda x=x: product(x, x)))
    assert [callable(tape) for tape in tapes()] == [True, True]
