"""The tables of hf_memmix/serving/README.md: families, what a sequence costs, and what was tested."""

from pathlib import Path

import torch
from transformers import LlamaConfig

from hf_memmix import memmix_config
from hf_memmix.backbones import BACKBONES
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.conversion.teachers_table import by_reason
from hf_memmix.mixers import ATTENTION, MIXERS
from hf_memmix.models import FAMILIES
from hf_memmix.serving.footprint import Footprint
from hf_memmix.training.documents.measurements import read

LENGTHS = (2048, 16384, 65536)
# the shape of Llama 3.2 1B
SHAPE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE |= {"head_dim": 64, "intermediate_size": 8192, "max_position_embeddings": 2**17}


def families_table(root: Path) -> str:
    """The decoder families that vLLM serves with mixers, and the refused ones with the reason."""
    served = [f"`{name}`" for name, row in sorted(BACKBONES.items()) if not (row.refused or row.no_serving)]
    refused = {name: row.no_serving for name, row in BACKBONES.items() if row.no_serving}
    scratch = ", ".join(f"`{name}ForCausalLM`" for name in FAMILIES)
    return "\n\n".join(
        [
            f"{len(served)} families, with any mixers: {', '.join(served)}.",
            f"The families that are trained from scratch: {scratch}.",
            "Refused by name:",
            by_reason(refused),
        ]
    )


def costs_table(root: Path) -> str:
    """Bytes of one sequence of a 1B Llama shape in bf16, with each mixer in all and in three of four layers."""
    backbone = LlamaConfig(**SHAPE)
    layers = backbone.num_hidden_layers
    rows = [_costs("attention in every layer", Footprint.of(backbone, torch.bfloat16))]
    for mixer in (name for name, cls in MIXERS.items() if cls.__module__.startswith("hf_memmix.mixers.")):
        for name, kept in (("every layer", ()), ("3 of 4 layers", range(3, layers, 4))):
            kinds = [ATTENTION if i in kept else mixer for i in range(layers)]
            config = memmix_config(backbone, kinds)
            rows.append(_costs(f"`{mixer}` in {name}", Footprint.of(config, torch.bfloat16)))
    head = ["one sequence", "state per layer", *(f"{length // 1024}k tokens" for length in LENGTHS)]
    return (
        markdown_table(head, rows, figures=True)
        + f"\n\n{layers} layers, hidden size {backbone.hidden_size}, {backbone.num_attention_heads} heads and"
        f" {backbone.num_key_value_heads} key/value heads of {backbone.head_dim}; bf16, states in fp32; mixers with"
        " their default options."
    )


def _costs(name: str, footprint: Footprint) -> list[str]:
    sizes = set(footprint.states.values())
    return [name, *map(bytes_text, sizes or {0}), *(bytes_text(footprint.total(length)) for length in LENGTHS)]


def matrix_table(root: Path) -> str:
    """What `make serve-test` tested: models by features."""
    results = read("serving_matrix", root)
    features = list(results["matrix"])
    models = list(dict.fromkeys(case for cases in results["matrix"].values() for case in cases))
    rows = [[f"`{m}`", *(results["matrix"][f].get(m, "") for f in features)] for m in models]
    return (
        markdown_table(["model", *features], rows)
        + f"\n\nvLLM {results['vllm']}, torch {results['torch']}, transformers {results['transformers']}; on a CPU."
    )


def speed_table(root: Path) -> str:
    """Throughput on a GPU: a transformer and the same with GKA layers, by length of the prompts and their number."""
    results = read("serving_speed", root)
    fits = {(row["model"], row["tokens"]): row["sequences"] for row in results["rows"] if row["part"] == "fit"}
    rows = [
        [
            f"{row['tokens']:,}",
            row["sequences"],
            f"`{row['model']}`",
            f"{row['requests_per_s']:.1f}",
            f"{row['output_tokens_per_s']:,.0f}",
            f"{row['decode_tokens_per_s']:,.0f}" if row["decode_tokens_per_s"] else "",
            f"{row['first_token_s']:.2f}",
            f"{fits[row['model'], row['tokens']]:,}",
        ]
        for row in sorted(results["rows"], key=lambda row: (row["tokens"], row.get("sequences", 0)))
        if row["part"] == "throughput"
    ]
    head = ["prompt", "sequences", "model", "requests/s", "tokens/s", "decode tokens/s", "first token, s", "fit"]
    new = {row["new_tokens"] for row in results["rows"] if row["part"] == "throughput"}
    return (
        markdown_table(head, rows)
        + f"\n\n{results['device']}, vLLM {results['vllm']}, torch {results['torch']}, commit {results['commit']};"
        f" {results['dtype']}, {max(new)} new tokens per sequence. tokens/s: new tokens over the time of the run;"
        " decode tokens/s: while all sequences decode; first token: the median; fit: sequences whose states and keys"
        " fit into the memory."
    )
