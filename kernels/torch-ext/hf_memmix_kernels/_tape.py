"""Tapes: what a launch function does, written down once per form of its arguments, and repeated without its Python.

A launch function computes sizes, allocates memory, and launches some kernels with about thirty arguments each. All of
this depends only on the form of its arguments: shapes, strides, dtypes and alignment of tensors, and the values of all
others (`_form`). Yet Python does the work again in every layer and at every step.

    @taped
    def some_fwd(x, weight, eps): ...

The first call with a form runs the function. The second runs it, too, and writes it down (`_recorder`). From this
comes a function (`_player.player`) that makes the same allocations and launches, with the addresses of the tensors at
hand; all later calls with this form run it. Where anything else wants to see a call, it runs without a tape
(`_is_plain`).

Tapes need an NVIDIA GPU and Triton 3.6 or newer, whose launcher they call (`_launcher`). `HF_MEMMIX_TAPES=0` switches
them off. In Triton's interpreter they are off; tests switch them on, and kernels then run with tensors.
"""

import functools
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import knobs

from . import _environment, _launcher
from ._player import ALIGNED, player
from ._recorder import NotTaped, Recorder, interpreted, launched, refuse

__all__ = ["forget", "launched", "refuse", "taped"]

MOST_FORMS = 512  # per function; then its tapes are forgotten
ENABLED = not interpreted and _environment.wants_tapes() and torch.cuda.is_available()

_runtime, _compilation = knobs.runtime, knobs.compilation
_tables = []  # (tapes, forms seen once) of every function


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
            tapes[form] = player(recorder, by_address=not interpreted)
        except NotTaped as found:
            tapes[form] = str(found)
        except Exception as error:  # the call itself has done its work
            tapes[form] = f"{type(error).__name__}: {error}"
        return outputs

    @functools.wraps(function)
    def call(*args):
        if not ENABLED or not _is_plain():
            return function(*args)
        form = _form(-1 if interpreted else torch._C._cuda_getDevice(), args)
        if form is None:
            return function(*args)
        tape = tapes.get(form)
        if type(tape) is FunctionType:
            return tape(*args)
        if tape is not None or not (interpreted or _launcher.is_known()):
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
