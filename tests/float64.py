"""Runs the parts of transformers that always compute in float32 in float64 inside a float64 model.

The library computes norms, rotary angles, softmax, router weights, losses and the logits of generate() in float32,
whatever the dtype of the model. Two correct runs of a float64 model then differ by float32 roundings, and the network
amplifies these by a factor that depends on the processor. If the casts stay in float64, two correct runs differ by
float64 roundings only, so one bound is far above these and far below a wrong result on every machine.

Only casts of float64 values in the library's code of models, losses and generation change, and in `fused_layers.py`,
which repeats the library's norm. All other casts in our own code stay as they are, so the checks still find a float32
state of ours in a float64 model. torch.compile cannot trace the
changed casts: its tests have the marker `compiles`, run the library as it is, and take their bounds from
`testing.float32_noise`.
"""

import contextlib
import sys
from unittest import mock

import torch

_LIBRARY = (
    "transformers.models.",
    "transformers.generation.",
    "transformers.loss.",
    "transformers.integrations.",
    "hf_memmix.fused_layers",
)


def _stays_float64(x, frame) -> bool:
    """Whether the function of this frame belongs to transformers and casts a value of a float64 model to float32.

    A rotary embedding also casts integer positions; the dtype of its buffers is then the dtype of the model.
    """
    if not frame.f_globals.get("__name__", "").startswith(_LIBRARY):
        return False
    if x.is_floating_point():
        return x.dtype == torch.float64
    module = frame.f_locals.get("self")
    return isinstance(module, torch.nn.Module) and any(b.dtype == torch.float64 for b in module.buffers(False))


def _with_dtype(function):
    """`function` (tensor, ..., dtype) that ignores a float32 dtype where the value stays in float64."""

    def patched(x, *args, **kwargs):
        asks_float32 = torch.float32 in args or kwargs.get("dtype") is torch.float32
        if asks_float32 and _stays_float64(x, sys._getframe(1)):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return function(x, *args, **kwargs)

    return patched


def _float(function):
    """Tensor.float that returns float64 where the value stays in float64."""

    def patched(x, *args, **kwargs):
        return x.double() if _stays_float64(x, sys._getframe(1)) else function(x, *args, **kwargs)

    return patched


@contextlib.contextmanager
def library_in_float64():
    """In this block, transformers does not cast values of float64 models to float32."""
    with contextlib.ExitStack() as stack:
        for owner, name, wrap in (
            (torch.Tensor, "to", _with_dtype),
            (torch.Tensor, "float", _float),
            (torch.nn.functional, "softmax", _with_dtype),
            (torch.nn.functional, "log_softmax", _with_dtype),
        ):
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield
