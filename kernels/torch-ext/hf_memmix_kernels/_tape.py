"""Tapes: what a launch function does, written down once per form of its arguments, and repeated without its Python.

A launch function computes sizes, allocates memory, and launches some kernels with about thirty arguments each. All of
this depends only on the form of its arguments: shapes, strides, dtypes and alignment of tensors, and the values of all
others (`_form`). Yet Python does the work again in every layer and at every step.

    @taped
    def some_fwd(x, weight, eps): ...

The first call with a form runs the function. The second runs it, too, and writes it down (`_recorder`). From this
comes a Python function (`_Writer.source`) that makes the same allocations and launches, with the addresses of the
tensors at hand; all later calls with this form run it. Where anything else wants to see a call, it runs without a tape
(`_is_plain`).

Tapes need an NVIDIA GPU and a version of Triton in `VERSIONS`, whose launcher they call. `HF_MEMMIX_TAPES=0` switches
them off. In Triton's interpreter they are off; tests switch them on, and kernels then run with tensors.
"""

import functools
import os
from collections.abc import Callable
from types import FunctionType

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs

from ._recorder import NotTaped, Recorder, Slot, Step, interpreted, launched, refuse, slots_in

__all__ = ["forget", "launched", "refuse", "switch", "taped"]

VERSIONS = {(3, 6)}  # of Triton, in which a compiled kernel is launched as in `_Writer.launch`
ALIGNED = 16  # bytes; Triton compiles other code for addresses that are not multiples of it
MOST_FORMS = 512  # per function; then its tapes are forgotten

# inductor's allocation on the current GPU, which takes half the time of `torch.empty_strided`
_EMPTY = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) if torch.cuda.is_available() else None
_runtime, _compilation = knobs.runtime, knobs.compilation
_tables = []  # (tapes, forms seen once) of every function


class switch:
    """`on`: whether calls are taped."""

    on = not interpreted and os.environ.get("HF_MEMMIX_TAPES") != "0" and torch.cuda.is_available()


def forget() -> None:
    """Forget all tapes, for tests and for programs that change what launch functions read beside their arguments."""
    for tapes, seen in _tables:
        tapes.clear()
        seen.clear()


def taped(function: Callable) -> Callable:
    """Decorator of a launch function with positional arguments.

    What the function does depends on nothing but the form of its arguments and the device. A recorder does not see,
    so the function must not use: `tolist`, `numpy`, `data_ptr`, `storage_offset` or an attribute of a tensor, `is`
    between arguments, an environment variable, or a variable of a module that changes. The function launches only
    kernels that are `launched`, and returns tensors: one, or a tuple with None allowed.
    """
    tapes, seen = {}, set()
    _tables.append((tapes, seen))

    def record(form, args):
        recorder = Recorder(args)
        outputs = recorder.run(function)
        try:
            tapes[form] = _player(recorder)
        except NotTaped as found:
            tapes[form] = str(found)
        except Exception as error:  # the call itself has done its work
            tapes[form] = f"{type(error).__name__}: {error}"
        return outputs

    @functools.wraps(function)
    def call(*args):
        if not switch.on or not _is_plain():
            return function(*args)
        form = _form(-1 if interpreted else torch._C._cuda_getDevice(), args)
        if form is None:
            return function(*args)
        tape = tapes.get(form)
        if type(tape) is FunctionType:
            return tape(*args)
        if tape is not None or not (interpreted or _launcher_is_known()):
            return function(*args)
        if form in seen:
            return record(form, args)
        if len(seen) >= MOST_FORMS:
            seen.clear()
            tapes.clear()
        seen.add(form)
        return function(*args)

    return call


def _is_plain() -> bool:
    """Whether this call may run from a tape: nothing else sees its operators or its launches, or changes them."""
    try:
        return not (
            torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or torch._C._is_any_autocast_enabled()
            or _runtime.launch_enter_hook.calls
            or _runtime.launch_exit_hook.calls
            or _runtime.debug
            or _compilation.instrumentation_mode
        )
    except AttributeError:  # a hook of another kind, or another version of Triton
        return False


@functools.cache
def _launcher_is_known() -> bool:
    """Whether kernels are launched by the driver of NVIDIA GPUs of a known version of Triton."""
    if torch.version.hip is not None or tuple(map(int, triton.__version__.split(".")[:2])) not in VERSIONS:
        return False
    from triton.backends.nvidia.driver import CudaDriver

    return isinstance(triton.runtime.driver.active, CudaDriver)


