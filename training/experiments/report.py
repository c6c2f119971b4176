"""The tables of all experiments, from their JSON files, and the pictures of four of them.

    python -m hf_memmix.training.experiments.report RESULTS.json [RESULTS.json ...] [--plot PLOT.png]

`TABLES` and `PLOTS` name the functions by the kind of the results; they take the results of all files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.training.experiments.budget import report as budget
from hf_memmix.training.experiments.coffee import report as coffee
from hf_memmix.training.experiments.common.report import language_section
from hf_memmix.training.experiments.echo import report as echo
from hf_memmix.training.experiments.gka import report as gka
from hf_memmix.training.experiments.gka import variants_report as gka_variants
from hf_memmix.training.experiments.gka_vision import report as gka_vision
from hf_memmix.training.experiments.lattice import report as lattice
from hf_memmix.training.experiments.recall_teacher import raised_report
from hf_memmix.training.experiments.recall_teacher import report as recall_teacher
from hf_memmix.training.experiments.smollm2 import arms_report, kept_layers, long_starts, served


def of_one(function: Callable) -> Callable:
    """A function of one file as a function of all files: the texts one after the other."""
    return lambda files: "\n\n".join(map(function, files))


def baselines(results: dict) -> str:
    """The language models at the shortest context; `tables.papers.lattice_contexts` has the longer ones."""
    settings = results["settings"] | {"contexts": results["settings"]["contexts"][:1]}
    return language_section(results | {"settings": settings}, "transformer", {})


TABLES = {
    "lattice_ablation": of_one(lattice.ablation),
    "recall": of_one(gka.recall),
    "gka_variants": gka_variants.section,
    "gka_vision_digits": of_one(gka_vision.digits),
    "gka_vision_throughput": of_one(gka_vision.throughput),
    "baselines_language": of_one(baselines),
    "coffee_tables": coffee.report,
    "echo_transfer": of_one(echo.report),
    "echo_ablation": of_one(echo.report),
    "echo_mqar": of_one(echo.recall_grid),
    "recall_teacher": of_one(recall_teacher.teacher_section),
    "recall_grid": of_one(recall_teacher.section),
    "kept_layers": of_one(kept_layers.table),
    "long_starts": of_one(long_starts.table),
    "arms": of_one(arms_report.table),
    "served": of_one(served.table),
    "levers": of_one(budget.levers),
}
PLOTS = {
    "arms": arms_report.plot,
    "gka_vision_throughput": gka_vision.plot_throughput,
    "recall_grid": recall_teacher.plot,
    "recall_raised": raised_report.plot,
}


def kind_of(results: dict) -> str:
    """The key of `TABLES` and `PLOTS`; files of the COFFEE paper's tables do not name their experiment."""
    return results.get("experiment", "coffee_tables")


def shown(by_kind: dict[str, Callable], files: list[dict]) -> Callable:
    """The function that shows these files.

    Raises:
        ValueError: these results have no table or no picture.
    """
    kind = kind_of(files[0])
    if kind not in by_kind:
        raise ValueError(f"there is none of {kind!r}; choose from {', '.join(by_kind)}")
    return by_kind[kind]


def main(
    results: Annotated[list[Path], typer.Argument(help="JSON files of one experiment")],
    plot: Annotated[Path | None, typer.Option(help="draw a PNG instead of printing the table")] = None,
) -> None:
    """Print the tables of results, or draw their picture."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    if plot is None:
        print(shown(TABLES, files)(files))
    else:
        shown(PLOTS, files)(files, plot)


if __name__ == "__main__":
    typer.run(main)
