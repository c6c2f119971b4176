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
# runs of the files levers*_h100.json: kind, shape, rows and length, name of the row there
SMALL_ROWS, LARGE_ROWS = (16, 1024), (4, 2048)
EAGER = {
    "135M full": ("full", "135M", SMALL_ROWS, "135M distill, 0 kept : fused"),
    # the older loss is that of distill only
    "135M align": ("align", "135M", SMALL_ROWS, "135M align, 0 kept : old"),
}
# their steps were recorded as CUDA graphs; with `compile: true` their names end in "compile"
RECORDED = {
    "135M full": ("full", "135M", SMALL_ROWS, "135M distill, 0 kept, gka: Trainer, graph"),
    "135M align": ("align", "135M", SMALL_ROWS, "135M align, 0 kept, gka: Trainer, graph"),
    "1B full": ("full", "1.2B", LARGE_ROWS, "1.2B distill, 0 kept, gka: Trainer, graph"),
    "1B align": ("align", "1.2B", LARGE_ROWS, "1.2B align, 0 kept, gka: Trainer, graph"),
}


def collect() -> dict:
    """`rows` of measured runs (`run`, `kind`, `parameters`, `checkpointing`, `tokens` of a forward, `tokens_s`,
    `graph` if its steps were recorded, `compiled` if its layers were compiled too, and perhaps `bytes`, `reserved` and
    `predicted_bytes`, which are computed anew: PyTorch does not count the memory of a graph), `mixers` (milliseconds
    of a training step by mixer), `two_gpus` (the share of twice the speed of one GPU that two reach in `distill`),
    `two_gpus_stream` (the same in `align --stream`, if it was measured), `compile_s` (seconds that the slowest of the
    compiled runs took longer to start) and `gpu`.
    """
    steps = [row for row in read("model_h200") if row["phase"] == "train" and not row["compiled"]]
    launches = read("multi_gpu")["launches"]
    speeds = [launches[name]["stages"]["distill"]["tokens_per_second"] for name in ("1b_ddp", "1b_single")]
    rows, streamed, found = [], {}, read("streaming_align")
    rows += [_row(row) for row in read("training_h200")["rows"] if "error" not in row]
    rows += [_streamed(found["run"]), *_levers(read("levers_h100"), read("levers_product_h100"))]
    pair = found.get("shape_processes")
    if pair is not None and pair["gpus"] == 2:
        streamed = {"two_gpus_stream": round(min(1.0, pair["speedup"] / 2), 3)}
    compiled = [row["start_s"] for row in read("levers_product_h100")["rows"] if row["row"].endswith("compile")]
    return {
        "rows": rows,
        "compile_s": max(compiled),
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
    """The streamed run of `streaming_align`."""
    settings = Settings("align --stream", rows=run["batch_size"], length=run["block_size"])
    speed = round(run["tokens_per_second"]["whole"])
    return _measured("8B align --stream", "8.0B", "align --stream", settings, speed, run["peak_memory"])


def _levers(bare: dict, product: dict) -> list[dict]:
    """The runs `EAGER` of bare steps, and `RECORDED`, whose steps the Trainer made."""
    eager, trainer = ({row["row"]: row for row in results["rows"]} for results in (bare, product))
    found = []
    for run, (kind, shape, size, name) in EAGER.items():
        peak = {"allocated": round(eager[name]["peak_gib"] * 2**30)}
        found.append(_lever(f"{run}, H100", shape, kind, size, eager[name], peak))
    for more, suffix, marks in ((", CUDA graph", "", {}), (", CUDA graph, compiled", ", compile", {"compiled": True})):
        for run, (kind, shape, size, name) in RECORDED.items():
            row = _lever(f"{run}{more}, H100", shape, kind, size, trainer[name + suffix], {})
            found.append(row | {"graph": True} | marks)
    return found


def _lever(run: str, shape: str, kind: str, size: tuple[int, int], row: dict, peak: dict) -> dict:
    settings = Settings("align" if kind == "align" else "distill", rows=size[0], length=size[1])
    return _measured(run, shape, kind, settings, row["tokens_s"], peak)


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
