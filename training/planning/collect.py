"""Gathers measured.json, which `memmix plan` reads, from the committed measurements of training.

python -m hf_memmix.training.planning.collect
"""

from pathlib import Path

from hf_memmix.conversion.records import CHECKOUT, write_json
from hf_memmix.training.documents.measurements import MEASUREMENTS, read
from hf_memmix.training.planning.speed import MEASURED

TRAIN = (8, 2048)  # sequences and tokens of the training step with which mixers are compared


def collect(root: Path = CHECKOUT) -> dict:
    """`rows` of measured runs (`run`, `kind`, `parameters`, `checkpointing`, `tokens_s`, `bytes`, `predicted_bytes`),
    `mixers` (milliseconds of a training step by mixer), `two_gpus` (the share of twice the speed of one GPU that two
    reach) and `gpu`.
    """
    steps = [row for row in read("models", root) if row["phase"] == "train" and not row["compiled"]]
    launches = read("multi_gpu", root)["launches"]
    speeds = [launches[name]["stages"]["distill"]["tokens_per_second"] for name in ("1b_ddp", "1b_single")]
    rows = []
    if (root / MEASUREMENTS["budget"]).is_file():
        rows = [_row(row) for row in read("budget", root)["rows"] if "error" not in row]
    return {
        "rows": rows,
        "mixers": {row["mixer"]: row["ms"] for row in steps if (row["B"], row["T"]) == TRAIN},
        "two_gpus": round(speeds[0] / speeds[1] / 2, 3),
        "gpu": steps[0]["gpu"],
    }


def _row(row: dict) -> dict:
    settings = row["settings"]
    kind = {"copy": "full"}.get(settings["teacher"], "lora") if settings["stage"] == "distill" else settings["stage"]
    return {
        "run": row["run"],
        "kind": kind,
        "parameters": row["parameters"],
        "checkpointing": settings["checkpointing"],
        "tokens_s": row["tokens_s"],
        "bytes": row["allocated"],
        "reserved": row["reserved"],
        "predicted_bytes": round(row["predicted_bytes"]),
    }


if __name__ == "__main__":
    write_json(MEASURED, collect())
