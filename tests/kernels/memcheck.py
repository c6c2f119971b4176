"""Finds out-of-bounds accesses of interpreted kernels.

The interpreter reads and writes any address, and on a CPU a wrong address seldom faults. With `bounds_checked`, a load
or store raises if a lane that is not masked is outside the elements of all tensors passed to the launch. This also
finds accesses that on a GPU would silently read or write another tensor. int32 overflow of an address is not modelled.
"""

import contextlib

import numpy as np
import torch


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """[first byte, end) of a tensor's elements."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + reach) * tensor.element_size()


def tensors_in(arguments) -> list[torch.Tensor]:
    """All tensors with at least one element among the arguments of a launch, also inside tuples."""
    found = []
    for argument in arguments:
        if isinstance(argument, tuple):
            found += tensors_in(argument)
        elif isinstance(argument, torch.Tensor) and argument.numel():
            found.append(argument)
    return found


def check(pointers: np.ndarray, mask: np.ndarray, size: int, extents: list[tuple[int, int]], what: str) -> None:
    """Check that `size` bytes from every pointer that the mask selects are inside one extent.

    Raises:
        ValueError: an address is outside all extents; the message has the first one.
    """
    pointers = np.asarray(pointers).reshape(-1)[np.asarray(mask, dtype=bool).reshape(-1)].astype(np.int64)
    inside = np.zeros(pointers.shape, dtype=bool)
    for first, end in extents:
        inside |= (pointers >= first) & (pointers + size <= end)
    if not inside.all():
        stray = int(pointers[~inside][0])
        near = min(extents, key=lambda extent: max(extent[0] - stray, stray + size - extent[1]), default=None)
        place = "there are no tensors" if near is None else f"{stray - near[0]} bytes into one of {near[1] - near[0]}"
        raise ValueError(f"a {what} of {size} bytes is outside every argument: {place}, {(~inside).sum()} such lanes")


@contextlib.contextmanager
def bounds_checked():
    """In this block, loads, stores and atomics of the interpreter raise outside the tensors of their launch.

    Yields a dictionary whose "accesses" counts the checked ones.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    extents, seen = [], {"accesses": 0}

    def checked(create, what):
        def access(self, pointers, *args):
            # the mask is the second argument of a load and the third argument of a store or an atomic
            mask = args[0 if what == "load" else 1].data
            size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
            check(pointers.data, mask, size, extents, what)
            seen["accesses"] += 1
            return create(self, pointers, *args)

        return access

    load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    init = executor._init_args_hst

    def remember(self, args, kwargs):
        args, kwargs = init(self, args, kwargs)
        extents[:] = [_extent(t) for t in tensors_in((*args, *kwargs.values()))]
        return args, kwargs

    def atomic(self, operation, pointers, value, mask, *args):
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        check(pointers.data, mask.data, size, extents, "atomic")
        seen["accesses"] += 1
        return rmw(self, operation, pointers, value, mask, *args)

    builder.create_masked_load, builder.create_masked_store = checked(load, "load"), checked(store, "store")
    builder.create_atomic_rmw, executor._init_args_hst = atomic, remember
    try:
        yield seen
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw, executor._init_args_hst = rmw, init
