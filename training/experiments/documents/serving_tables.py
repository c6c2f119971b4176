"""The tables of hf_memmix/serving/README.md: families, what a sequence costs, and what was tested."""

import re
from collections.abc import Iterable
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
from hf_memmix.serving.vllm.options import REFUSALS
from hf_memmix.training.experiments.measurements import read

LENGTHS = (2048, 16384, 65536)
CONVERTED = ("gka", "gka_3of4")  # models of benchmark_serving.py; the one that is left is the transformer
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
    return _matrix(read("serving_matrix", root))


def matrix_gpu_table(root: Path) -> str:
    """The same tests on a GPU."""
    return _matrix(read("serving_matrix_gpu", root))


def _matrix(results: dict) -> str:
    features = list(results["matrix"])
    models = list(dict.fromkeys(case for cases in results["matrix"].values() for case in cases))
    rows = [[f"`{m}`", *(results["matrix"][f].get(m, "") for f in features)] for m in models]
    where = results.get("device", "a CPU")
    return (
        markdown_table(["model", *features], rows)
        + f"\n\nvLLM {results['vllm']}, torch {results['torch']}, transformers {results['transformers']}; on {where}."
    )


def refusals_table(root: Path) -> str:
    """The options of vLLM that the plugin refuses, with the reasons."""
    lines = "\n".join(f"- {row.option}: {row.reason}." for row in REFUSALS)
    return re.sub(r"--[a-z-]+", r"`\g<0>`", lines)


def speed_table(root: Path) -> str:
    """Throughput on a GPU: a transformer and the same with GKA layers, by length of the prompts and their number."""
    return _speed(read("serving_speed", root))


def before_table(root: Path) -> str:
    """The same of an earlier measurement."""
    return _speed(read("serving_before", root))


def _speed(results: dict) -> str:
    found = {(r["tokens"], r["sequences"], r["model"]): r for r in results["rows"] if r["part"] == "throughput"}
    models = _models_of(found.values())
    rows = []
    for length, count in dict.fromkeys(sorted(key[:2] for key in found)):
        cells = [f"{length:,}", count]
        for field in ("output_tokens_per_s", "decode_tokens_per_s"):
            for model in models:
                cells.append(_figure(found.get((length, count, model), {}), field))
        rows.append(cells)
    head = ["prompt", "sequences", *(f"{what}, `{model}`" for what in ("tokens/s", "decode") for model in models)]
    measured = [row for row in found.values() if "left_out" not in row]
    new = {row["new_tokens"] for row in measured}
    commits = sorted({row.get("commit", results.get("commit")) for row in measured})
    lines = [
        markdown_table(head, rows),
        f"{results['device']}, vLLM {results['vllm']}, torch {results['torch']}, commit {', '.join(commits)};"
        f" {results['dtype']}, {max(new)} new tokens per sequence. tokens/s: new tokens over the time of the run;"
        f" requests/s are that divided by {max(new)}. decode: tokens/s of the steps in which all sequences decode;"
        " empty if some had ended before the last prompt was read.",
    ]
    if len(measured) < len(found):
        lines.append("Left out: too long for the time of the run; the file gives the reason for each.")
    return "\n\n".join([*lines, *_ratios(found)])


def _figure(row: dict, field: str) -> str:
    if row.get(field):
        return f"{row[field]:,.0f}"
    return "left out" if "left_out" in row else ""


def _ratios(found: dict) -> list[str]:
    """Decode speed of the models at 64 sequences over that of the transformer."""
    lines, models = [], _models_of(found.values())
    for length in sorted({key[0] for key in found}):
        speeds = {model: found.get((length, 64, model), {}).get("decode_tokens_per_s") for model in models}
        if speeds[models[0]]:
            others = [f"`{m}` {speeds[m] / speeds[models[0]]:.2f}" for m in models[1:] if speeds[m]]
            lines.append(f"{length:,} tokens: {', '.join(others)}")
    return [f"Decode with 64 sequences, as multiples of `{models[0]}`. {'; '.join(lines)}."] if lines else []


