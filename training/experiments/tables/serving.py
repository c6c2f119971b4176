"""The tables of hf_memmix/serving/README.md: families, what a sequence costs, what was tested, and speed."""

import re
from collections import Counter

import torch
from transformers import LlamaConfig

from hf_memmix import memmix_config
from hf_memmix.backbones import BACKBONES
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.mixers import ATTENTION, MIXERS
from hf_memmix.models import FAMILIES
from hf_memmix.serving.footprint import Footprint
from hf_memmix.serving.vllm.options import REFUSALS
from hf_memmix.training.experiments.results import read
from hf_memmix.training.experiments.tables.costs import _by_reason

LENGTHS = (2048, 65536)
# models of benchmark_serving.py; those that are left are the transformer
CONVERTED = ("gka", "gka_3of4", "gka_window", "window")
# the shape of Llama 3.2 1B
SHAPE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE |= {"head_dim": 64, "intermediate_size": 8192, "max_position_embeddings": 2**17}


def serving_families() -> str:
    """The decoder families that vLLM serves with mixers, and the refused ones with the reason."""
    served = [f"`{name}`" for name, row in sorted(BACKBONES.items()) if not (row.refused or row.no_serving)]
    refused = {name: row.no_serving for name, row in BACKBONES.items() if row.no_serving}
    scratch = ", ".join(f"`{name}ForCausalLM`" for name in FAMILIES)
    return "\n\n".join(
        [
            f"{len(served)} families, with any mixers: {', '.join(served)}.",
            f"The families that are trained from scratch: {scratch}.",
            "Refused by name:",
            _by_reason(refused),
        ]
    )


def serving_costs() -> str:
    """Bytes of one sequence of a 1B Llama shape in bf16, with each mixer in all and in three of four layers."""
    backbone, rows = LlamaConfig(**SHAPE), []
    layers = backbone.num_hidden_layers

    def sizes(config) -> list[str]:
        return [bytes_text(Footprint.of(config, torch.bfloat16).total(length)) for length in LENGTHS]

    def mixed(mixer: str, kept=()):
        return memmix_config(backbone, [ATTENTION if i in kept else mixer for i in range(layers)])

    for mixer in (name for name, cls in MIXERS.items() if cls.__module__.startswith("hf_memmix.mixers.")):
        pure = mixed(mixer)
        (state,) = set(Footprint.of(pure, torch.bfloat16).states.values())
        (whole,) = set(sizes(pure))
        rows.append([f"`{mixer}`", bytes_text(state), whole, *sizes(mixed(mixer, range(3, layers, 4)))])
    head = ["mixer", "state of a layer", "in every layer", *(f"in 3 of 4, {n // 1024}k tokens" for n in LENGTHS)]
    attention = ", ".join(f"{size} at {n // 1024}k tokens" for size, n in zip(sizes(backbone), LENGTHS, strict=True))
    return (
        markdown_table(head, rows, figures=True)
        + "\n\nOne sequence of a Llama shape of 1B in bf16, default options, states in fp32."
        f" With attention in every layer: {attention}."
    )


def serving_matrix() -> str:
    """What `make serve-test` tested: models by features."""
    results = read("matrix_cpu")
    features = list(results["matrix"])
    alike: dict[tuple, list[str]] = {}  # models for which the same was tested
    for model in dict.fromkeys(case for cases in results["matrix"].values() for case in cases):
        alike.setdefault(tuple(results["matrix"][f].get(model, "") for f in features), []).append(f"`{model}`")
    rows = [[", ".join(models), *cells] for cells, models in alike.items()]
    where = results.get("device", "a CPU")
    return (
        markdown_table(["model", *features], rows)
        + f"\n\nvLLM {results['vllm']}, torch {results['torch']}, transformers {results['transformers']}; on {where}."
    )


def serving_refusals() -> str:
    """The options of vLLM that the plugin refuses."""
    return re.sub(r"--[a-z-]+", r"`\g<0>`", "\n".join(f"- {row.option}" for row in REFUSALS))


def _rows(part: str, file: str = "serving_h200") -> list[dict]:
    return [row for row in read(file)["rows"] if row["part"] == part]


def _names_of_models(rows: list[dict]) -> list[str]:
    """The models of these rows, the transformer first."""
    found = {row["model"] for row in rows}
    return sorted(found, key=lambda name: (name in CONVERTED and 1 + CONVERTED.index(name), name))


