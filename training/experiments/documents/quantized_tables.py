"""Models with mixers whose weights are rounded, beside bf16, for training/README.md."""

from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.measurements import read


def quantized_table(root: Path) -> str:
    """Memory and decode speed of the 1B shape and perplexity of the bundled student, with every quantiser."""
    found = read("quantized", root)
    students = {row["method"]: row for row in found["student"]}
    lines = []
    for row in found["shape"]:
        student = students[row["method"]]
        lines.append(
            [
                row["method"],
                bytes_text(row["weights"]) if "weights" in row else "",
                bytes_text(row["peak"]) if "peak" in row else "",
                f"{row['decode_tokens_s']:,.0f}" if "decode_tokens_s" in row else "not measured",
                f"{row['generate_tokens_s']:,.0f}" if "generate_tokens_s" in row else "not measured",
                f"{row['error'] / row['error_of_bf16']:.2f}" if "error" in row else "",
                f"{student['perplexity']:.2f}" if "perplexity" in student else "not measured",
            ]
        )
    head = ["weights", "after loading", "peak of the decode", "tokens/s, CUDA graph", "tokens/s, `generate`"]
    table = markdown_table([*head, "error, times bf16", "perplexity of the bundled student"], lines, figures=True)
    where = found["environment"]
    return (
        f"{table}\n\nA Llama of 1.2B parameters, random weights, `gka` in every layer, one sequence, without"
        f" torch.compile; {where['hardware']}, torch {where['torch']}, torchao {where['torchao']}, bitsandbytes"
        f" {where['bitsandbytes']}. The error is that of the logits to those of fp32 with the same rounded weights."
        + as_sentence(found)
    )


def small_states_table(root: Path) -> str:
    """Losses and memory of `distill` with optimizers of small states and quantised frozen weights."""
    found = read("quantized", root)
    lines = [
        [
            row["recipe"],
            f"{row['first_loss']:.4f}" if "first_loss" in row else "failed",
            f"{row['last_loss']:.4f}" if "last_loss" in row else "failed",
        ]
        for row in found["optimizers"]
    ]
    first, where = found["optimizers"][0], found["environment"]["hardware"]
    return (
        markdown_table(["optimizer, or frozen weights", "first loss", "last loss"], lines, figures=True)
        + f"\n\n`distill` of {first['student']}, {first['steps']} steps, on {where}.{as_sentence(found)}"
    )
