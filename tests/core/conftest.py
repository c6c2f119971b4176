"""The tests of the core compare float64 models; in them transformers computes in float64, too."""

import contextlib

import pytest

from float64 import library_in_float64


@pytest.fixture(autouse=True)
def exact_library(request):
    """See float64.py. Tests of torch.compile run transformers without this change."""
    with contextlib.nullcontext() if "compiles" in request.node.keywords else library_in_float64():
        yield
