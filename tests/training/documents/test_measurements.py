"""Every committed result is in the one table of measurements, and every entry is a committed file."""

import ast
import json

import pytest

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.documents.measurements import MEASUREMENTS, path_of, read


def test_all_results_are_listed_once():
    listed = [CHECKOUT / path for path in MEASUREMENTS.values()]
    assert len(set(listed)) == len(listed)
    found = set(CHECKOUT.glob("training/**/results/*.json"))
    assert found and found == {path for path in listed if (CHECKOUT / "training") in path.parents}
    assert all(path.is_file() for path in listed)


def test_installed_modules_do_not_need_the_experiments():
    """The wheel has no experiments. Only the tables import them, inside a function."""
    folders = [CHECKOUT / name for name in ("hf_memmix", "conversion", "training")]
    files = [file for folder in folders for file in folder.rglob("*.py") if "experiments" not in file.parts]
    assert len(files) > 60
    users = {str(file.relative_to(CHECKOUT)) for file in files if "training.experiments" in file.read_text()}
    assert users == {"training/documents/tables.py", "training/documents/choice_tables.py"}
    module = ast.parse((CHECKOUT / "training/documents/tables.py").read_text())
    assert not [node for node in module.body if isinstance(node, ast.ImportFrom) and "experiments" in node.module]


def test_reading_and_mistakes(tmp_path):
    assert read("recall") == json.loads(path_of("recall").read_text())
    with pytest.raises(ValueError, match="no measurement 'tea'; choose from demo"):
        path_of("tea")
    with pytest.raises(ValueError, match="does not exist; run this in a checkout"):
        path_of("demo", tmp_path)