def serving_speed() -> str:
    """Tokens/s of a transformer and of the same with memories, as vLLM runs them by default."""
    return _speed("serving_h200")


def serving_second_runner() -> str:
    """The same with vLLM's second model runner for all models."""
    return _speed("serving_h200_second_runner")


def _speed(file: str) -> str:
    """One row per length of the prompts and their number; points that no model has are left out."""
    results = read(file)
    measured = [row for row in _rows("throughput", file) if "left_out" not in row]
    found = {(row["tokens"], row["sequences"], row["model"]): row for row in measured}
    commits = Counter(row["commit"] for row in measured)
    (newest, _), *older = commits.most_common()
    models, rows = _names_of_models(measured), []
    for length, count in sorted({key[:2] for key in found}):
        points = [found.get((length, count, model)) for model in models]
        cells = ["" if row is None else _tokens_per_s(row) + " °" * (row["commit"] != newest) for row in points]
        rows.append([f"{length:,}", count, *cells])
    new = max(row["new_tokens"] for row in measured)
    return (
        f"{markdown_table(['prompt', 'sequences', *(f'`{model}`' for model in models)], rows, figures=True)}\n\n"
        "Tokens/s of the steps in which all sequences decode, in brackets of the whole run;"
        f" {new} new tokens per sequence. {results['device']}, vLLM {results['vllm']}, torch {results['torch']},"
        f" {results['dtype']}, commit {', °: '.join([newest, *(name for name, _ in older)])}."
    )


def _tokens_per_s(row: dict) -> str:
    decode = row["decode_tokens_per_s"]
    return f"{f'{decode:,.0f}' if decode else '-'} ({row['output_tokens_per_s']:,.0f})"


def serving_fit() -> str:
    """How many sequences fit into the memory, and when the first token of a single prompt comes."""
    fits = {(row["tokens"], row["model"]): f"{row['sequences']:,}" for row in _rows("fit")}
    alone = [row for row in _rows("throughput") if row["sequences"] == 1 and "first_token_s" in row]
    first = {(row["tokens"], row["model"]): f" ({1e3 * row['first_token_s']:.0f} ms)" for row in alone}
    models = _names_of_models(_rows("fit"))
    rows = [
        [f"{length:,}", *(f"{fits[length, model]}{first.get((length, model), '')}" for model in models)]
        for length in sorted({key[0] for key in fits})
    ]
    return (
        markdown_table(["prompt", *(f"`{model}`" for model in models)], rows, figures=True)
        + "\n\nSequences that fit into the memory; in brackets the time to the first token of one prompt."
    )


def serving_prefix() -> str:
    """When the first token of a prompt comes without and with a known prefix."""
    rows = []
    for row in _rows("prefix", "serving_h200_second_runner"):
        times = (f"{1e3 * row[name]:.0f} ms" for name in ("first_token_s", "first_token_hit_s"))
        rows.append([f"{row['tokens']:,}", *times, f"{row['cached_tokens']:,}"])
    return markdown_table(["prompt", "first token", "with a known prefix", "known tokens"], rows, figures=True)


def tensor_parallel() -> str:
    """One model on one GPU and on several: time per token, memory of the weights, tokens."""
    results, rows = read("tensor_parallel_h200"), []
    for way in results["ways"].values():
        ties, same = way["near_ties"], "equal"
        if not way["tokens_equal"]:
            proved = ties and all(tie.get("is_near_tie") for tie in ties)
            same = f"{len(ties)} of {results['batch']} rows differ" + (", from a near tie on" if proved else "")
        times = (f"{way['ms_per_token'][name]:.1f} ms" for name in ("alone", "together"))
        weights = (bytes_text(way["weight_bytes_per_rank"][name]) for name in ("alone", "together"))
        rows.append([f"{way['dtype']}, {way['cache']} cache", *times, *weights, same])
    ranks = results["ranks"]
    head = ["", "one GPU", f"{ranks} GPUs", "weights on one GPU", f"on each of {ranks}", "greedy tokens"]
    return (
        markdown_table(head, rows)
        + f"\n\nMilliseconds per step of {results['batch']} sequences after {results['context']:,} tokens; every layer"
        f" `{results['mixer']}`, the 1B shape of the table of costs; {results['device']}, torch {results['torch']},"
        f" transformers {results['transformers']}, commit {results['commit']}."
    )
