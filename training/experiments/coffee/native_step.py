"""A training step of `CoffeeCore` on the induction head task in native code, for a CPU.

A step of such a tiny model by torch spends most of its time between the sixty calls of torch. `gradients` computes the
loss and its gradients in one call; they are those of autograd but for the rounding (a test compares them).
"""

import ctypes
import functools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from hf_memmix.models.coffee_core import CoffeeCore
from hf_memmix_kernels import _native

SOURCE = Path(__file__).with_name("native_step.cpp")
TOGETHER = 32  # sequences: a batch must be a multiple
MAX_SYMBOLS = 16


@functools.cache
def _function():
    """The compiled function.

    Raises:
        NativeError: it cannot be compiled.
    """
    command = _native.compiler()
    if command is None:
        raise _native.NativeError("no C++ compiler is installed")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / SOURCE.name
        source.write_text(SOURCE.read_text())
        (Path(folder) / "native.h").write_text((_native.ROOT / "native.h").read_text())
        library = ctypes.CDLL(str(_native.compile_source(source, Path(folder), SOURCE.stem, command)))
    found = library.induction_gradients
    found.argtypes, found.restype = [ctypes.c_void_p] * 11 + [ctypes.c_int64] * 7, None
    return found


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


@torch.no_grad()
def gradients(model: CoffeeCore, ids: Tensor, target: Tensor, threads: int = 1) -> Tensor:
    """Write the gradients of the mean loss of every copy to the `grad` of the parameters.

    Args:
        model: on the CPU, with the sigmoid feedback and without an output filter.
        ids: tokens [S, B, L] from 0 to M - 1, B a multiple of 32.
        target: [S, B, K], the symbols to be predicted at the last K tokens.
        threads: among which the copies are divided.

    Returns:
        The mean loss of every copy [S].

    Raises:
        ValueError: another kind of model, or sizes that do not fit.
    """
    plain = isinstance(model, CoffeeCore) and model.feedback == "sigmoid" and model.w_filter is None
    if not plain or model.symbols > MAX_SYMBOLS:
        raise ValueError("the native step takes a CoffeeCore with no other feedback, no filter and at most 16 symbols")
    (copies, batch, tokens), last = ids.shape, target.shape[2]
    if batch % TOGETHER:
        raise ValueError(f"a batch of {batch} sequences is no multiple of {TOGETHER}")
    parameters = (model.lam, model.w, model.C)
    table, loss = model.embeddings().contiguous(), torch.empty(copies)
    grads = [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in (table, *parameters)]
    tensors = (table, *(p.contiguous() for p in parameters), ids.contiguous(), target.contiguous(), loss, *grads)
    sizes, function = (batch, tokens, last, model.symbols, model.dim, model.lam.shape[2]), _function()

    def part(first: int, stop: int):  # ctypes lets other threads run
        function(*(t[first:stop].data_ptr() for t in tensors), stop - first, *sizes)

    ends = [copies * i // threads for i in range(threads + 1)]
    list(_pool(threads).map(part, ends[:-1], ends[1:]))
    learned = [m for m in range(model.symbols) if m != model.fixed]
    model.embedding.grad = grads[0][:, learned]
    for p, grad in zip(parameters, grads[1:], strict=True):
        p.grad = grad
    return loss
