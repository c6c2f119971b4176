"""Memory and speed of long inputs on one GPU and on several, for training/README.md."""

from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.measurements import read

NAMES = {"attention": "attention (Llama)"}
# tokens/s of training steps that were predicted before the run: three quarters of those with 2 rows of 8,192 tokens
# without checkpointing, and for attention its operations at 500 TFLOP/s
PREDICTED_ON_ONE = {
    "attention": 12_000, "gka": 45_000, "mamba2": 44_000, "ska": 64_000, "coffee": 46_000, "lattice": 27_000,
}  # fmt: skip
# on two GPUs, by mixer and layout: 1.9 times those on one, less for mixers that work in turn
PREDICTED_ON_TWO = {
    ("attention", "all"): 11_500, ("gka", "all"): 85_000, ("gka", "hybrid"): 33_000, ("mamba2", "all"): 84_000,
    ("ska", "all"): 110_000, ("coffee", "all"): 80_000, ("lattice", "all"): 48_000,
}  # fmt: skip


def long_prompts_table(root: Path) -> str:
    """One row per model and length of the prompt."""
    measured = [row for row in read("long", root) if row["phase"] == "prompt"]
    measured.sort(key=lambda row: (row["mixer"] != "attention", row["mixer"], row["T"]))
    rows = [
        [
            NAMES.get(row["mixer"], f"`{row['mixer']}`"),
            f"{row['T']:,}",
            f"{row['seconds']:.2f} s",
            f"{row['tokens_s']:,}",
            bytes_text(row["peak_mib"] * 2**20),
            bytes_text(round(row["cache_mib"] * 2**20)),
        ]
        for row in measured
    ]
    (gpu,), (chunk,) = ({row[name] for row in measured} for name in ("gpu", "chunk"))
    versions = ", ".join(sorted({f"torch {row['torch']}, Triton {row['triton']}" for row in measured}))
    return (
        markdown_table(["layers", "prompt", "first token after", "tokens/s", "peak memory", "of it the cache"], rows)
        + f"\n\nThe shape of a Llama with 1.04 billion parameters, random bf16 weights, one mixer in every layer;"
        f" `generate(prefill_chunk_size={chunk})`, one sequence; {gpu}, {versions}."
    )


def _versions(rows: list[dict]) -> str:
    """The machine of measurements."""
    (gpu,) = {row["gpu"] for row in rows}
    return f"{gpu}, " + ", ".join(sorted({f"torch {row['torch']}, Triton {row['triton']}" for row in rows}))


def long_training_table(root: Path) -> str:
    """Training steps of one long row on one GPU."""
    measured = [row for row in read("long", root) if row["phase"] == "train"]
    measured.sort(key=lambda row: (row["mixer"] != "attention", row["mixer"]))
    speed = {row["mixer"]: row.get("tokens_s") for row in measured}
    rows = [
        [
            NAMES.get(row["mixer"], f"`{row['mixer']}`"),
            *_costs(row),
            f"{PREDICTED_ON_ONE[row['mixer']]:,}",
            f"{row['tokens_s'] / speed['attention']:.2f}" if row.get("tokens_s") and speed.get("attention") else "",
        ]
        for row in measured
    ]
    (tokens,) = {row["T"] for row in measured}
    head = ["layers", "step", "tokens/s", "peak memory", "predicted tokens/s", "speed of attention"]
    return markdown_table(head, rows, figures=True) + (
        f"\n\nOne row of {tokens:,} tokens: forward, backward with gradient checkpointing and AdamW, weights in bf16;"
        f" the same shape; {_versions(measured)}."
    )


def _costs(row: dict) -> list[str]:
    """Step, tokens/s and peak memory of a measured training step."""
    if "note" in row:
        return [row["note"], "", ""]
    return [f"{row['seconds']:.2f} s", f"{row['tokens_s']:,}", bytes_text(row["peak_mib"] * 2**20)]


def _layers(row: dict) -> str:
    if row["mixer"] == "attention":
        return NAMES["attention"]  # in whatever layout
    return f"`{row['mixer']}`" + (", every fourth attention" if row["layout"] == "hybrid" else "")


def context_parallel_table(root: Path) -> str:
    """Training steps of one sequence over several GPUs."""
    measured = [row for row in read("context_parallel", root) if row["phase"] == "train"]
    measured.sort(key=lambda row: (row["gpus"], row["mixer"] != "attention", row["mixer"], row["layout"]))
    rows = []
    for row in measured:
        predicted = "" if row["gpus"] == 1 else f"{PREDICTED_ON_TWO[row['mixer'], row['layout']]:,}"
        rows.append([_layers(row), row["gpus"], row["weights"], *_costs(row), predicted])
    (tokens,) = {row["T"] for row in measured}
    head = ["layers", "GPUs", "weights", "step", "tokens/s", "peak memory per GPU", "predicted tokens/s"]
    return markdown_table(head, rows, figures=True) + (
        f"\n\nOne sequence of {tokens:,} tokens in a Llama shape with 1.04 billion parameters: forward, backward with"
        " gradient checkpointing and AdamW; with float32 weights, matrices are multiplied in bf16 (autocast);"
        f" {_versions(measured)}."
    )


def context_checks_table(root: Path) -> str:
    """How far loss, gradients and trained weights on several GPUs are from those of one."""
    measured = [row for row in read("context_parallel", root) if row["phase"] == "check"]
    measured.sort(key=lambda row: (row["autocast"], row["mixer"] != "attention", row["mixer"], row["layout"]))
    rows = []
    for row in measured:
        products = "bf16" if row["autocast"] == "bfloat16" else "fp32"
        split = "front and end" if row["balanced"] else "one stretch"
        figures = [row["difference"], row["worst"], row["steps"], row.get("rounding", "")]
        rows.append([_layers(row), products, split, *figures])
    (tokens,), (gpus,) = ({row[name] for row in measured} for name in ("T", "gpus"))
    head = ["layers", "products", "tokens of a GPU", "loss and gradients", "worst parameter", "after three steps"]
    head.append("worst parameter, bf16 beside fp32 on one GPU")
    return markdown_table(head, rows, figures=True) + (
        f"\n\n{gpus} GPUs beside one, {tokens:,} tokens, 4 layers of width 256: relative differences;"
        f" {_versions(measured)}."
    )
