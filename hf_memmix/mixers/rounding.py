"""Warns when `model.half()`, `model.to(torch.bfloat16)` etc. round parameters that a mixer needs in fp32.

`from_pretrained(dtype=...)` keeps these parameters in fp32. torch's casts do not know them, and a rounded decay
changes what the memory still holds after many tokens.
"""

import warnings
from typing import ClassVar

import torch
from torch import nn

_HALVES = (torch.float16, torch.bfloat16)


class WarnsOfRounding(nn.Module):
    """Base class of a module with `fp32_parameters`, names of its own parameters."""

    fp32_parameters: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn, recurse=True):
        # every cast and move of torch ends here, also that of a wrapper such as PEFT's
        exact = [name for name in self.fp32_parameters if self._dtype_of(name) not in (None, *_HALVES)]
        super()._apply(fn, recurse)
        if rounded := [name for name in exact if self._dtype_of(name) in _HALVES]:
            dtype = self._dtype_of(rounded[0])
            warnings.warn(
                f"{', '.join(rounded)} of {type(self).__name__} were rounded to {dtype}, and their errors"
                " add up over the tokens; to keep them in float32, load the model by from_pretrained(folder,"
                f" dtype={dtype})",
                stacklevel=2,
            )
        return self

    def _dtype_of(self, name: str) -> torch.dtype | None:
        parameter = self._parameters.get(name)
        return None if parameter is None else parameter.dtype