def _form(device: int, args: tuple) -> tuple | None:
    """What a call's tape depends on; None for arguments that have no tapes, such as a tensor of another device.

    Numbers are here with their types, since True == 1 == 1.0, and zeros as text, since 0.0 == -0.0.
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


def _player(recorder: Recorder) -> FunctionType:
    """The function that repeats what was written down."""
    if recorder.reason is not None:
        raise NotTaped(recorder.reason)
    writer = _Writer(recorder, by_address=not interpreted)
    text = writer.source()
    exec(text, writer.names)
    play = writer.names["play"]
    play.source = text
    return play


class _Writer:
    """Writes the source of a tape's function.

    `t3` is the tensor of slot 3 and `p3` its address. With `by_address` kernels get addresses, and views that only
    kernels read are not made. Without it they get tensors. A tensor's last use is followed by its `del`.
    """

    def __init__(self, recorder: Recorder, by_address: bool):
        self.recorder, self.by_address = recorder, by_address
        self.names = {"misaligned": _misaligned}  # objects that the source uses
        self.inside = recorder.inside if by_address else {}
        launches = [step for step in recorder.steps if step.kind == "launch"]
        self.read = {self.root(slot) for step in launches for slot in slots_in(step.args)}
        # slots that must be tensors; from the last step to the first, what an operator or a needed view reads is one
        self.made = self.read | set(slots_in(recorder.outputs))
        for step in reversed(recorder.steps):
            if step.kind == "operator" or (step.kind == "view" and self.made & set(step.results)):
                self.made |= set(slots_in(step.args) + slots_in(step.kwargs))
        self.steps = [
            step for step in recorder.steps if step.kind in ("launch", "operator") or self.made & set(step.results)
        ]

    def source(self) -> str:
        arguments = [f"_{i}" if slot is None else f"t{int(slot)}" for i, slot in enumerate(self.recorder.arguments)]
        lines = [f"def play({', '.join(arguments)}):"]
        if self.by_address:
            for slot in self.recorder.arguments:
                lines += self.address_of(slot)
            stream = self.name(torch._C._cuda_getCurrentRawStream)
            lines.append(f"stream = {stream}({torch._C._cuda_getDevice()})")
        write = {"launch": self.launch, "allocate": self.allocate, "view": self.operator, "operator": self.operator}
        uses = {}  # slot: the last step that uses it
        for i, step in enumerate(self.steps):
            for slot in (*step.results, *slots_in(step.args), *slots_in(step.kwargs)):
                uses[slot] = uses[self.root(slot)] = i
        made, returned = set(), set(slots_in(self.recorder.outputs))
        for i, step in enumerate(self.steps):
            lines += write[step.kind](step)
            made |= set(step.results)
            if unused := sorted(slot for slot in made - returned if uses[slot] == i):
                lines.append("del " + ", ".join(map(self.tensor, unused)))
        lines.append(f"return {self.text(self.recorder.outputs, self.tensor)}")
        return "\n    ".join(lines) + "\n"

    def allocate(self, step: Step) -> list[str]:
        (slot,), (shape, stride, dtype, device) = step.results, step.form
        if _EMPTY and device.type == "cuda" and device.index == torch._C._cuda_getDevice():
            call = f"{self.name(_EMPTY)}({shape}, {stride}, {self.name(dtype)})"
        else:
            empty = self.name(torch.empty_strided)
            call = f"{empty}({shape}, {stride}, dtype={self.name(dtype)}, device={self.name(device)})"
        lines = [f"{self.tensor(slot)} = {call}", *self.address_of(slot)]
        return [*lines, f"if p{int(slot)} % {ALIGNED}: misaligned()"] if len(lines) > 1 else lines

    def operator(self, step: Step) -> list[str]:
        args = [self.text(x, self.tensor) for x in step.args]
        args += [f"{name}={self.text(x, self.tensor)}" for name, x in step.kwargs.items()]
        call = f"{self.name(step.call)}({', '.join(args)})"
        results = "".join(f"{self.tensor(slot)}, " for slot in step.results)
        lines = [f"{results if step.form else results[:-2]} = {call}" if results else call]
        return lines + [line for slot in step.results for line in self.address_of(slot)]

    def launch(self, step: Step) -> list[str]:
        grid, kernel = step.form
        if not self.by_address:
            args = ", ".join(self.text(x, self.tensor) for x in step.args)
            return [f"{self.name(step.call)}[{grid}]({args}, **{self.name(step.kwargs)})"]
        run = kernel.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise NotTaped("a kernel that needs scratch memory of Triton's")
        self.name(kernel)  # keeps its code on the GPU
        # as CudaLauncher.__call__ of Triton 3.6 does
        args = [*map(repr, (*grid, 1, 1)[:3]), "stream", repr(kernel.function)]
        args += [repr(bool(run.launch_cooperative_grid)), repr(bool(run.launch_pdl)), "None, None"]
        args += [self.name(kernel.packed_metadata), "None, None, None"]
        args += [self.text(x, self.pointer) for x in step.args]
        return [f"{self.name(run.launch)}({', '.join(args)})"]

    def root(self, slot: Slot) -> Slot:
        return self.inside.get(slot, (slot, 0))[0]

    def tensor(self, slot: Slot) -> str:
        return f"t{int(slot)}"

    def pointer(self, slot: Slot) -> str:
        root, start = self.inside.get(slot, (slot, 0))
        return f"p{int(root)} + {start}" if start else f"p{int(root)}"

    def address_of(self, slot: Slot | None) -> list[str]:
        """The line that takes the address of a tensor, if a kernel reads it."""
        return [f"p{int(slot)} = t{int(slot)}.data_ptr()"] if self.by_address and slot in self.read else []

    def text(self, x, of: Callable[[Slot], str]) -> str:
        """x as source; `of` writes its slots."""
        if isinstance(x, Slot):
            return of(x)
        if isinstance(x, (tuple, list)):
            parts = "".join(f"{self.text(part, of)}, " for part in x)
            return f"({parts})" if type(x) is tuple else f"[{parts}]"
        return self.name(x)

    def name(self, x) -> str:
        """A number as it is, any other object by a name."""
        if x is None or type(x) in (bool, int) or (type(x) is float and x - x == 0):
            return repr(x)
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name


def _misaligned():
    raise RuntimeError(
        f"the allocator of GPU memory returned an address that is not a multiple of {ALIGNED}: set HF_MEMMIX_TAPES=0"
    )
