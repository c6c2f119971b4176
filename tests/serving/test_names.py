"""The names of vLLM that the plugin needs are there. Run this file first with a new version."""

import importlib
from pathlib import Path

import pytest

from hf_memmix.serving.vllm import private_names


@pytest.mark.parametrize("row", private_names.imported(), ids=lambda row: f"{row.owner}:{row.names[0]}")
def test_imported_name(row):
    module = importlib.import_module(f"vllm.{row.owner}" if row.owner else "vllm")
    assert hasattr(module, row.names[0])


def test_used_names():
    """Those that are overridden, called or read, and the arguments that they take."""
    import vllm

    assert private_names.missing(Path(vllm.__file__).parents[1]) == []
