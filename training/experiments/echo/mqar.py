"""Echo's grid of multi-query recall. A sequence has n pairs, a gap of noise and n questions; each cell has its own
model. The rates run with one seed, in the given order, until one of them solves the cell (`suite.SOLVED`). If none
does, the rate with the lowest loss on development sequences is chosen, and up to `--further-rates` others run while
it is the largest or the smallest one. The other seeds run at the chosen rate. The first rate of every model comes
first, then in turns the other seeds of the models whose rate is known and further rates.

    python training/experiments/echo/mqar.py --workers 6 --out echo_mqar.json --plot

The paper trains models of 50M parameters with gaps of 64 to 4,096 tokens. There SKA answers all questions in every
cell, attention answers all questions in every cell but one, and Mamba-2 stays at chance. Here the models are those of
`suite.py`, whose keys have 24 dimensions, and the grid has fewer cells. "ska" gets the true action mask,
"ska-unmasked" does not, and "ska-unmasked-k1" moreover has K = 1.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.command_options import command
from hf_memmix.training.experiments.common.harness import attempt, execute
from hf_memmix.training.experiments.common.options import (
    Checkpoints,
    FurtherRates,
    PlottedOptions,
    Points,
    PointsBelow,
    Rates,
    check_names,
    draw_if_asked,
)
from hf_memmix.training.experiments.common.rates import MAX_EXTENSIONS, rows_until_solved
from hf_memmix.training.experiments.echo import suite
from hf_memmix.training.experiments.echo.plots import plot_grid
from hf_memmix.training.experiments.echo.tasks import Examples, draw_examples

# a model of the grid: its name in `suite.MODELS`, options of its SKA layers, and whether they get the true action mask
MODELS = {
    "ssm": ("ssm", {}, False),
    "attention": ("attention", {}, False),
    "ska": ("ska", {}, True),
    "ska-unmasked": ("ska", {}, False),
    "ska-unmasked-k1": ("ska", {"power": 1}, False),
}
CELLS_HELP = "[[pairs, gap], ...] as JSON; [pairs, gap, tokens per step, steps] for a cell with its own numbers"
CELLS = "[[4, 64], [16, 64], [4, 512], [16, 512], [4, 4096]]"


def batches(row: dict, args) -> Iterator[Examples]:
    length, generator = suite.grid_length(row["pairs"], row["gap"]), suite.seeded_generator(row["seed"])
    batch = suite.sequences_per_step(vars(args), row)
    while True:
        drawn = draw_examples("mqar", batch * suite.BATCHES_PER_DRAW, length, row["pairs"], generator, gap=row["gap"])
        yield from (drawn[i * batch : (i + 1) * batch] for i in range(suite.BATCHES_PER_DRAW))


def rows_to_run(done: list[dict], args) -> list[dict]:
    """First rates of all models and cells, then in turns further rates and, where the rate is known, other seeds."""
    kinds = [
        {"model": name, "pairs": pairs, "gap": gap} for pairs, gap, *_ in args.cells for name in reversed(args.models)
    ]
    return rows_until_solved(done, kinds, suite.SOLVED, args)


def run(row: dict, args) -> Iterator[dict]:
    pairs, gap, errors = row["pairs"], row["gap"], {}
    name, ska, masked = MODELS[row["model"]]
    model = suite.build(name, row["seed"], **ska)
    args = SimpleNamespace(**vars(args) | {"steps": suite.budget_of(vars(args), row)[1]})
    name_of_row = f"{row['model']}_{pairs}_{gap}_{row['lr']:g}_{row['seed']}.pt"
    result = suite.learn(
        model,
        batches(row, args),
        masked,
        row,
        args,
        stop_below_loss=args.enough,
        points=args.points,
        points_below=args.points_below,
        checkpoint=args.checkpoints and args.checkpoints / name_of_row,
    )
    yield result | {"parameters": model.num_parameters()}
    if not result["finite"]:
        return
    cell = {
        "length": suite.grid_length(pairs, gap),
        "pairs": pairs,
        "gap": gap,
        "sequences": args.sequences,
        "masked": masked,
    }
    for name, seed, figure in (("dev_loss", suite.DEV_SEED, "loss"), ("accuracy", suite.TEST_SEED, "accuracy")):
        found = attempt(errors, name, suite.measure, model, "mqar", seed=seed, **cell)
        yield {} if found is None else {name: found[figure]}
    if errors:
        yield {"errors": errors}


class Options(PlottedOptions):
    steps: Annotated[
        int,
        typer.Option(help="optimizer steps at most; training ends earlier after --points-below losses below --enough"),
    ] = 3000
    batch: Annotated[int, typer.Option(help="sequences per step, at most")] = 64
    batch_tokens: Annotated[int, typer.Option(help="tokens per step, at most")] = 16384
    enough: Annotated[
        float, typer.Option(help="the loss at which training ends, after --points-below losses in a row below it")
    ] = 0.002
    points: Points = 20
    points_below: PointsBelow = 1
    sequences: Annotated[int, typer.Option(help="sequences measured, at least")] = 128
    cells: Annotated[str, typer.Option(help=CELLS_HELP)] = CELLS
    lrs: Rates = (3e-3, 1e-3)
    further_rates: FurtherRates = MAX_EXTENSIONS
    seeds: int = 1
    checkpoints: Checkpoints = None
    models: Annotated[list[str], typer.Option(help="models to compare; repeatable")] = tuple(suite.MODELS)


def cells_of(text: str, out: Path) -> list[list[int]]:
    """The cells of the option.

    Raises:
        typer.BadParameter: the text is not JSON, a cell is not a list of 2 or 4 numbers, stands twice, or stands with
            other tokens or steps in the results that exist.
    """
    try:
        cells = json.loads(text)
    except json.JSONDecodeError:
        cells = None
    if not isinstance(cells, list) or any(not _is_cell(cell) for cell in cells):
        raise typer.BadParameter(f"{text}: not {CELLS_HELP}", param_hint="--cells")
    known = json.loads(out.read_text())["settings"]["cells"] if out.exists() else []
    for cell in cells:
        same = [other for other in [*cells, *known] if other[:2] == cell[:2]]
        if cells.count(cell) > 1 or any(other != cell for other in same):
            raise typer.BadParameter(f"{cell}: {CELLS_HELP}; the same ones in every run", param_hint="--cells")
    return cells


def _is_cell(cell) -> bool:
    return isinstance(cell, list) and len(cell) in (2, 4) and all(type(n) is int for n in cell)


@command(Options)
def main(args) -> None:
    """Train a model for every cell and write the results."""
    args.cells = cells_of(args.cells, args.out)
    check_names("--models", args.models, MODELS)
    results = execute("echo_mqar", __file__, args, rows_to_run)
    draw_if_asked(args, plot_grid, results)


if __name__ == "__main__":
    typer.run(main)
