"""Tapes: the launches of an op, written down once per form of its arguments and played again without their Python.

A launch function computes sizes, allocates memory, and launches some kernels with thirty arguments each. All of this
depends only on the form of its arguments: shapes, strides, dtypes and alignment of the tensors, and the values of all
others. So Python does the same work in every layer of a model and at every step, at 20 to 60 us per kernel.

    @taped
    def some_fwd(x, weight, eps): ...

The second call with a form runs the function as always and writes a tape: the allocations, the launches and the few
tensor operators, in their order (`_Recorder`). From the tape comes a Python function that repeats exactly these, with
the new tensors' addresses (`_source`); later calls of this form run it. A call is not taped where anything could make
it differ: see `_form` and `_is_plain`. A function whose tape would need an operator that is not in `VIEWS`,
`ALLOCATIONS` or `OPERATORS`, for example one that reads a number back from the GPU, is never taped for this form.

Tapes need NVIDIA's driver of a Triton version of `VERSIONS`, whose launcher they call. `HF_MEMMIX_TAPES=0` switches
them off. In Triton's interpreter they are off; tests switch them on, and kernels then run with tensors.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable
from types import FunctionType

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

VERSIONS = {(3, 6)}  # of Triton, whose arguments of a compiled kernel's launch `_launch_call` knows
ALIGNED = 16  # bytes; Triton compiles other code for pointers that are not multiples of it
MOST_FORMS = 512  # per function; then all are forgotten

_aten = torch.ops.aten
VIEWS = frozenset(
    {
        _aten.alias.default, _aten.as_strided.default, _aten.detach.default, _aten.expand.default, _aten.permute.default,
        _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.squeeze.default,
        _aten.squeeze.dim, _aten.t.default, _aten.transpose.int, _aten.unbind.int, _aten.unsqueeze.default,
        _aten.view.default, _aten.view.dtype, _aten._unsafe_view.default,
    }
)  # fmt: skip
ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)  # fmt: skip
FACTS = frozenset({_aten.promote_types.default})  # about dtypes; without a tensor
# the shapes of their results depend on the shapes of their arguments only
OPERATORS = frozenset(
    {
        _aten._to_copy.default, _aten.clone.default, _aten.constant_pad_nd.default, _aten.copy_.default,
        _aten.fill_.Scalar, _aten.new_zeros.default, _aten.sum.dim_IntList, _aten.zero_.default, _aten.zeros.default,
        _aten.zeros_like.default,
    }
)  # fmt: skip


class _Recording(threading.local):
    """The recorder of the call that is written down in this thread."""

    recorder: "_Recorder | None" = None


_recording = _Recording()


_interpreted = bool(knobs.runtime.interpret)


class switch:
    """Whether calls are taped. Tests and comparisons turn it."""

    on = not _interpreted and os.environ.get("HF_MEMMIX_TAPES") != "0" and torch.cuda.is_available()


class _NotTaped(Exception):
    """This form cannot be taped; the reason."""


def refuse(reason: str) -> None:
    """Tell the tape that is written, if there is one, of something it cannot repeat."""
    if _recording.recorder is not None:
        _recording.recorder.reason = reason


class Kernel:
    """A Triton kernel whose launches can be written on a tape. `kernel[grid](...)` is Triton's own launch."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        recorder = _recording.recorder
        return self.function[grid] if recorder is None else functools.partial(recorder.launch, self.function, grid)

    def __getattr__(self, name):
        return getattr(self.function, name)


def launched(function) -> Kernel:
    """Decorator, above `@triton.jit`, of each kernel that a launch function launches."""
    return Kernel(function)


class _Slot(int):
    """A tensor on a tape, by its number."""


class _Step:
    """An allocation, a view, an operator or a launch: what is called, its arguments, the slots of its results."""

    def __init__(self, kind: str, call, args: tuple = (), kwargs: dict | None = None, results=(), form=None):
        self.kind, self.call, self.args, self.kwargs = kind, call, args, kwargs or {}
        self.results, self.form = results, form


