"""Which ops run on which path. A row that would say nothing new, or take too long in Triton's interpreter, is not
made; on a GPU every op runs on every path.
"""

from collections.abc import Callable

import pytest
from ops_table import DEVICE, OPS, Op

PATHS = ("torch", "native", "triton")
# rows that vary another one by an option
VARIANTS = {op.name for op in OPS if op.brief} | {"gka_refined", "gka_sketched", "coffee_filtered"}
QUICK = {"gla", "coffee", "short_conv"}  # in the interpreter


def exists(op: Op, path: str) -> bool:
    """Whether the tests run this op on this path here."""
    return DEVICE == "cuda" or path != "triton" or op.name not in VARIANTS


def everyday(op: Op, path: str) -> bool:
    """Whether `make test` runs it: one op in the interpreter, no variants."""
    return op.name not in VARIANTS and (path != "triton" or op.name == "gla")


def quick(op: Op, path: str) -> bool:
    """As `everyday`, for a test of few tokens: all rows of the torch and native paths, and three ops in the
    interpreter.
    """
    return path != "triton" or op.name in QUICK


def on_paths(often: Callable[[Op, str], bool] = everyday, ops: list[Op] = OPS, paths: tuple[str, ...] = PATHS):
    """Decorator of a test of (op, backend); rows that are not `often` true have the mark `product`."""
    rows = [(op, path) for path in paths for op in ops if exists(op, path)]
    return parametrize(("op", "backend"), [(*row, often(*row)) for row in rows])


def parametrize(names: tuple[str, ...], rows: list[tuple]):
    """`pytest.mark.parametrize` of rows that end with whether `make test` runs them; one name is "backend"."""
    made = []
    for *values, often in rows:
        name = "-".join(str(value) for value in reversed(values))
        made.append(pytest.param(*values, marks=() if often else pytest.mark.product, id=name))
    return pytest.mark.parametrize(names, made, indirect=["backend"])
