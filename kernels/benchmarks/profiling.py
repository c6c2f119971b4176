"""Measures the time of kernels by name, for the scripts that divide the time of an op among its kernels."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

REPEATS = 3


def kernel_ms(call: Callable[[], object], prefix: str) -> dict[str, float]:
    """Milliseconds of each kernel of a call whose name begins with `prefix`; the mean of three calls after
    a warm-up.
    """
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    return {
        event.key: round(event.self_device_time_total / 1e3 / REPEATS, 4)
        for event in profiler.key_averages()
        if event.key.startswith(prefix)
    }


def arguments_and_rows(description: str) -> tuple[argparse.Namespace, list[dict]]:
    """The arguments --out and --commit, and the rows of other commits that the file --out holds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="commit to record")
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    return args, [row for row in rows if row["commit"] != args.commit]


def write_rows(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")
