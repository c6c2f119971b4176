"""A CPU with the limits of a GPU that has no float64, for example Apple's: a float64 tensor on it is an error.

All tensors of a test are on the CPU, those too that a model on an Apple GPU would have in the GPU's memory. So the
mode follows what is the host's: what `.cpu()` or `.to("cpu")` returns, what a function makes without any tensor and
without `device=`, and what is computed from these alone, until it goes to a `torch.device`. Make models outside of
the mode, so that their parameters are the device's.
"""

import contextlib
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import hf_memmix_kernels._common


class WithoutFloat64(TorchFunctionMode):
    """Raises TypeError if a function of torch returns a float64 tensor that is not the host's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        if function is torch.Tensor.cpu or "cpu" in [x for x in given if isinstance(x, str)]:
            host = True
        elif any(isinstance(x, torch.device) for x in given):
            host = False
        else:
            host = all(getattr(x, "of_the_host", False) for x in tensors)
        if host:
            # `.cpu()` of a CPU's tensor is the tensor itself, which stays the device's
            result = tree_map_only(torch.Tensor, lambda x: self._mark(x, any(x is t for t in tensors)), result)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not host and x.dtype in (torch.float64, torch.complex128):
                name = getattr(function, "__name__", function)
                raise TypeError(f"{name} makes a float64 tensor {tuple(x.shape)} on the device")
        return result

    @staticmethod
    def _mark(x: torch.Tensor, shared: bool) -> torch.Tensor:
        x = x.view_as(x) if shared and not getattr(x, "of_the_host", False) else x
        x.of_the_host = True
        return x


@contextlib.contextmanager
def without_float64():
    """Runs the block as on such a GPU. Set HF_MEMMIX_BACKEND=torch, native code is the CPU's."""
    with WithoutFloat64(), mock.patch.object(hf_memmix_kernels._common, "has_float64", lambda device: False):
        yield