class _Recorder(TorchDispatchMode):
    """Runs a call and writes its tape.

    Each tensor has a number: arguments first, then every result in its order. The number is an attribute of the tensor
    object itself. So it is found by identity, whatever memory tensors share, and memory is freed as without a tape.
    """

    def __init__(self, args: tuple):
        super().__init__()
        self.steps, self.reason, self.slots, self.owner, self.launching = [], None, 0, object(), False
        # own objects, also where a tensor is passed twice: another call may pass two
        self.args = tuple([a.detach() if isinstance(a, Tensor) else a for a in args])
        self.arguments = [self._number(a) if isinstance(a, Tensor) else None for a in self.args]
        # slot of a view: the slot whose memory it lies in, and the bytes from the start of that
        self.inside = {}

    def _number(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self.slots)
        self.slots += 1
        tensor._memmix_slot = self.owner, slot
        return slot

    def slot(self, x):
        """x with the numbers of its tensors in their places."""
        if isinstance(x, Tensor):
            owner, slot = getattr(x, "_memmix_slot", (None, None))
            if owner is not self.owner:
                raise _NotTaped("a tensor that is neither an argument nor made by the call")
            return slot
        if isinstance(x, (tuple, list)):
            return tuple(map(self.slot, x)) if type(x) is tuple else list(map(self.slot, x))
        return x

    def kernel_slot(self, x):
        """`slot` of a kernel's argument, which is a tensor, a tuple, or a constant."""
        if type(x) is tuple:
            return tuple(map(self.kernel_slot, x))
        if isinstance(x, (tuple, list, dict)):
            raise _NotTaped(f"a kernel's argument is a {type(x).__name__}")
        return self.slot(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.reason is None and not self.launching:
            try:
                self._write(func, args, kwargs, result)
            except _NotTaped as found:
                self.reason = str(found)
        return result

    def _write(self, func, args, kwargs, result) -> None:
        if func in ALLOCATIONS:
            form = tuple(result.shape), result.stride(), result.dtype, result.device
            if result.layout != torch.strided or result.is_pinned():
                raise _NotTaped("memory of another kind")
            self.steps.append(_Step("allocate", func, results=(self._number(result),), form=form))
            return
        if func in FACTS:
            return
        if func not in VIEWS and func not in OPERATORS:
            raise _NotTaped(f"{func} is not an operator of tapes")
        given, named = self.slot(tuple(args)), {name: self.slot(x) for name, x in kwargs.items()}
        if func in VIEWS:
            source, parts = args[0], result if isinstance(result, (tuple, list)) else (result,)
            results = tuple([self._number(part) for part in parts])
            for part, slot in zip(parts, results, strict=True):
                root, start = self.inside.get(given[0], (given[0], 0))
                self.inside[slot] = root, start + part.data_ptr() - source.data_ptr() if part.numel() else 0
            many = isinstance(result, (tuple, list))
            self.steps.append(_Step("view", func, given, named, results, many))
            return
        if result is args[0]:  # an operator in place
            self.steps.append(_Step("operator", func, given, named))
        else:
            self.steps.append(_Step("operator", func, given, named, (self._number(result),), False))

    def launch(self, function, grid, *args, **kwargs):
        """Launch as Triton does, and write it down."""
        self.launching = True  # the interpreter itself calls operators
        try:
            kernel = function.run(*args, grid=grid, warmup=False, **kwargs)
        finally:
            self.launching = False
        if self.reason is None:
            try:
                named = {n: x for n, x in kwargs.items() if n in function.arg_names}
                bound = inspect.signature(function.fn).bind(*args, **named)
                bound.apply_defaults()
                given = self.kernel_slot(tuple(bound.arguments.values()))
                options = {n: x for n, x in kwargs.items() if n not in function.arg_names}
                self.steps.append(_Step("launch", function, given, options, form=(tuple(grid), kernel)))
            except _NotTaped as found:
                self.reason = str(found)
        return kernel


def _pointers(given) -> list[_Slot]:
    """All slots in arguments."""
    if isinstance(given, _Slot):
        return [given]
    if isinstance(given, dict):
        given = tuple(given.values())
    return [slot for x in given for slot in _pointers(x)] if isinstance(given, (tuple, list)) else []


class _Names(dict):
    """Objects that generated code uses, by name."""

    def of(self, x, prefix: str = "c") -> str:
        if x is None or type(x) in (bool, int) or (type(x) is float and x - x == 0):
            return repr(x)
        name = f"{prefix}{len(self)}"
        self[name] = x
        return name


def _source(recorder: _Recorder, outputs, by_address: bool) -> tuple[str, dict]:
    """The source of a function that plays the tape, and the objects that it uses.

    `by_address`: kernels get addresses, and views that only kernels read are never made; else kernels get tensors.
    """
    names = _Names(empty=torch.empty_strided, misaligned=_misaligned)
    inside = recorder.inside if by_address else {}
    steps = list(recorder.steps)
    needed = {inside.get(slot, (slot, 0))[0] for step in steps if step.kind == "launch" for slot in _pointers(step.args)}
    addressed = set(needed) if by_address else set()
    needed |= set(_pointers(outputs))
    for step in reversed(steps):
        if step.kind == "operator" or (step.kind == "view" and needed & set(step.results)):
            needed |= set(_pointers(step.args)) | set(_pointers(step.kwargs))
    kept = [step for step in steps if step.kind != "view" or needed & set(step.results)]

    def text(x) -> str:
        if isinstance(x, _Slot):
            return f"t{int(x)}"
        if isinstance(x, (tuple, list)):
            inner = "".join(f"{text(y)}, " for y in x)
            return f"({inner})" if type(x) is tuple else f"[{inner}]"
        return names.of(x)

    def address(x) -> str:
        if isinstance(x, _Slot):
            root, start = inside.get(x, (x, 0))
            return f"p{int(root)}" + (f" + {start}" if start else "")
        return "({})".format("".join(f"{address(y)}, " for y in x)) if type(x) is tuple else names.of(x)

    # the last step that uses a tensor, after which its memory is free
    last, returned = {}, set(_pointers(outputs))
    for i, step in enumerate(kept):
        used = _pointers(step.args) + _pointers(step.kwargs) + list(step.results)
        for slot in used:
            last[inside.get(slot, (slot, 0))[0]] = last[slot] = i
    parameters = [f"t{int(slot)}" if slot is not None else f"_{i}" for i, slot in enumerate(recorder.arguments)]
    lines = [f"def play({', '.join(parameters)}):"]
    arguments = {slot for slot in recorder.arguments if slot is not None}
    lines += [f"p{int(slot)} = t{int(slot)}.data_ptr()" for slot in sorted(arguments & addressed)]
    if by_address:
        device = torch._C._cuda_getDevice()
        lines.append(f"s = {names.of(torch._C._cuda_getCurrentRawStream, 'stream')}({device})")
    born = set()
    for i, step in enumerate(kept):
        if step.kind == "launch":
            if by_address:
                before, after = _launch_call(step.form[1], names)
                grid = (*step.form[0], 1, 1)[:3]
                where = ", ".join(map(repr, grid))
                lines.append(f"{before}{where}, s, {after}, {''.join(f'{address(x)}, ' for x in step.args)})")
            else:
                grid, options = names.of(step.form[0]), names.of(step.kwargs)
                lines.append(f"{names.of(step.call, 'k')}[{grid}]({''.join(f'{text(x)}, ' for x in step.args)}**{options})")
        elif step.kind == "allocate":
            (slot,), (size, stride, dtype, device) = step.results, step.form
            if slot not in needed:
                continue
            made = f"empty({size}, {stride}, dtype={names.of(dtype)}, device={names.of(device)})"
            lines.append(f"t{int(slot)} = {made}")
        else:
            named = "".join(f"{name}={text(x)}, " for name, x in step.kwargs.items())
            call = f"{names.of(step.call, 'op')}({''.join(f'{text(x)}, ' for x in step.args)}{named})"
            made = ", ".join(f"t{int(slot)}" for slot in step.results)
            lines.append(call if not made else f"[{made}] = {call}" if step.form else f"{made} = {call}")
        for slot in step.results:
            if slot in addressed:
                lines.append(f"p{int(slot)} = t{int(slot)}.data_ptr()")
                if step.kind == "allocate":
                    lines.append(f"if p{int(slot)} & {ALIGNED - 1}: misaligned()")
        born |= set(step.results)
        gone = sorted(slot for slot in born - returned if last[slot] == i)
        if gone:
            lines.append("del " + ", ".join(f"t{int(slot)}" for slot in gone))
    lines.append(f"return {text(outputs)}")
    return "\n    ".join(lines), names


def _misaligned():
    raise RuntimeError(
        f"the allocator of GPU memory returned an address that is not a multiple of {ALIGNED}; set HF_MEMMIX_TAPES=0"
    )


def _launch_call(kernel, names: _Names) -> tuple[str, str]:
    """The call of a compiled kernel's launch in Triton 3.6, before and after the grid and the stream."""
    run = kernel.run
    if run.global_scratch_size or run.profile_scratch_size:
        raise _NotTaped("a kernel with scratch memory of Triton's")
    names[f"h{len(names)}"] = kernel  # as long as the tape lives, so does the module of the kernel
    after = (kernel.function, bool(run.launch_cooperative_grid), bool(run.launch_pdl), None, None)
    fixed = ", ".join(map(repr, after))
    return f"{names.of(run.launch, 'l')}(", f"{fixed}, {names.of(kernel.packed_metadata, 'm')}, None, None, None"


@functools.cache
def _launcher_is_known() -> bool:
    """Whether kernels are launched by the driver of NVIDIA GPUs of a known version of Triton."""
    if torch.version.hip is not None or tuple(map(int, triton.__version__.split(".")[:2])) not in VERSIONS:
        return False
    from triton.backends.nvidia.driver import CudaDriver

    return isinstance(triton.runtime.driver.active, CudaDriver)


def _silent(hook) -> bool:
    """Whether a hook of Triton has nothing to call: a profiler of Triton's sets hooks."""
    return hook is None or getattr(hook, "calls", True) == []


def _is_plain() -> bool:
    """Whether this call may run from a tape: no other mode sees its operators, no hook of Triton its launches."""
    runtime = knobs.runtime
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or not _silent(runtime.launch_enter_hook)
        or not _silent(runtime.launch_exit_hook)
        or runtime.debug
        or knobs.compilation.instrumentation_mode
    )


