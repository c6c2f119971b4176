"""Memory and speed of long inputs on one GPU, for training/README.md."""

from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.documents.measurements import read

NAMES = {"attention": "attention (Llama)"}


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
