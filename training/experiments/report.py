"""The tables and plots of all experiments, from their JSON files.

    python -m hf_memmix.training.experiments.report RESULTS.json [RESULTS.json ...] [--plot PLOT.png]

`EXPERIMENTS` says for each kind of results which functions write its table and draw its plot.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_memmix.training.experiments.baselines import report as baselines
from hf_memmix.training.experiments.coffee import plots as coffee_plots
from hf_memmix.training.experiments.coffee import report as coffee
from hf_memmix.training.experiments.common.plots import plot_language
from hf_memmix.training.experiments.conversion import context_use, kept_layers, starts_report, table_report
from hf_memmix.training.experiments.echo import plots as echo_plots
from hf_memmix.training.experiments.echo import report as echo
from hf_memmix.training.experiments.gka import figure3a_report as gka_figure3a
from hf_memmix.training.experiments.gka import plots as gka_plots
from hf_memmix.training.experiments.gka import report as gka
from hf_memmix.training.experiments.gka import solvers_report as gka_solvers
from hf_memmix.training.experiments.gka import variants_report as gka_variants
from hf_memmix.training.experiments.gka_vision import report as gka_vision
from hf_memmix.training.experiments.lattice import plots as lattice_plots
from hf_memmix.training.experiments.lattice import report as lattice
from hf_memmix.training.experiments.mixtures import report as mixtures
from hf_memmix.training.experiments.recall_teacher import raised_report as recall_raised
from hf_memmix.training.experiments.recall_teacher import report as recall_teacher


@dataclass(frozen=True)
class Experiment:
    """The functions that show one kind of results.

    table: takes the results and returns Markdown; None if the experiment has no table.
    plot: takes the results and the path of the PNG to write; None if the experiment has no plot.
    takes_all_files: both functions take the list of all result files, because the tables are spread over several
        files.
    """

    table: Callable | None
    plot: Callable | None
    takes_all_files: bool = False


EXPERIMENTS = {
    "lattice_language": Experiment(lattice.language, lattice_plots.plot_languages, takes_all_files=True),
    "lattice_ablation": Experiment(lattice.ablation, lattice_plots.plot_ablation),
    "enc_as_written": Experiment(lattice.as_written, None),
    "recall": Experiment(gka.recall, gka_plots.plot_recall),
    "gka_solvers": Experiment(gka_solvers.section, gka_solvers.plot),
    "gka_variants": Experiment(gka_variants.section, gka_variants.plot, takes_all_files=True),
    "gka_figure3a": Experiment(gka_figure3a.section, gka_figure3a.plot, takes_all_files=True),
    "gka_vision_digits": Experiment(gka_vision.digits, None),
    "gka_vision_throughput": Experiment(gka_vision.throughput, gka_vision.plot_throughput),
    "baselines_language": Experiment(baselines.language, baselines.plot_language),
    "coffee_language": Experiment(coffee.language, plot_language),
    "coffee_tables": Experiment(coffee.report, coffee_plots.plot_tables, takes_all_files=True),
    "coffee_pixels": Experiment(coffee.pixels, coffee_plots.plot_pixels),
    "coffee_ih0": Experiment(None, coffee_plots.plot_ih0),
    "echo_transfer": Experiment(echo.report, echo_plots.plot_transfer),
    "echo_ablation": Experiment(echo.report, echo_plots.plot_ablation),
    "echo_mqar": Experiment(echo.report, echo_plots.plot_grid),
    "echo_scratchpad": Experiment(echo.report, echo_plots.plot_scratchpad),
    "conversion_table": Experiment(table_report.section, table_report.plot),
    "init_table": Experiment(starts_report.section, None),
    "context_use": Experiment(context_use.section, None),
    "compare_plans": Experiment(kept_layers.table, kept_layers.draw_sets),
    "mixtures": Experiment(mixtures.section, mixtures.plot),
    "recall_teacher": Experiment(recall_teacher.teacher_section, recall_teacher.plot_teacher),
    "recall_grid": Experiment(recall_teacher.section, recall_teacher.plot),
    "recall_raised": Experiment(recall_raised.section, recall_raised.plot, takes_all_files=True),
}


def kind_of(results: dict) -> str:
    """The key of `EXPERIMENTS`; files of the COFFEE paper's tables do not name their experiment."""
    return results.get("experiment") or ("coffee_ih0" if "learned" in results else "coffee_tables")


def report(files: list[dict]) -> str:
    """The tables of all result files, in the order of the files.

    Raises:
        ValueError: this kind of results has a plot but no table.
    """
    kinds = [kind_of(results) for results in files]
    for kind in kinds:
        if EXPERIMENTS[kind].table is None:
            raise ValueError(f"{kind} has no table, only a plot; give --plot")
    if EXPERIMENTS[kinds[0]].takes_all_files:
        return EXPERIMENTS[kinds[0]].table(files)
    return "\n\n".join(EXPERIMENTS[kind].table(results) for kind, results in zip(kinds, files, strict=True))


def main(
    results: Annotated[list[Path], typer.Argument(help="JSON files of one experiment")],
    plot: Annotated[Path | None, typer.Option(help="draw a PNG instead of printing the table")] = None,
) -> None:
    """Print the tables of results, or draw their plot."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    if plot is None:
        print(report(files))
        return
    experiment = EXPERIMENTS[kind_of(files[0])]
    if experiment.plot is None:
        raise typer.BadParameter(f"{kind_of(files[0])} has no plot", param_hint="--plot")
    experiment.plot(files if experiment.takes_all_files else files[0], plot)


if __name__ == "__main__":
    typer.run(main)
