"""Writes down what a launch function does: allocations, views, a few tensor operators, launches of kernels.

`_tape` repeats it. A call that does anything else is refused: the recorder then has a `reason`.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

_aten = torch.ops.aten
FACTS = frozenset({_aten.promote_types.default})  # about dtypes; without a tensor, so they are not written down
ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)  # fmt: skip
VIEWS = frozenset(
    {
        _aten.alias.default, _aten.detach.default, _aten.expand.default,
        _aten.permute.default, _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor,
        _aten.split_with_sizes.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.t.default,
        _aten.transpose.int, _aten.unbind.int, _aten.unsqueeze.default, _aten.view.default, _aten.view.dtype,
        _aten._unsafe_view.default,
    }
)  # fmt: skip
# the shapes of their results depend on the shapes of their arguments only
OPERATORS = frozenset(
    {
        _aten._to_copy.default, _aten.clamp_min.default, _aten.clone.default, _aten.constant_pad_nd.default,
        _aten.copy_.default, _aten.fill_.Scalar, _aten.new_zeros.default, _aten.sum.dim_IntList, _aten.zero_.default,
        _aten.zeros.default, _aten.zeros_like.default,
    }
)  # fmt: skip

interpreted = bool(knobs.runtime.interpret)


class _Recording(threading.local):
    """The recorder of the call that is written down in this thread."""

    recorder: "Recorder | None" = None


_recording = _Recording()


def refuse(reason: str) -> None:
    """Tell the recorder, if a call is written down, of something that it does not see."""
    if _recording.recorder is not None:
        _recording.recorder.reason = reason


class Kernel:
    """A Triton kernel whose launches can be written down. `kernel[grid](...)` is Triton's own launch."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        recorder = _recording.recorder
        return self.function[grid] if recorder is None else functools.partial(recorder.launch, self.function, grid)

    def __getattr__(self, name):
        if name == "function":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self.function, name)


def launched(function) -> Kernel:
    """Decorator, above `@triton.jit`, of every kernel that a launch function launches."""
    return Kernel(function)


class Slot(int):
    """A tensor in what is written down, by its number."""


class NotTaped(Exception):  # noqa: N818  not an error: the call runs without a tape
    """A call that cannot be repeated, and why."""


class Step(NamedTuple):
    """What a call does at one point.

    Attributes:
        kind: "allocate", "view", "operator" or "launch".
        call: the operator or the kernel.
        args, kwargs: its arguments, with slots for tensors.
        results: the slots of its results.
        form: of an allocation (shape, stride, dtype, device); of an operator whether it returns a sequence; of a
            launch (grid, compiled kernel).
    """

    kind: str
    call: Callable
    args: tuple
    kwargs: dict
    results: tuple[Slot, ...]
    form: object


def slots_in(x) -> list[Slot]:
    """All slots in arguments."""
    if isinstance(x, Slot):
        return [x]
    x = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
    return [slot for part in x for slot in slots_in(part)]


