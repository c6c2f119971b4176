"""The committed results of experiments and benchmarks by the names of their files: `read("recall")` is recall.json."""

import functools
import json
from pathlib import Path

from hf_memmix.conversion.records import CHECKOUT

FOLDERS = ("training/experiments/*/results", "kernels/benchmarks/results", "hf_memmix/serving/results")


@functools.cache
def all_results() -> dict[str, Path]:
    """The path of every JSON file with results, by its name without suffix.

    Raises:
        ValueError: two files have the same name.
    """
    paths = [path for folder in FOLDERS for path in sorted(CHECKOUT.glob(f"{folder}/*.json"))]
    found = {path.stem: path for path in paths}
    if len(found) < len(paths):
        twice = sorted(str(path) for path in paths if path not in found.values())
        raise ValueError(f"other results have the names of {', '.join(twice)}; rename these files")
    return found


def path_of(name: str) -> Path:
    """The file of results.

    Raises:
        ValueError: there is no file of this name.
    """
    if name not in all_results():
        raise ValueError(f"there are no results {name!r}; choose from {', '.join(all_results())}")
    return all_results()[name]


def read(name: str):
    """The content of a file of results; errors as in `path_of`."""
    return json.loads(path_of(name).read_text(encoding="utf-8"))
