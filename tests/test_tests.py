"""Rules of the tests themselves."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent


# what every import of a test and every use of sys.path contains, and few other files
SUSPECT = re.compile(r"^\s*(from\s.*test_|import\s.*test_)|\bsys\s*\.\s*path", re.MULTILINE)


def test_no_file_imports_a_test_or_changes_the_path():
    """Code of several tests belongs in a module without tests; `pythonpath` of pyproject.toml finds it."""
    files = sorted(TESTS.rglob("*.py"))
    wrong = [f"{file.relative_to(TESTS)}: {found}" for file in files for found in what_is_wrong(file)]
    assert not wrong, "move what several tests need to a module beside testing.py"


def what_is_wrong(file):
    text = file.read_text()
    for node in ast.walk(ast.parse(text)) if SUSPECT.search(text) else ():
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (f"line {node.lineno} imports {n}" for n in names if n.split(".")[-1].startswith("test_"))
        if isinstance(node, ast.Attribute) and node.attr == "path" and ast.unparse(node.value) == "sys":
            yield f"line {node.lineno} uses sys.path"


def test_no_other_code_uses_the_path():
    rooms = ("hf_memmix", "conversion", "training", "kernels", "model_cards")
    files = [file for room in rooms for file in (TESTS.parent / room).rglob("*.py")]
    assert len(files) > 250 and not [file for file in files if "sys.path" in file.read_text()]
