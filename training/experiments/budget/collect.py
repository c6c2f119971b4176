"""Gathers measured.json, which `memmix plan` reads, from the committed measurements of training.

python -m hf_memmix.training.experiments.budget.collect
"""

import functools

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.records import write_json
from hf_memmix.training.experiments.common.llamas import SHAPES, SMALL
from hf_memmix.training.experiments.results import read
from hf_memmix.training.planning.memory import Settings, memory_of
from hf_memmix.training.planning.shapes import Shapes
from hf_memmix.training.planning.speed import MEASURED

# `logit_bytes` of the runs that do not name them: the loss also held five tensors in fp32, as without Triton
EARLIER_LOGIT_BYTES = 2 * 2 + 5 * 4
TRAIN = (8, 2048)  # sequences and tokens of the training step with which mixers are compared
# runs of levers_h100.json: kind, shape, rows and length, whether its steps were recorded, name of the row there
SMALL_ROWS, LARGE_ROWS = (16, 1024), (4, 2048)
LEVERS = {
    "135M full, CUDA graph": ("full", "135M", SMALL_ROWS, True, "135M distill through the Trainer, graph"),
    "135M align, CUDA graph": ("align", "135M", SMALL_ROWS, True, "135M align through the Trainer, graph"),
    "135M full": ("full", "135M", SMALL_ROWS, False, "135M distill, 0 kept : fused"),
    # the older loss is that of distill only
    "135M align": ("align", "135M", SMALL_ROWS, False, "135M align, 0 kept : old"),
    "1B full, CUDA graph": ("full", "1.2B", LARGE_ROWS, True, "1.2B distill, 0 kept : fused graph"),
    "1B align, CUDA graph": ("align", "1.2B", LARGE_ROWS, True, "1.2B align, 0 kept : fused graph"),
}


def collect() -> dict:
    """`rows` of measured runs (`run`, `kind`, `parameters`, `checkpointing`, `tokens` of a forward, `tokens_s`,
    `graph` if its steps were recorded, and perhaps `bytes`, `reserved` and `predicted_bytes`, which are computed anew:
    PyTorch does not count the memory of a graph), `mixers` (milliseconds of a training step by
    mixer), `two_gpus` (the share of twice the speed of one GPU that two reach in `distill`), `two_gpus_stream` (the
    same in `align --stream`, if it was measured) and `gpu`.
    """
    steps = [row for row in read("model_h200") if row["phase"] == "train" and not row["compiled"]]
    launches = read("multi_gpu")["launches"]
    speeds = [launches[name]["stages"]["distill"]["tokens_per_second"] for name in ("1b_ddp", "1b_single")]
    rows, streamed, found = [], {}, read("streaming_align")
    rows += [_row(row) for row in read("training_h200")["rows"] if "error" not in row]
    rows += [_streamed(found["run"]), *_levers(read("levers_h100"))]
    pair = found.get("shape_processes")
    if pair is not None and pair["gpus"] == 2:
        streamed = {"two_gpus_stream": round(min(1.0, pair["speedup"] / 2), 3)}
    return {
        "rows": rows,
        "mixers": {row["mixer"]: row["ms"] for row in steps if (row["B"], row["T"]) == TRAIN},
        "two_gpus": round(speeds[0] / speeds[1] / 2, 3),
        **streamed,
        "gpu": f"{steps[0]['gpu']} or H100",
    }


@functools.cache
def _shapes(name: str) -> Shapes:
    """The shapes of a Llama of this name with gka in every layer."""
    (teacher,) = (shape.model() for shape in (SMALL, *SHAPES) if shape.name == name)
    return Shapes.of(teacher, convert_model(teacher, "gka"))


def _row(row: dict) -> dict:
    """A row of measure_training.py."""
    settings = Settings(**{"logit_bytes": EARLIER_LOGIT_BYTES} | row["settings"])
    return _measured(row["run"], row["shape"], _kind(settings), settings, row["tokens_s"], row)


def _kind(settings: Settings) -> str:
    """What a run is compared with: `kind` of `speed_of`. Runs with other optimizers only check the memory."""
    kind = {"copy": "full"}.get(settings.teacher, "lora") if settings.stage == "distill" else settings.stage
    options = [settings.quantize] if settings.quantize != "none" else []
    options += [settings.optimizer] if settings.optimizer != Settings.optimizer else []
    return " ".join([kind, *options])


def _streamed(run: dict) -> dict:
    """The run of training/experiments/benchmarks/streaming_align.py."""
    settings = Settings("align --stream", rows=run["batch_size"], length=run["block_size"])
    speed = round(run["tokens_per_second"]["whole"])
    return _measured("8B align --stream", "8.0B", "align --stream", settings, speed, run["peak_memory"])


def _levers(results: dict) -> list[dict]:
    """The runs `LEVERS`."""
    rows, found = {row["row"]: row for row in results["rows"]}, []
    for run, (kind, shape, (count, length), graph, name) in LEVERS.items():
        settings = Settings("align" if kind == "align" else "distill", rows=count, length=length)
        peak = {} if graph else {"allocated": round(rows[name]["peak_gib"] * 2**30)}
        row = _measured(f"{run}, H100", shape, kind, settings, rows[name]["tokens_s"], peak)
        found.append(row | ({"graph": True} if graph else {}))
    return found


def _measured(run: str, shape: str, kind: str, settings: Settings, speed: float, peak: dict) -> dict:
    row = {
        "run": run,
        "kind": kind,
        "parameters": _shapes(shape).teacher,
        "checkpointing": settings.checkpointing,
        "tokens": settings.tokens,
        "tokens_s": speed,
    }
    row |= {
        ours: peak[theirs] for ours, theirs in (("bytes", "allocated"), ("reserved", "reserved")) if theirs in peak
    }
    return row | ({"predicted_bytes": round(memory_of(_shapes(shape), settings).total)} if peak else {})


if __name__ == "__main__":
    write_json(MEASURED, collect())
