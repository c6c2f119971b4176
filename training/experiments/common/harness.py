"""Runs the rows of an experiment in several processes, and writes finished rows to a JSON file.

An experiment is a module with a function `run(row, args)`, which returns the results of one row, and an `Experiment`,
whose `rows(done, args)` returns the rows that can run now, the most important first:

    class Settings(Options):
        lrs: Rates = (1e-3, 2e-3)

    def run(row, args): ...

    main = Experiment("name", __file__, Settings, lambda done, args: plan(done, ARMS, args.lrs, seeds=3)).command()

    if __name__ == "__main__":
        typer.run(main)

Rows and results are dictionaries of JSON values. Finished rows do not run again, so the same command resumes a run
that a time limit stopped. A row that fails is recorded with its error, does not stop the others, and is tried again by
the next command. `rates.plan` makes the rows of arms, budgets and seeds; `report.rows_table` is their table.

`run` may also be a generator of parts of the results. Each part is written at once, so the file holds the training of
a row before the row is measured. A row is "unfinished" until its last part; if it is stopped before, the next command
runs it again. A measurement that fails (`attempt`) is listed in the row's "errors"; the row is finished without it.
"""

import importlib
import itertools
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import torch

from hf_memmix.command_options import command
from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.experiments.bundled.versions import check_teacher, earlier_teacher

PACKAGE = "hf_memmix.training.experiments"
GRACE = 20.0  # seconds after the deadline in which a running row may still end
# options that do not change what is measured: a resumed run may change them
_RESUME_MAY_CHANGE = ("out", "workers", "seconds", "deadline", "text", "images", "teacher", "data")
_RESUME_MAY_CHANGE += ("heldout", "domain", "given_steps", "compile", "few_shot")
# options that list what is compared: a resumed run may name a part of them, or more; the file then lists all
_RESUME_MAY_EXTEND = (
    "models",
    "arms",
    "variants",
    "contexts",
    "resolutions",
    "cells",
    "tasks",
    "seeds",
)
# experiments that convert or measure the bundled transformer
OF_THE_BUNDLED_TEACHER = ("context_use", "mixtures")


class OutOfTime(Exception):
    """The time limit of the command passed before a row ended. The next command runs this row again."""


@dataclass(frozen=True)
class Experiment:
    """An experiment whose command runs its rows.

    Args:
        name: its name in its results.
        script: the file of the module with `run`, in a folder of `training/experiments`.
        options: a subclass of `options.Options`.
        rows: the rows that can run now, from the finished ones and the options.
        check: raises a usage error for options that cannot be run, and may change them.
        about: further entries of the results, from the options: for example the training text.
    """

    name: str
    script: str
    options: type
    rows: Callable[[list[dict], SimpleNamespace], list[dict]]
    check: Callable[[SimpleNamespace], object] = lambda args: None
    about: Callable[[SimpleNamespace], dict] = lambda args: {}

    def command(self) -> Callable:
        """The function that typer runs."""

        @command(self.options)
        def main(args) -> None:
            """Run every row and write the results."""
            self.check(args)
            execute(self.name, self.script, args, self.rows, **self.about(args))

        return main


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_time(args: SimpleNamespace) -> None:
    """Raise OutOfTime after the command's deadline. Functions that run a row call it regularly."""
    if time.time() > args.deadline:
        raise OutOfTime


def attempt(errors: dict[str, str], name: str, function: Callable, *args, **kwargs):
    """The result of the function. If it raises, the result is None and `errors[name]` holds the error's text."""
    try:
        return function(*args, **kwargs)
    except OutOfTime:
        raise
    except Exception as error:
        traceback.print_exc()
        errors[name] = _message(error)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def measured_at(results: dict) -> str:
    """The hardware of the results and the commits of their rows. A run that was resumed may have several of both; of
    more than three commits the first is named, and the file has the others.

    Results of an earlier bundled transformer than today's also name it.
    """
    where, places = results["environment"], {}
    for row in results["rows"]:
        commits = places.setdefault(row.get("hardware") or where["hardware"], {})
        commits[row.get("commit") or where["commit"]] = None
    texts = [f"{hardware}, commit {_few(list(commits))}" for hardware, commits in places.items()]
    earlier = [earlier_teacher(results)] if results.get("experiment") in OF_THE_BUNDLED_TEACHER else []
    return "; ".join(filter(None, texts + earlier))


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} others"


def matches(record: dict, row: dict) -> bool:
    """Whether a record of the results has all values of this row."""
    return all(record.get(key) == value for key, value in row.items())