def _models_of(rows: Iterable[dict]) -> list[str]:
    """The models of these rows, the transformer first."""
    names = dict.fromkeys(row["model"] for row in rows)
    return [*(name for name in names if name not in CONVERTED), *(name for name in CONVERTED if name in names)]


def fit_table(root: Path) -> str:
    """How many sequences fit into the memory, and when the first token of a single prompt comes."""
    rows = read("serving_speed", root)["rows"]
    fits = {(row["tokens"], row["model"]): f"{row['sequences']:,}" for row in rows if row["part"] == "fit"}
    alone = [row for row in rows if row["part"] == "throughput" and row["sequences"] == 1 and "first_token_s" in row]
    first = {(row["tokens"], row["model"]): f"{1e3 * row['first_token_s']:.0f} ms" for row in alone}
    models = _models_of(row for row in rows if row["part"] == "fit")
    return markdown_table(
        ["prompt", *(f"{what}, `{model}`" for what in ("sequences that fit", "first token") for model in models)],
        [
            [f"{length:,}", *(found.get((length, model), "") for found in (fits, first) for model in models)]
            for length in sorted({key[0] for key in fits})
        ],
    )


def prefix_table(root: Path) -> str:
    """When the first token of a prompt comes without and with a known prefix."""
    rows = [row for row in read("serving_speed", root)["rows"] if row["part"] == "prefix"]
    return markdown_table(
        ["prompt", "first token", "with a known prefix", "known tokens"],
        [
            [
                f"{row['tokens']:,}",
                *(f"{1e3 * row[name]:.0f} ms" for name in ("first_token_s", "first_token_hit_s")),
                f"{row['cached_tokens']:,}",
            ]
            for row in rows
        ],
        figures=True,
    )


def summary_table(root: Path) -> str:
    """64 sequences at once: speed, and how many sequences fit."""
    rows = read("serving_speed", root)["rows"]
    names = {"gka": "every layer GKA", "gka_3of4": "3 of 4 layers GKA"}  # the other model is a transformer
    cells = []
    for length in sorted({row["tokens"] for row in rows}):
        for model in _models_of(rows):
            mine = [row for row in rows if (row["model"], row["tokens"]) == (model, length)]
            (run,) = (row for row in mine if row["part"] == "throughput" and row["sequences"] == 64)
            (fit,) = (row for row in mine if row["part"] == "fit")
            speeds = [_figure(run, field) for field in ("output_tokens_per_s", "decode_tokens_per_s")]
            cells.append([f"{length:,}", names.get(model, model.capitalize()), *speeds, f"{fit['sequences']:,}"])
    head = ["prompt", "model", "tokens/s, whole run", "tokens/s, decode", "sequences that fit"]
    return markdown_table(head, cells, figures=True)


def tensor_parallel_table(root: Path) -> str:
    """One model on one GPU and on several: time per token, memory of the weights, tokens."""
    results = read("tensor_parallel", root)
    rows = []
    for way in results["ways"].values():
        times, weights = way["ms_per_token"], way["weight_bytes_per_rank"]
        ties = way["near_ties"]
        same = "equal"
        if not way["tokens_equal"]:
            proved = ties and all(tie.get("is_near_tie") for tie in ties)
            same = f"{len(ties)} of {results['batch']} rows differ" + (", from a near tie on" if proved else "")
        rows.append(
            [
                f"{way['dtype']}, {way['cache']} cache",
                *(f"{times[name]:.1f} ms" for name in ("alone", "together")),
                *(bytes_text(weights[name]) for name in ("alone", "together")),
                same,
            ]
        )
    ranks = results["ranks"]
    head = ["", "one GPU", f"{ranks} GPUs", "weights on one GPU", f"on each of {ranks}", "greedy tokens"]
    return (
        markdown_table(head, rows)
        + f"\n\nMilliseconds per step of {results['batch']} sequences after {results['context']:,} tokens; every layer"
        f" `{results['mixer']}`, the 1B shape of the table of costs; {results['device']}, torch {results['torch']},"
        f" transformers {results['transformers']}, commit {results['commit']}."
    )
