"""Measures a decoded token of several models in turns, so that differences of a few percent can be seen, on one GPU.

    python kernels/benchmarks/decode_turns.py --rounds 9 --rows attention:1 gka:1 gka:1:products gka:1:masks \\
        --out kernels/benchmarks/results/decode_turns_h200.json

The models and the measurement are those of "decode" in `benchmark_model.py`. A row is MIXER:BATCH, and a third word
changes it: "products" computes the gates of GKA by matrix products, not by one kernel; "apart" runs the short
convolutions and the unit norms of a layer one after the other, not as one kernel; "masks" lets the library make masks
before each token, as if there were attention layers. Each row is a process. All compile at the same time, as far as
memory allows; then the script prints "ready", and one after another measures while the others wait. `rounds` are the
medians of a row in milliseconds, `ms` is their median without the first. `graph_ms` is the step without torch.compile
as one CUDA graph, measured at the end, for models with mixers. Rows are written after every round; those of --out that
describe the same measurement are replaced. With --models, rows without a third word replace those of that file, too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from benchmark import commit, write_merged
from benchmark_generate import build, measure
from benchmark_model import DECODE_CONTEXT, MEASURED, MIXERS, NEW_TOKENS
from decode_profile import graph_columns

from hf_memmix.generation import MemoryGeneration
from hf_memmix_kernels.gka import op as gka_op
from hf_memmix_kernels.short_conv import op as short_conv_op

VARIANTS = ("products", "apart", "masks")
GRAPH = "graph"  # a line that asks for `graph_ms`
WAITS = 20  # times that a process waits for memory, 3 seconds each, while others compile
PREFIX = "found "  # of the lines that a process writes for its parent


def parse(row: str) -> dict:
    """The columns that describe a row MIXER:BATCH or MIXER:BATCH:VARIANT; ValueError if it is no such row."""
    mixer, batch, *variant = row.split(":")
    if mixer not in MIXERS or len(variant) > 1 or not set(variant) <= set(VARIANTS):
        raise ValueError(f"{row!r} is not MIXER:BATCH or MIXER:BATCH:VARIANT with a variant of {VARIANTS}")
    described = {"mixer": mixer, "phase": "decode", "B": int(batch), "T": DECODE_CONTEXT, "compiled": True}
    return described | ({"variant": variant[0]} if variant else {})


def serve(row: dict):
    """Compile, then measure once for each line of the standard input."""
    if row.get("variant") == "products":
        gka_op.MAX_ROWS = 0
    if row.get("variant") == "apart":
        short_conv_op.MAX_HEAD = 0
    if row.get("variant") == "masks":
        MemoryGeneration.reads_masks = lambda self: True
    model = build(None if row["mixer"] == "attention" else row["mixer"])
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(PREFIX + json.dumps(first_turn(model, row) | machine), flush=True)
    for line in sys.stdin:
        if line.strip() == GRAPH:
            graphed = hasattr(model.config, "mixer_types")
            found = {"graph_ms": graph_columns(model, row["B"])["graph_ms"]} if graphed else {}
        else:
            found = take_turn(model, row)
        print(PREFIX + json.dumps(found), flush=True)


def first_turn(model, row: dict) -> dict:
    """The turn that compiles; tried again if other processes have taken the memory."""
    for _ in range(WAITS):
        try:
            return take_turn(model, row)
        except RuntimeError as error:  # cuBLAS and Triton have errors of their own
            if not any(word in str(error) for word in ("memory", "ALLOC")):
                raise
            torch.cuda.empty_cache()
            time.sleep(3)
    return take_turn(model, row)


def take_turn(model, row: dict) -> dict:
    found = measure(model, row["B"], DECODE_CONTEXT, NEW_TOKENS, "static")
    torch.cuda.empty_cache()
    return {name: found[name] for name in ("ms", "peak_mib", "first_token_s")}


def answer(process: subprocess.Popen) -> dict:
    """The next result of a process; RuntimeError if it has ended."""
    for line in process.stdout:
        if line.startswith(PREFIX):
            return json.loads(line.removeprefix(PREFIX))
    raise RuntimeError(f"{process.args} ended with {process.wait()}")


def measure_in_turns(
    specs: list[str], rounds: int, graphs: list[str], save: Callable[[list[dict]], None], go: Path | None
) -> None:
    """Measure one row per specification, and one graph for the mixers of `graphs`, as soon as all have compiled and
    the file `go` is there (None: at once); `save` gets all rows after every round.
    """
    command = [sys.executable, __file__, "--serve"]
    processes = {
        spec: subprocess.Popen([*command, spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for spec in specs
    }
    rows = {}
    for spec in specs:
        try:
            rows[spec] = parse(spec) | answer(processes[spec]) | {"rounds": []}
        except RuntimeError as ended:
            print(f"{spec} is left out: {ended}", flush=True)
            del processes[spec]
    print("ready", flush=True)
    while go is not None and not go.exists():
        time.sleep(0.2)
    for _ in range(rounds):
        for spec, process in processes.items():
            print(file=process.stdin, flush=True)
            rows[spec]["rounds"].append(answer(process)["ms"])
        for row in rows.values():
            row["ms"] = round(statistics.median(row["rounds"][1:] or row["rounds"]), 3)
            row["tokens_s"] = round(1e3 * row["B"] / row["ms"])
        save(list(rows.values()))
    for spec, process in processes.items():
        if rows[spec]["mixer"] in graphs:
            print(GRAPH, file=process.stdin, flush=True)
            rows[spec] |= answer(process)
        process.communicate()
        save(list(rows.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", default=[f"{mixer}:1" for mixer in MIXERS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--graphs", nargs="*", choices=MIXERS, default=list(MIXERS), help="mixers with `graph_ms`")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=Path, help="model_h200.json, to replace rows there")
    parser.add_argument("--wait-for", type=Path, help="measure as soon as this file is there; compile before")
    parser.add_argument("--commit", default=commit(), help="for machines that hold no git checkout")
    args = parser.parse_args()
    if args.serve:
        serve(parse(args.serve))
        return

    def save(rows):
        rows = [row | {"commit": args.commit} for row in rows]
        whole = [
            {k: v for k, v in row.items() if k not in ("rounds", "graph_ms")} for row in rows if "variant" not in row
        ]
        for path, found in ((args.out, rows), (args.models, whole)):
            if path is not None:
                write_merged(path, found, (*MEASURED, "rounds", "graph_ms"))
        print(*(f"{row['mixer']}:{row['B']} {row.get('variant', '')} {row['ms']};" for row in rows), flush=True)

    measure_in_turns(args.rows, args.rounds, args.graphs, save, args.wait_for)


if __name__ == "__main__":
    main()
