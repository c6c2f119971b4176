"""Runs the rows of an experiment in several processes on one device, and writes finished rows to a JSON file.

An experiment is a module with two functions. `rows_to_run(done, args)` returns the rows that can run now, the most
important first. `run(row, args)` returns the results of one row. Rows and results are dictionaries of JSON values.
Finished rows do not run again, so the same command resumes a run that a time limit stopped. A row that fails is
recorded with its error, does not stop the others, and is tried again by the next command.

`run` may also be a generator of parts of the results. The harness writes each part at once, so the file holds the
training of a row before the row is measured. A row is "unfinished" until its last part; if it is stopped before, the
next command runs it again. A measurement that fails (`attempt`) is listed in the row's "errors"; the row is finished
without it. A process can run several rows in threads (`streams`), of which only the replayed CUDA graphs run at the
same time (`graphs.Turn`).
"""

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import torch

from hf_memmix.conversion.records import environment, write_json
from hf_memmix.training.experiments.bundled.versions import check_teacher, earlier_teacher
from hf_memmix.training.experiments.common.graphs import TURN

PACKAGE = "hf_memmix.training.experiments"
GRACE = 20.0  # seconds after the deadline in which a running row may still end
# options that do not change what is measured: a resumed run may change them
_RESUME_MAY_CHANGE = ("out", "plot", "workers", "streams", "seconds", "whole_rows", "deadline", "text", "images",
                      "teacher", "data", "eager", "checkpoints")  # fmt: skip
# options that list what is compared: a resumed run may name a part of them, or more; the file then lists all
_RESUME_MAY_EXTEND = ("models", "variants", "contexts", "cells", "tasks", "seeds", "layouts", "seed_list",
                      "tiers")  # fmt: skip


class OutOfTime(Exception):
    """The time limit of the command passed before a row ended. The next command runs this row again."""


# experiments that convert or measure the bundled transformer
OF_THE_BUNDLED_TEACHER = ("conversion_table", "init_table", "compare_plans", "context_use", "mixtures")


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
    """The hardware of the results and the commits of their rows. A run that was resumed may have several commits.

    Results of an earlier bundled transformer than today's also name it.
    """
    where = results["environment"]
    commits = dict.fromkeys(row.get("commit") or where["commit"] for row in results["rows"])
    earlier = earlier_teacher(results) if results.get("experiment") in OF_THE_BUNDLED_TEACHER else ""
    return f"{where['hardware']}, commit {', '.join(commits)}{'; ' if earlier else ''}{earlier}"


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
        results["rows"] = [row for row in old["rows"] if not row.keys() & {"error", "unfinished"}]
    return results


def execute(name: str, script: str | Path, args: SimpleNamespace, rows_to_run: Callable, **about) -> dict:
    """Run the rows that `rows_to_run` returns until all of them have run or the time limit has passed.

    Args:
        name: the experiment's name in its results.
        script: the file of the experiment, in a folder of `training/experiments`; the workers import it for its `run`.
        about: further entries of the results, for example the description of the training text, or "teacher".

    Returns the content of `args.out`: "experiment", "environment", "settings", the entries of `about`, and "rows".
    """
    args.deadline = time.time() + args.seconds
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check_teacher(args.out, about)
    results = load_results(args, name) | about
    before = len(results["rows"])
    module = f"{PACKAGE}.{Path(script).parent.name}.{Path(script).stem}"
    context, gpus = multiprocessing.get_context("spawn"), itertools.cycle(_gpus_of_workers())
    idle, busy, limit = [], {}, max(1, args.workers) * max(1, args.streams)
    spoiled = set()  # processes in which a row failed: their CUDA context may be unusable
    try:
        while True:
            tried = [*results["rows"], *(row for row, _ in busy.values())]
            done = [row for row in results["rows"] if "unfinished" not in row]
            waiting = [row for row in rows_to_run(done, args) if not any(matches(t, row) for t in tried)]
            if time.time() + _least_time(results["rows"][before:], args) > args.deadline:
                waiting = []
            while waiting and len(busy) < limit:
                idle = idle or _start(context, module, args, next(gpus))
                pipe, process = idle.pop()
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
                try:
                    outcome = pipe.recv()
                except EOFError:
                    process.join()
                    outcome = {"error": f"its process ended with exit code {process.exitcode}"}
                if outcome is not None and "unfinished" in outcome:
                    busy[pipe] = (row, process)
                else:
                    idle.append((pipe, process))
                if outcome is not None and outcome.keys() & {"error", "errors"}:
                    spoiled.add(process)
                if process in spoiled:
                    idle = [pair for pair in idle if pair[1] is not process]
                    if all(other is not process for _, other in busy.values()):
                        process.terminate()
                if outcome is None:
                    continue
                _record(results, row, outcome)
                write_json(args.out, results)
                if "unfinished" not in outcome:
                    shown = {k: round(v, 4) for k, v in outcome.items() if isinstance(v, float)}
                    print(name, row, outcome.get("error", shown), outcome.get("errors", ""), flush=True)
    finally:
        for process in [p for _, p in idle] + [p for _, p in busy.values()]:
            process.terminate()
    return results


def _least_time(rows: list[dict], args: SimpleNamespace) -> float:
    """The seconds that a row of this run needs at least: those of the shortest of its finished `rows`.

    0 without the option `whole_rows`, with which the last seconds of a run are left to the rows that are running.
    """
    return min((row["seconds"] for row in rows if "seconds" in row), default=0.0) if args.whole_rows else 0.0


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


def _start(context, module: str, args: SimpleNamespace, gpu: str) -> list[tuple]:
    """Start a process; returns a pair (pipe, process) for each of the rows that it can run at the same time."""
    pipes = [context.Pipe() for _ in range(max(1, args.streams))]
    process = context.Process(target=work, args=([there for _, there in pipes], module, args, gpu), daemon=True)
    process.start()
    for _, there in pipes:
        there.close()
    return [(here, process) for here, _ in pipes]


def work(pipes: list, module: str, args: SimpleNamespace, gpu: str) -> None:
    """The work of a process: a thread for each pipe."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # set before the first use of CUDA, when it is read
    experiment = importlib.import_module(module)
    threads = [threading.Thread(target=_serve, args=(pipe, experiment, args, len(pipes) > 1)) for pipe in pipes[1:]]
    for thread in threads:
        thread.start()
    _serve(pipes[0], experiment, args, len(pipes) > 1)
    for thread in threads:
        thread.join()


def _serve(pipe, experiment, args: SimpleNamespace, with_others: bool) -> None:
    """Receive rows and send results, or None for a row that the deadline stopped, until the pipe is closed."""
    own_stream = contextlib.nullcontext()
    if with_others and torch.cuda.is_available():
        own_stream = torch.cuda.stream(torch.cuda.Stream())
    with own_stream:
        _serve_rows(pipe, experiment, args)


def _serve_rows(pipe, experiment, args: SimpleNamespace) -> None:
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        began = time.time()
        try:
            with TURN.taken():
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
            with TURN.taken():  # not while another thread captures a graph
                torch.cuda.empty_cache()
        pipe.send(outcome)
