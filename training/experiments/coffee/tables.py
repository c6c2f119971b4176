"""Tables 1 to 6 of the COFFEE paper: the induction head task. All seeds of all settings are trained at the same time.

    python -m hf_memmix.training.experiments.coffee.tables training/results/coffee_table3.json --tables 3 --seconds 450

An epoch is that of the paper: 10,000 batches of 512 new sequences. Where the paper trains up to 100 epochs, the time
limit determines how many run; the JSON records their number. It also holds the paper's figure of each setting.

The paper's model has 512 parameters: the embeddings of nine symbols, of which one is fixed at 1. The paper does not
name the fixed symbol. Here it is the last noise symbol, unless `--fixed` names another one: 8 is the symbol that does
not occur in the input. Further rows of Table 1 fix the embedding of the padding, of the trigger, of symbol 8, or none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_memmix.conversion.records import environment, write_json
from hf_memmix.models.coffee_core import CoffeeCore
from hf_memmix.training.experiments.coffee.baselines import S6Core, TokenGateCore
from hf_memmix.training.experiments.coffee.tasks import (
    LAST_SYMBOL,
    PADDING,
    SYMBOLS,
    TRIGGER,
    UNUSED,
    InductionHead,
)
from hf_memmix.training.experiments.coffee.trainer import Run, train

EPOCH = 10_000
TEST_CHUNKS = 4  # of 2500 sequences
MODELS = {
    "coffee": (CoffeeCore, {"fixed": LAST_SYMBOL}),
    "no feedback": (CoffeeCore, {"fixed": LAST_SYMBOL, "feedback": "input"}),
    "linear feedback": (CoffeeCore, {"fixed": LAST_SYMBOL, "feedback": "linear"}),
    "equation 4": (TokenGateCore, {}),
    "S6": (S6Core, {}),
}


def settings(table: int) -> list[dict]:
    """The rows of a table: model, sizes, task, learning rate, largest number of epochs, and the paper's accuracy."""
    if table == 1:
        return [
            _row(1, "coffee", paper=0.99),
            _row(1, "S6", paper=0.68, rate=0.003, epochs=100, seeds=3),
            *(_row(1, "coffee", paper=0.99, fixed=symbol) for symbol in (None, PADDING, TRIGGER, UNUSED)),
        ]
    if table == 2:
        found = {8: 0.99, 4: 0.99, 2: 0.99, 1: 0.16}
        return [
            _row(2, "coffee", paper=p, states=1, dim=d, seeds=32, epochs=100 if d > 1 else 1, fixed=None)
            for d, p in found.items()
        ]
    if table == 3:
        return [_row(3, "coffee", paper=0.99, rate=0.003, epochs=100, task={"gap": gap}) for gap in (1, 2)]
    if table == 4:
        return [
            _row(4, "coffee", paper=0.99, epochs=100, task={"target": 2}),
            _row(4, "coffee", paper=0.78, rate=0.003, epochs=100, task={"trigger": 2}),
        ]
    if table == 5:
        return [_row(5, "coffee", paper=0.99, epochs=100, task={"length": n}) for n in (32, 64, 128, 256)]
    if table == 6:
        return [
            _row(6, "equation 4", paper=0.68, epochs=100, seeds=4),
            _row(6, "equation 4", paper=0.68, rate=0.003, epochs=100, seeds=4),
            _row(6, "no feedback", paper=0.74, epochs=100, seeds=4),
            _row(6, "no feedback", paper=0.74, rate=0.003, epochs=100, seeds=4),
            _row(6, "linear feedback", paper=0.16),
        ]
    raise ValueError(f"table {table} is not one of 1 to 6; Table 7 is images.py")


def _row(table, model, *, paper, states=8, dim=16, rate=0.01, epochs=1, seeds=8, task=None, **options):
    return {
        "table": table,
        "model": model,
        "states": states,
        "dim": dim,
        "rate": rate,
        "epochs": epochs,
        "seeds": seeds,
        "task": task or {},
        "options": options,
        "paper": paper,
    }


