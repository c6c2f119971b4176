"""What (Q)LoRA of an 8B model needs, and measured beside computed memory, for training/README.md."""

import functools
from dataclasses import asdict
from pathlib import Path

from hf_memmix.conversion import convert_model
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.documents.conversion_costs import SHAPES
from hf_memmix.training.experiments.measurements import read
from hf_memmix.training.planning.speed import measured
from hf_memmix.training.planning.stage_settings import Stage, plan_stages

BUDGET, TOKENS = 24 * 2**30, 50_000_000
WAITING = 2 / 3  # of a step: if the kernels take less, the GPU waits for the host


@functools.cache
def _stages() -> tuple[Stage, ...]:
    teacher = SHAPES[-1].model()
    return tuple(plan_stages(teacher, convert_model(teacher, "gka"), BUDGET, TOKENS))


def one_gpu_distil_table(root: Path) -> str:
    """The stages of `distill` of an 8B model on a GPU of 24 GiB: what `memmix plan` computes."""
    lines = []
    for stage in _stages():
        if not stage.name.startswith("distill"):
            continue
        if not stage.fits:
            lines.append([stage.name, f"no, at least {bytes_text(stage.need)}", "", ""])
            continue
        parts = asdict(stage.memory)
        largest = max(parts, key=parts.get)
        hours = "not measured" if stage.hours is None else f"{stage.hours:.1f}"
        told = f"{bytes_text(stage.memory.total)}, of which {bytes_text(parts[largest])} {largest}"
        lines.append([stage.name, "yes", told, hours])
    table = markdown_table(
        ["stage", "fits", "GPU memory", f"hours for {TOKENS / 1e6:.0f}M tokens"], lines, figures=True
    )
    speeds = {stage.measured_run for stage in _stages() if stage.name.startswith("distill") and stage.measured_run}
    told = f"; hours from the measured run {', '.join(sorted(speeds))}" if speeds else ""
    return f"{table}\n\nThe shape of Llama 8B, `gka` in every layer, as `memmix plan` computes it{told}."


def plan_checked_table(root: Path) -> str:
    """Measured runs beside the memory that is computed for them."""
    found = measured()
    lines = [
        [
            row["run"],
            f"{row['tokens_s']:,}",
            bytes_text(row["bytes"]),
            bytes_text(row["predicted_bytes"]),
            f"{row['predicted_bytes'] / row['bytes'] - 1:+.1%}",
        ]
        for row in found["rows"]
    ]
    table = markdown_table(["run", "tokens/s", "measured", "computed", "difference"], lines, figures=True)
    waiting = [
        f"{row['run']}, {row['kernel_ms']:.0f} of {row['ms']:.0f} ms"
        for row in read("budget", root)["rows"]
        if row.get("kernel_ms", 0) < WAITING * row.get("ms", 0)
    ]
    told = (
        " Some steps wait for the host, so their speed depends on the CPU and on what else it does; the time of the"
        f" kernels in a step: {'; '.join(waiting)}."
    )
    return f"{table}\n\nPeak of allocated GPU memory on one {found['gpu']}; random weights, `gka` in every layer." + (
        told if waiting else ""
    )
