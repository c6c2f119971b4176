"""The table of GKA's sketch, from the results of `kernels/benchmarks`."""

from functools import partial
from pathlib import Path

from hf_memmix.conversion.records import markdown_table
from hf_memmix.training.experiments.measurements import read

aligned_table = partial(markdown_table, figures=True)


def sketch_table(root: Path, trained: list[list[str]]) -> str:
    """Bytes and milliseconds of GKA by the size of its sketch; in brackets the share of the time without a sketch.

    Args:
        trained: for s = D, D/2 and D/4 what a training gave: the accuracy of recall and the perplexity.
    """
    rows = read("gka_sketch", root)
    columns = {"fwd": ("fwd", 4), "fwd+bwd": ("fwd+bwd", 4)}
    columns |= {f"decode, B={B}": ("decode_graph", B) for B in (1, 8, 64)}
    sizes: dict[int, dict] = {}
    for row in rows:
        sizes.setdefault(row["sketch"], {})[row["pass"], row["B"]] = row
    plain, lines = sizes[max(sizes)], []
    for (size, found), of_training in zip(sorted(sizes.items(), reverse=True), trained, strict=True):
        cells = [f"{found[key]['ms']:.3g} ({found[key]['ms'] / plain[key]['ms']:.2f})" for key in columns.values()]
        peak, some = found["fwd+bwd", 4]["peak_mib"], found["fwd", 4]
        name = "s = D" + (f"/{max(sizes) // size}" if size < max(sizes) else "")
        lines.append(
            [f"{size}: {name}", *of_training, f"{some['state_bytes_per_head'] / 1024:g}", *cells, f"{peak:.0f}"]
        )
    ((gpu, torch, triton, commit),) = {
        tuple(row[name] for name in ("gpu", "torch", "triton", "commit")) for row in rows
    }
    head = [
        "s",
        "MQAR, 32 pairs, %",
        "perplexity",
        "state per head, KiB",
        *(f"{name}, ms" for name in columns),
        "peak of fwd+bwd, MiB",
    ]
    return (
        aligned_table(head, lines)
        + "\n\nMQAR with heads of 32 channels and perplexity with heads of 64 after equal training, means over seeds"
        " (tables below). The rest: bf16, D=128, solver (12, 10); fwd and fwd+bwd: B=4, T=8192, H=8; decode: a step of"
        f" 32 heads inside a CUDA graph. s = 128 is without a sketch. {gpu}, torch {torch}, Triton {triton}, commit"
        f" {commit}."
    )