def name_of(row: dict) -> str:
    """The name of a row of `settings` in the results."""
    sizes = "".join(f" {key}={value}" for key, value in {**row["task"], **row["options"]}.items())
    return f"{row['table']}: {row['model']} D={row['dim']} n={row['states']}{sizes} rate={row['rate']}"


def make_run(row: dict, seed: int, epoch: int = EPOCH, batch: int = 512) -> Run:
    """The training run of one row of `settings`."""
    model_class, options = MODELS[row["model"]]
    copies, task = row["seeds"], InductionHead(**row["task"])
    torch.manual_seed(seed)
    model = model_class(SYMBOLS, row["dim"], row["states"], copies=copies, **{**options, **row["options"]})

    def draw(count, generator):
        ids, target = task.draw(copies, count, generator)
        return (ids, task.target), target

    return Run(
        name=name_of(row),
        model=model,
        draw=draw,
        test=lambda generator: (draw(2500, generator) for _ in range(TEST_CHUNKS)),
        seed=seed,
        batch=batch,
        learning_rate=row["rate"],
        iterations=row["epochs"] * epoch,
        # often enough to stop early and to draw a curve
        evaluate_every=epoch // (10 if row["epochs"] == 1 else 5),
        # a run of one epoch is trained to its end; longer runs stop early, as in the paper
        enough=0.995 if row["epochs"] > 1 else 2.0,
        info={"fixed": model.fixed} | {key: row[key] for key in ("table", "model", "states", "dim", "task", "paper")},
    )


def best_weights(run: Run) -> dict:
    """The parameters, as lists, of the copy with the highest accuracy in the last evaluation."""
    accuracy = run.curve[-1]["accuracy"]
    best = accuracy.index(max(accuracy))
    return {name: p[best].tolist() for name, p in run.model.named_parameters()}


@dataclass
class Results:
    """The rows of `settings` whose results are written to one file, and the seed of their models and data."""

    out: Path
    rows: list[dict]
    seed: int = 0


def run_rows(
    files: list[Results],
    seconds: float = float("inf"),
    report: Callable[[str], None] = print,
) -> None:
    """Train the rows of all files at the same time, for at most `seconds`, and write the files.

    Args:
        files: what to train; no two rows have the same name (`name_of`). A file is also written about every 30
            seconds.
        report: as in `trainer.train`.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, where = time.perf_counter(), environment(device)
    runs = {file.out: [make_run(row, file.seed) for row in file.rows] for file in files}
    together = [run for of_file in runs.values() for run in of_file]

    def write(found: dict[str, dict]):
        took = round(time.perf_counter() - start, 1)
        for file in files:
            of_file = {run.name: found[run.name] for run in runs[file.out] if run.name in found}
            about = {"environment": where, "seed": file.seed, "seconds": took}
            write_json(file.out, about | {"runs": of_file}, indent=None)

    found = train(together, device, seconds, report, write)
    for run in together:
        if run.info["model"] == "coffee" and "last" in found[run.name]:
            found[run.name]["weights"] = best_weights(run)
    write(found)


def main(
    out: Annotated[Path, typer.Argument(help="the JSON file to write")],
    tables: Annotated[list[int], typer.Option(help="numbers of tables, 1 to 6; repeatable")] = (1, 2, 3, 4, 5, 6),
    seconds: Annotated[float, typer.Option(help="time limit of all training together")] = float("inf"),
    fixed: Annotated[
        int | None, typer.Option(help="symbol whose embedding is fixed; default: as in the table")
    ] = None,
    seed: int = 0,
    further_seeds: Annotated[
        Path | None,
        typer.Option(help="also train Table 2 with the next seed, into this JSON file"),
    ] = None,
) -> None:
    """Train the rows of the tables."""
    rows = [row for table in tables for row in settings(table)]
    if fixed is not None:
        rows = [{**row, "options": row["options"] | {"fixed": fixed}} for row in rows if row["model"] == "coffee"]
    files = [Results(out, rows, seed)]
    if further_seeds is not None:
        if further_seeds == out:
            raise typer.BadParameter("this is the file of the other rows, too", param_hint="--further-seeds")
        files.append(Results(further_seeds, settings(2), seed + 1))
    run_rows(files, seconds)


if __name__ == "__main__":
    typer.run(main)
