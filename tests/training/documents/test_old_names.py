"""Modules that users start by name keep their old name, with a warning."""

import importlib
import sys

import pytest


@pytest.mark.parametrize("name, folder", [("demo", "bundled"), ("readme_tables", "documents")])
def test_the_old_name_warns_and_is_the_new_module(name, folder):
    old = f"hf_memmix.training.{name}"
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"{old} is now hf_memmix.training.{folder}.{name}"):
        module = importlib.import_module(old)
    assert module.main is importlib.import_module(f"hf_memmix.training.{folder}.{name}").main
