"""COFFEE (context from feedback): a recurrence whose gate depends on its own state.

`chunk_coffee` chooses between the sequential scan and multiple shooting; `scan_coffee` and `deer_coffee` are the scan
and DEER; `coffee_step` advances a state by one token.
"""

import sys
import types
import warnings

from .naive import naive_coffee
from .op import check_coffee, chunk_coffee, coffee_step, deer_coffee, scan_coffee
from .sizes import coffee_method

__all__ = [
    "check_coffee",
    "chunk_coffee",
    "coffee_method",
    "coffee_step",
    "deer_coffee",
    "naive_coffee",
    "scan_coffee",
]


class _CallablePackage(types.ModuleType):
    """Lets `hf_memmix_kernels.coffee(...)` work, the name of `chunk_coffee` until 0.1: it hid this package."""

    def __call__(self, *args, **options):
        warnings.warn("coffee() is called chunk_coffee() now; the old name will go", FutureWarning, stacklevel=2)
        return chunk_coffee(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
