"""Rules of the tests themselves."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


# what every import of a test and every use of sys.path contains, and few other files
SUSPECT = re.compile(r"^\s*(from\s.*test_|import\s.*test_)|\bsys\s*\.\s*path", re.MULTILINE)


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_imports_no_test_and_leaves_the_path_alone(path):
    """Code of several tests belongs in a module without tests; `pythonpath` of pyproject.toml finds it."""
    if not SUSPECT.search(path.read_text()):
        return
    for node in ast.walk(parsed(path)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported = [name for name in names if name.split(".")[-1].startswith("test_")]
        assert not imported, f"line {node.lineno} imports {imported}: move what it needs to a module beside testing.py"
        changed = isinstance(node, ast.Attribute) and node.attr == "path" and ast.unparse(node.value) == "sys"
        assert not changed, f"line {node.lineno} uses sys.path"


def test_no_other_code_uses_the_path():
    rooms = ("hf_memmix", "conversion", "training", "kernels", "model_cards")
    files = [file for room in rooms for file in (TESTS.parent / room).rglob("*.py")]
    assert len(files) > 250 and not [file for file in files if "sys.path" in file.read_text()]
