"""Launches of a compiled kernel without the Python of Triton's own: the one module that knows Triton's launchers.

`launch_of` says what to call, and with which arguments. In the versions of `LAYOUTS` that is the launcher in C, which
is private; in all newer ones it is Triton's own `kernel[grid](...)`, which costs about a microsecond more.
"""

import functools
from collections.abc import Callable

import torch
import triton

OLDEST = (3, 6)  # before it, a compiled kernel is not called with its constants


@functools.cache
def is_known() -> bool:
    """Whether Triton launches by its driver of NVIDIA GPUs, in a version whose launches can be repeated."""
    if torch.version.hip is not None or _version() < OLDEST:
        return False
    from triton.backends.nvidia.driver import CudaDriver

    return isinstance(triton.runtime.driver.active, CudaDriver)


def launch_of(kernel, grid: tuple, stream: object, args: tuple) -> tuple[Callable, tuple]:
    """What launches a compiled kernel: a function and its arguments.

    Args:
        kernel: what a launch by Triton returned.
        grid: one to three numbers.
        stream: a handle, or what stands for it.
        args: all arguments of the kernel, constants included, with addresses or what stands for them.
    """
    grid, run = (*grid, 1, 1)[:3], kernel.run
    arguments_of = LAYOUTS.get(_version())
    if arguments_of is None or run.global_scratch_size or run.profile_scratch_size:
        launch_by_triton = kernel[grid]

        def launch(stream, *args):
            launch_by_triton(*args, stream=stream)

        return launch, (stream, *args)
    head = (*grid, stream, kernel.function, bool(run.launch_cooperative_grid), bool(run.launch_pdl))
    return run.launch, head + arguments_of(kernel, args)


def _version() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))


# the end of what CudaLauncher.__call__ passes on: without scratch memory, metadata of a launch, and hooks


def _in_a_row(kernel, args: tuple) -> tuple:
    return (None, None, kernel.packed_metadata, None, None, None, *args)


def _in_a_tuple(kernel, args: tuple) -> tuple:
    run = kernel.run
    return (kernel.packed_metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature, args)


LAYOUTS = {(3, 6): _in_a_row, (3, 7): _in_a_tuple, (3, 8): _in_a_tuple, (3, 9): _in_a_tuple}
