"""The modules of the package by name, and what each of them imports, read from their source."""

import ast
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE_DIRS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]


class Import(NamedTuple):
    importer: str
    target: str
    lazy: bool


def modules():
    for package, folder in PACKAGE_DIRS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield ".".join([package, *(parts[:-1] if is_package else parts)]), is_package, file


def imports_of(name, is_package, file):
    """All imports of a module, `from . import x` resolved to full names; lazy ones stand inside a function."""
    package = name.split(".") if is_package else name.split(".")[:-1]

    def visit(node, lazy):
        for child in ast.iter_child_nodes(node):
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(name, alias.name, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) + 1 - child.level] if child.level else []
                base = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    yield Import(name, full if full in MODULES else base, lazy)
            else:
                yield from visit(child, inside)

    return list(visit(ast.parse(file.read_text(), str(file)), False))


def within(name, package):
    return name == package or name.startswith(package + ".")


MODULES = {name: (name, is_package, file) for name, is_package, file in modules()}
