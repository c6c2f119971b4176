"""Runs the rows of an experiment in several processes on one device, and keeps a JSON file of what is finished.

An experiment is a module with `plan(done, args)`, the rows that can run now, most wanted first, and `run(row, args)`,
the results of one row; rows and results are dictionaries of JSON values. Finished rows are skipped when the command is
given again, so a run that a time limit cut short is resumed by the same command. A row that fails is recorded with its
error and tried again by the next command; it does not stop the others.

`run` may be a generator of parts of the results: each is written as soon as it comes, so that how a row learned stands
in the file before it is measured. A row is "unfinished" until its last part; cut short, it runs again in the next
command. A measurement that fails (`attempt`) is noted among the row's "errors", and the row is finished without it.
"""

import argparse
import importlib
import itertools
import json
import multiprocessing
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

import torch

PACKAGE = "hf_memmix.training.experiments"
GRACE = 20.0  # seconds
# of a command, not of what is measured: a resumed run may change these
_OWN = ("out", "plot", "workers", "seconds", "deadline", "text")


class OutOfTime(Exception):
    """The time limit of the command came before the end of a row, which is then left for the next command."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_time(args: argparse.Namespace) -> None:
    """Raise OutOfTime after the command's deadline; called now and then by a row."""
    if time.time() > args.deadline:
        raise OutOfTime


def attempt(errors: dict[str, str], name: str, function: Callable, *args, **kwargs):
    """What the function returns; None if it fails, and `errors[name]` then says why."""
    try:
        return function(*args, **kwargs)
    except OutOfTime:
        raise
    except Exception as error:
        traceback.print_exc()
        errors[name] = _message(error)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def parser_of(doc: str) -> argparse.ArgumentParser:
    """A parser with what all experiments understand."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results; continued if it exists")
    parser.add_argument("--plot", action="store_true", help="draw the results beside --out as a PNG, too")
    parser.add_argument("--workers", type=int, default=1, help="rows at the same time, each in a process of its own")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no row runs on after so many seconds")
    return parser


def environment() -> dict:
    """Hardware, versions and commit of a measurement, whose rows may have shared the hardware."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    known = os.environ.get("HF_MEMMIX_COMMIT") or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"hardware": name, "torch": torch.__version__, "commit": known or "unknown"}


def measured_at(results: dict) -> str:
    """Hardware of the results and commits of their rows, which differ where a run was resumed at a later one."""
    where = results["environment"]
    commits = dict.fromkeys(row.get("commit") or where["commit"] for row in results["rows"])
    return f"{where['hardware']}, commit {', '.join(commits)}"


def matches(record: dict, row: dict) -> bool:
    """Whether a record of the results is of this row."""
    return all(record.get(key) == value for key, value in row.items())


def write_json(path: Path, content: dict) -> None:
    """Replace a file whole or not at all."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def load_results(args: argparse.Namespace, name: str) -> dict:
    """The results so far in `args.out`.

    Raises:
        ValueError: they were measured under other settings.
    """
    settings = json.loads(json.dumps({key: value for key, value in vars(args).items() if key not in _OWN}))
    results = {"experiment": name, "environment": environment(), "settings": settings, "rows": []}
    if args.out.exists():
        old = json.loads(args.out.read_text())
        if old["settings"] != settings:
            differ = sorted(k for k in {*settings, *old["settings"]} if settings.get(k) != old["settings"].get(k))
            raise ValueError(f"{args.out} was measured with another {', '.join(differ)}; choose another --out")
        results["rows"] = [row for row in old["rows"] if not row.keys() & {"error", "unfinished"}]
    return results


def execute(name: str, args: argparse.Namespace, plan: Callable, **about) -> dict:
    """Run what `plan` says until it has nothing left or time is over.

    Returns what then stands in `args.out`: "experiment", "environment", "settings", what is to be said `about` the
    data, and "rows".
    """
    args.deadline = time.time() + args.seconds
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = load_results(args, name) | about
    context, places = multiprocessing.get_context("spawn"), itertools.cycle(_places())
    idle, busy, limit = [], {}, max(1, args.workers)
    try:
        while True:
            tried = [*results["rows"], *(row for row, _ in busy.values())]
            done = [row for row in results["rows"] if "unfinished" not in row]
            waiting = [row for row in plan(done, args) if not any(matches(t, row) for t in tried)]
            if time.time() > args.deadline:
                waiting = []
            while waiting and len(busy) < limit:
                pipe, process = idle.pop() if idle else _start(context, name, args, next(places))
                pipe.send(waiting[0])
                busy[pipe] = (waiting.pop(0), process)
            if not busy:
                break
            # a row in the middle of its measurement gets a little longer; one that hangs is given up
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
                elif outcome is not None and outcome.keys() & {"error", "errors"}:
                    process.terminate()  # what failed may have left its device unusable
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
        for process in [p for _, p in idle] + [p for _, p in busy.values()]:
            process.terminate()
    return results


def _record(results: dict, row: dict, outcome: dict) -> None:
    """Put the outcome in place of what is known of the row; an error stands beside the parts that came before it."""
    known = [record for record in results["rows"] if matches(record, row)]
    results["rows"] = [record for record in results["rows"] if not matches(record, row)]
    parts = {k: v for k, v in known[0].items() if k != "unfinished"} if known and "error" in outcome else row
    results["rows"].append({**parts, **outcome, "commit": results["environment"]["commit"]})


def _places() -> list[str]:
    """What CUDA_VISIBLE_DEVICES is for one worker and the next: a GPU each, in turn."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(max(1, torch.cuda.device_count()))] if visible is None else visible.split(",")


def _start(context, name: str, args: argparse.Namespace, place: str):
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, name, args, place), daemon=True)
    process.start()
    there.close()
    return here, process


def work(pipe, name: str, args: argparse.Namespace, place: str) -> None:
    """Body of a worker: rows in, results out; None for a row that time did not suffice for."""
    os.environ["CUDA_VISIBLE_DEVICES"] = place  # read when CUDA is first used, so not too late
    module = importlib.import_module(f"{PACKAGE}.{name}")
    while True:
        try:
            row = pipe.recv()
        except EOFError:
            return
        began = time.time()
        try:
            outcome = module.run(row, args)
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