class Recorder(TorchDispatchMode):
    """Runs one call and writes it down.

    Each tensor has a number: arguments first, then every result in its order. The number is an attribute of the tensor
    object, for as long as the call runs. So a tensor is found by identity, also where tensors share memory, and its
    memory is freed as without a recorder.

    Attributes:
        arguments: the slot of each argument, None if it is no tensor.
        steps: what the call did.
        outputs: what it returned, with slots.
        inside: slot of a view: (slot of the tensor in whose memory it lies, bytes from the start of that).
        reason: why the call cannot be repeated, or None.
    """

    def __init__(self, args: tuple):
        super().__init__()
        self.steps, self.reason, self.outputs, self.inside = [], None, None, {}
        self._slots, self._owner, self._launching, self._counted = 0, object(), False, 0
        self._device = next((a.device for a in args if isinstance(a, Tensor)), None)
        # objects of their own, also where a tensor is passed twice: another call may pass two
        self._args = tuple([a.detach() if isinstance(a, Tensor) else a for a in args])
        self.arguments = [self._number(a) if isinstance(a, Tensor) else None for a in self._args]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler for this mode, which takes seconds."""
        return False

    def run(self, function: Callable):
        """What `function` returns. An argument that it returns comes back as another object on the same memory."""
        try:
            _recording.recorder = self
            knobs.runtime.launch_enter_hook.add(self._count)
            with self:
                outputs = function(*self._args)
        finally:
            knobs.runtime.launch_enter_hook.remove(self._count)
            _recording.recorder = None
        # the interpreter has no hooks
        if not interpreted and self._counted != sum(step.kind == "launch" for step in self.steps):
            self.reason = self.reason or "a kernel that is not `launched`"
        self._write(lambda: setattr(self, "outputs", self._slot(outputs)))
        del self._args
        for x in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(x, Tensor):
                vars(x).pop("_memmix_slot", None)  # `torch.save` would write it
        return outputs

    def launch(self, function, grid: tuple, *args, **kwargs):
        """Launch as Triton does, and write it down."""
        self._launching = True  # the interpreter calls operators of its own
        try:
            kernel = function.run(*args, grid=grid, warmup=False, **kwargs)
        finally:
            self._launching = False

        def write():
            named = {name: x for name, x in kwargs.items() if name in function.arg_names}
            bound = inspect.signature(function.fn).bind(*args, **named)
            bound.apply_defaults()
            options = {name: x for name, x in kwargs.items() if name not in named}
            given = self._kernel_slot(tuple(bound.arguments.values()))
            self.steps.append(Step("launch", function, given, options, (), (tuple(grid), kernel)))

        self._write(write)
        return kernel

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._launching and func not in FACTS:
            self._write(lambda: self._operator(func, args, kwargs, result))
        return result

    def _operator(self, func, args: tuple, kwargs: dict, result) -> None:
        many = isinstance(result, (tuple, list))
        for part in result if many else (result,):
            # what is read from a copy on the CPU depends on the numbers in it
            if isinstance(part, Tensor) and part.device != self._device:
                raise NotTaped(f"a tensor on {part.device}")
        if func in ALLOCATIONS:
            form = tuple(result.shape), result.stride(), result.dtype, result.device
            self.steps.append(Step("allocate", func, (), {}, (self._number(result),), form))
            return
        if func not in VIEWS and func not in OPERATORS:
            raise NotTaped(f"{func} is not an operator of tapes")
        parts = tuple(result) if many else () if result is args[0] else (result,)  # () in place
        given, named = self._slot(tuple(args)), {name: self._slot(x) for name, x in kwargs.items()}
        results = tuple([self._number(part) for part in parts])
        if func in VIEWS:
            root, start = self.inside.get(given[0], (given[0], 0))
            for part, slot in zip(parts, results, strict=True):
                offset = part.data_ptr() - args[0].data_ptr() if part.numel() else 0
                self.inside[slot] = root, start + offset
        self.steps.append(Step("view" if func in VIEWS else "operator", func, given, named, results, many))

    def _write(self, write: Callable[[], None]) -> None:
        if self.reason is None:
            try:
                write()
            except NotTaped as found:
                self.reason = str(found)
            except Exception as error:  # the call itself has done its work
                self.reason = f"{type(error).__name__}: {error}"

    def _count(self, metadata) -> None:
        """Triton's hook before every launch in every thread: no launch of this call may be missing."""
        if _recording.recorder is self:
            self._counted += 1

    def _number(self, tensor: Tensor) -> Slot:
        slot = Slot(self._slots)
        self._slots += 1
        tensor._memmix_slot = self._owner, slot
        return slot

    def _slot(self, x):
        """x with slots for its tensors."""
        if isinstance(x, Tensor):
            owner, slot = getattr(x, "_memmix_slot", (None, None))
            if owner is not self._owner:
                raise NotTaped("a tensor that is neither an argument nor made by the call")
            return slot
        if isinstance(x, (tuple, list)):
            return tuple(map(self._slot, x)) if type(x) is tuple else list(map(self._slot, x))
        return x

    def _kernel_slot(self, x):
        """`_slot` for an argument of a kernel, which is a tensor, a tuple, or a constant."""
        if type(x) is tuple:
            return tuple(map(self._kernel_slot, x))
        if isinstance(x, (tuple, list, dict)):
            raise NotTaped(f"a kernel's argument is a {type(x).__name__}")
        return self._slot(x)