def load_results(args: SimpleNamespace, name: str) -> dict:
    """The results that `args.out` holds, without rows that failed or are unfinished; no rows if there is no file.

    The models, variants, contexts and cells in the settings are those of all runs that wrote the file.

    Raises:
        ValueError: the file's results were measured with other settings.
    """
    settings = json.loads(
        json.dumps({key: value for key, value in vars(args).items() if key not in _RESUME_MAY_CHANGE})
    )
    results = {"experiment": name, "environment": environment(), "settings": settings, "rows": []}
    if args.out.exists():
        old = json.loads(args.out.read_text())
        for key in settings.keys() & old["settings"].keys() & set(_RESUME_MAY_EXTEND):
            known = old["settings"][key]
            if not isinstance(known, list):
                continue  # a number of seeds, for example, decides what is measured
            settings[key] = known + [value for value in settings[key] if value not in known]
            old["settings"][key] = settings[key]
        if old["settings"] != settings:
            differ = sorted(k for k in {*settings, *old["settings"]} if settings.get(k) != old["settings"].get(k))
            raise ValueError(f"{args.out} was measured with another {', '.join(differ)}; choose another --out")
        place = {key: old["environment"][key] for key in ("hardware", "commit")}
        place = place if place["hardware"] != results["environment"]["hardware"] else {}
        results["rows"] = [place | row for row in old["rows"] if not row.keys() & {"error", "unfinished"}]
    return results


def execute(name: str, script: str | Path, args: SimpleNamespace, rows_to_run: Callable, **about) -> dict:
    """Run the rows that `rows_to_run` returns until all of them have run or the time limit has passed.

    Args: as those of `Experiment`.

    Returns the content of `args.out`: "experiment", "environment", "settings", the entries of `about`, and "rows".
    """
    args.deadline = time.time() + args.seconds
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_teacher(args.out, about)
    results = load_results(args, name) | about
    module = f"{PACKAGE}.{Path(script).parent.name}.{Path(script).stem}"
    gpus, idle, busy = itertools.cycle(_gpus_of_workers()), [], {}
    try:
        while True:
            tried = [*results["rows"], *(row for row, _ in busy.values())]
            done = [row for row in results["rows"] if "unfinished" not in row]
            waiting = [row for row in rows_to_run(done, args) if not any(matches(t, row) for t in tried)]
            waiting = waiting if time.time() < args.deadline else []
            while waiting and len(busy) < max(1, args.workers):
                pipe, process = idle.pop() if idle else _start(module, args, next(gpus))
                pipe.send(waiting[0])
                busy[pipe] = (waiting.pop(0), process)
            if not busy:
                break
            # a row that is running gets GRACE seconds more; after them the command stops waiting for it
            rest = args.deadline + GRACE - time.time()
            ready = wait(list(busy), None if rest == float("inf") else max(rest, 0))
            if not ready:
                break
            for pipe in ready:
                row, process = busy.pop(pipe)
                outcome = _received(pipe, process)
                if outcome is not None and "unfinished" in outcome:
                    busy[pipe] = (row, process)
                elif outcome is not None and outcome.keys() & {"error", "errors"}:
                    process.terminate()  # its CUDA context may be unusable
                else:
                    idle.append((pipe, process))
                if outcome is None:
                    continue
                _record(results, row, outcome)
                write_json(args.out, results)
                if "unfinished" not in outcome:
                    shown = {k: round(v, 4) for k, v in outcome.items() if isinstance(v, float)}
                    print(name, row, outcome.get("error", shown), outcome.get("errors", ""), flush=True)
    finally:
        for _, process in [*idle, *busy.values()]:
            process.terminate()
    return results


def _received(pipe, process) -> dict | None:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return {"error": f"its process ended with exit code {process.exitcode}"}


def _record(results: dict, row: dict, outcome: dict) -> None:
    """Replace the record of a row by its outcome. If the outcome is an error, keep the parts already recorded."""
    known = [record for record in results["rows"] if matches(record, row)]
    results["rows"] = [record for record in results["rows"] if not matches(record, row)]
    parts = {k: v for k, v in known[0].items() if k != "unfinished"} if known and "error" in outcome else row
    results["rows"].append({**parts, **outcome, "commit": results["environment"]["commit"]})


def _gpus_of_workers() -> list[str]:
    """The values of CUDA_VISIBLE_DEVICES for the workers, in turn: each worker sees one GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(max(1, torch.cuda.device_count()))] if visible is None else visible.split(",")


def _start(module: str, args: SimpleNamespace, gpu: str) -> tuple:
    """Start a process; returns its pipe and the process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, module, args, gpu), daemon=True)
    process.start()
    there.close()
    return here, process


def work(pipe, module: str, args: SimpleNamespace, gpu: str) -> None:
    """The work of a process: receive rows and send results, or None for a row that the deadline stopped."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # set before the first use of CUDA, when it is read
    experiment = importlib.import_module(module)
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        began = time.time()
        try:
            outcome = experiment.run(row, args)
            if isinstance(outcome, Iterator):
                parts, outcome = outcome, {}
                for part in parts:
                    outcome |= part
                    pipe.send({**outcome, "unfinished": True})
            outcome["seconds"] = round(time.time() - began, 1)
        except OutOfTime:
            outcome = None
        except Exception as error:
            traceback.print_exc()
            outcome = {"error": _message(error)}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        pipe.send(outcome)