def _form(device: int, args: tuple) -> tuple | None:
    """What a call's tape depends on; None for arguments that have no tapes, such as a tensor of another device.

    Numbers are here with their types and, because 0.0 == -0.0, zeros as text.
    """
    found = [device]
    for a in args:
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            if a.get_device() != device:
                return None
            found += (a.shape, a.stride(), a.dtype, a.data_ptr() % ALIGNED)
        elif a is None:
            found.append(None)
        elif kind is int or kind is float or kind is bool or kind is str:
            found += (kind, a or repr(a))
        elif kind is list or kind is tuple:
            for x in a:
                if type(x) is not int:
                    return None
            found += (kind, *a, None)
        else:
            return None
    return tuple(found)


_forms = []


def forget() -> None:
    """Forget all tapes, for tests and for programs that change what launch functions read."""
    for tapes, seen in _forms:
        tapes.clear()
        seen.clear()


def taped(function: Callable) -> Callable:
    """Decorator of a launch function with positional arguments; see the module's docstring.

    The function depends on nothing but its arguments (and the device), and launches kernels that are `launched` only.
    It returns tensors: one, or a tuple with None allowed.
    """
    tapes, seen = {}, set()
    _forms.append((tapes, seen))

    def record(form, args):
        recorder = _Recorder(args)
        _recording.recorder = recorder
        try:
            with recorder:
                outputs = function(*recorder.args)
        finally:
            _recording.recorder = None
        try:
            if recorder.reason is not None:
                raise _NotTaped(recorder.reason)
            source, names = _source(recorder, recorder.slot(outputs), not _interpreted)
            exec(source, names)
            names["play"].source = source
            tapes[form] = names["play"]
        except _NotTaped as found:
            tapes[form] = str(found)
        return outputs

    @functools.wraps(function)
    def call(*args):
        if not switch.on or not _is_plain():
            return function(*args)
        form = _form(-1 if _interpreted else torch._C._cuda_getDevice(), args)
        if form is None:
            return function(*args)
        if torch._C._is_any_autocast_enabled():
            form += ("autocast",)
        play = tapes.get(form)
        if type(play) is FunctionType:
            return play(*args)
        if play is not None or not (_interpreted or _launcher_is_known()):
            return function(*args)
        if form in seen:
            return record(form, args)
        if len(seen) >= MOST_FORMS:
            seen.clear()
            tapes.clear()
        seen.add(form)
        return function(*args)

    call.tapes = tapes
    return call
