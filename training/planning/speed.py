"""Hours of a training stage, from measured tokens per second.

`measured.json` holds training steps of whole models of several sizes, which `collect.py` gathers from the committed
measurements. The time per token of another model is that of the nearest measured size, times the ratio of
the parameters; of another mixer, times the ratio of its measured training step to that of gka. A run with gradient
checkpointing is compared with one that has it, if there is one, and otherwise takes a third more: one more forward.
A run whose steps can be recorded as a CUDA graph is compared with a recorded one, if there is one of its size. A run
with `compile: true` is compared with such runs only; all of them were recorded, and all had gka.
Of several such runs, that with the nearest number of tokens in a forward counts: few tokens leave a GPU idle.
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

MEASURED = Path(__file__).with_name("measured.json")
RECOMPUTE = 4 / 3  # a forward takes half as long as a backward


@functools.cache
def measured() -> dict:
    """The content of measured.json."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Speed:
    """Tokens per second of all GPUs together, the measured run from which it was computed, and the parameters of that
    run over those of the model.
    """

    tokens_s: float
    measured_run: str
    larger: float


def speed_of(
    kind: str,
    parameters: int,
    mixers: dict[str, int],
    checkpointing: bool,
    tokens: int,
    gpus: int = 1,
    compiled: bool = False,
) -> Speed | None:
    """The speed of a stage; None if no run of this kind was measured.

    Args:
        kind: "align", "align --stream", "full", "lora" or "lora 4bit".
        parameters: of the teacher, with which one token computes.
        mixers: number of layers by mixer.
        tokens: of one forward on one GPU.
        compiled: whether the recipe sets `compile: true`.
    """
    data = measured()
    rows = [row for row in data["rows"] if row["kind"] == kind and row.get("compiled", False) == compiled]
    recorded = gpus == 1 and not checkpointing
    if not rows or (compiled and not recorded):
        return None

    def distance(row: dict) -> tuple[float, bool, bool, float]:
        size = abs(math.log(row["parameters"] / parameters))
        unlike = row["checkpointing"] != checkpointing, row.get("graph", False) != recorded
        return size, *unlike, abs(math.log(row["tokens"] / tokens))

    row = min(rows, key=distance)
    seconds = parameters / row["parameters"] / row["tokens_s"]
    if row["checkpointing"] != checkpointing:
        seconds *= RECOMPUTE if checkpointing else 1 / RECOMPUTE
    steps = data["mixers"]
    known = {kind: count for kind, count in mixers.items() if kind in steps}
    if known:
        seconds *= sum(count * steps[kind] for kind, count in known.items()) / sum(known.values()) / steps["gka"]
    # two GPUs were measured; the same share is lost with each doubling
    share = data.get("two_gpus_stream", data["two_gpus"]) if kind == "align --stream" else data["two_gpus"]
    efficiency = share ** math.log2(gpus)
    return Speed(gpus * efficiency / seconds, row["run"], row["parameters"] / parameters)
