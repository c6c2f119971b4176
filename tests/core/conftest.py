"""The tests of the core compare float64 models, which run in float64 throughout."""

import contextlib

import pytest

from float64 import library_in_float64


@pytest.fixture(autouse=True)
def exact_library(request):
    """See float64.py; torch.compile sees the library as it is."""
    with contextlib.nullcontext() if "compiles" in request.node.keywords else library_in_float64():
        yield
