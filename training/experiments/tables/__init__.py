"""The tables of all pages, from committed results: `ALL` has their functions by name, `figures.py` writes them."""

import inspect

from hf_memmix.training.experiments.common.report import rows_table
from hf_memmix.training.experiments.report import TABLES, shown
from hf_memmix.training.experiments.results import read
from hf_memmix.training.experiments.tables import bundled, costs, kernels, papers, quality, serving


def results(*names: str) -> str:
    """The report of an experiment from the files of these names."""
    files = [read(name) for name in names]
    return shown(TABLES, files)(files)


def rows(name: str, by: str, *figures: str) -> str:
    """`rows_table` of a file of results."""
    return rows_table(read(name), by, *figures)


# a public function of a module is a table of its name
ALL = {"results": results, "rows": rows} | {
    name: function
    for module in (bundled, costs, kernels, papers, quality, serving)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
