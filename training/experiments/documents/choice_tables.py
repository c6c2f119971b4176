"""The tables of the README by which a user chooses a mixer: quality after conversion, memory, and speed."""

import statistics
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memmix.conversion.estimate import estimate
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.measurements import read

CONTEXT = 4096  # of the memory column
MIXERS = ("gka", "lattice", "coffee", "ska", "mamba2")  # the rows, in this order
WINDOWS = {"window-64": 64, "window-256": 256}  # controls: attention over the last tokens
KEPT = 3  # layers, chosen by `memmix select`


def recall_teacher_shape(root: Path) -> LlamaForCausalLM:
    """The transformer of the mixers' table, without weights."""
    own = read("recall_teacher", root)["settings"]
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=own["hidden_size"],
        intermediate_size=own["intermediate_size"],
        num_hidden_layers=own["layers"],
        num_attention_heads=own["heads"],
        num_key_value_heads=own["kv_heads"],
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def memory_of_mixers(root: Path) -> dict[str, int]:
    """Bytes of the cache of one sequence of `CONTEXT` tokens in bf16: "attention", the mixers and the windows."""
    model = recall_teacher_shape(root)
    found = {name: estimate(model, name, contexts=(CONTEXT,))["state"][0] for name in MIXERS}
    attention = found[MIXERS[0]]["teacher"]
    mixers = {name: sizes["student"] for name, sizes in found.items()}
    windows = {name: attention * tokens // CONTEXT for name, tokens in WINDOWS.items()}
    return {"attention": attention, **mixers, **windows}


def mixers_table(root: Path) -> str:
    """One row per mixer: quality with no and with a quarter of the attention layers kept, and a sequence's memory."""
    # not at the top: `memmix card` imports this package from a wheel, which has no experiments
    from hf_memmix.training.experiments.common.harness import measured_at
    from hf_memmix.training.experiments.recall_teacher.probing import GATE_LENGTH, PROBES
    from hf_memmix.training.experiments.recall_teacher.report import groups, share_text, tokens_of

    results, memory, tasks = read("recall_grid", root), memory_of_mixers(root), ("niah", "mqar_32")
    found = groups(results)
    teacher = [row for row in results["rows"] if row["stage"] == "teacher"]
    shares = [share_text(teacher, task, GATE_LENGTH) for task in tasks]
    rows = [["attention (the transformer)", "1.000", "0", *shares, "", "", "", "", bytes_text(memory["attention"])]]
    shown = []
    for name in (*MIXERS, *WINDOWS):
        cells, keys = [], ((0, "uniform", name), (KEPT, "select", name))
        shown += keys
        for key in keys:
            cells += [f"{_mean(found[key], 'heldout_ppl_ratio'):.3f}", f"{_mean(found[key], 'heldout_kl'):.3f}"]
            cells += [share_text(found[key], task, GATE_LENGTH).partition(" ")[0] for task in tasks]
        title = f"attention over the last {WINDOWS[name]} tokens" if name in WINDOWS else f"`{name}`"
        rows.append([title, *cells, bytes_text(memory[name])])
    columns = ["KL", *(f"{PROBES[task][2]}, %" for task in tasks)]
    head = ["mixer", "no attention kept: perplexity ratio", *columns]
    head += [f"{KEPT} of 12 layers kept: perplexity ratio", *columns, f"memory after {CONTEXT // 1024}k tokens"]
    seeds = {len(found[key]) for key in shown}
    return (
        markdown_table(head, rows, figures=True)
        + "\n\nA transformer of 23M parameters that was trained to recall, converted and trained on "
        f"{tokens_of(results) / 1e6:.1f}M tokens; means of {', '.join(map(str, sorted(seeds)))} seeds. One "
        "learning rate for all mixers and windows, tuned for none of them. Perplexity "
        "ratio: the student's perplexity on held-out text divided by the transformer's. KL: the divergence from the "
        "transformer's predictions there, in nats. Needle and MQAR with 32 pairs of keys and values: exact answers at "
        f"{GATE_LENGTH} tokens of context; a share of needles is of 40 answers per seed, so it may be off by 8 points."
        " Kept layers: chosen by `memmix select`. Memory: the cache of one sequence in bf16, computed by `memmix"
        f" convert --dry-run`; no attention is kept. {measured_at(results)}."
    )


def _mean(rows: list[dict], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def speed_limits(root: Path) -> str:
    """One item per kind of work: where GKA is slower than attention, where it is faster, and the extreme figures."""
    costs = read("demo", root)["context_cost"]
    cpu = [
        (_thousands(theirs["context"]), 1e3 / ours["ms_per_token"], 1e3 / theirs["ms_per_token"])
        for theirs, ours in zip(costs["teacher"], costs["student"], strict=True)
    ]
    forward = {}
    for row in read("kernels", root):
        if row["op"] in ("sdpa", "gka") and row["pass"] == "fwd" and row.get("iterations") in (None, [12, 10]):
            forward.setdefault(tuple(row[size] for size in "BTHD"), {})[row["op"]] = row["ms"]
    whole: dict[str, dict[tuple, dict]] = {"prefill": {}, "graph": {}, "train": {}}
    for row in read("models", root):
        way = "graph" if row.get("cuda_graph") else row["phase"]
        if way in whole and not row["compiled"]:
            whole[way].setdefault((row["B"], row["T"]), {})[row["mixer"]] = row["ms"]
    decode: dict[tuple, dict] = {}
    for row in read("decode_turns", root):
        if "variant" not in row:
            decode.setdefault((row["B"], row["T"]), {})[row["mixer"]] = row
    gpu = [(_sequences(*size), rows["gka"]["ms"], rows["attention"]["ms"]) for size, rows in sorted(decode.items())]
    overlap = [
        f" With {_sequences(*size)} the rounds overlap: {_span(rows['gka'])} and {_span(rows['attention'])} ms."
        for size, rows in sorted(decode.items())
        if min(rows["attention"]["rounds"][1:]) < max(rows["gka"]["rounds"][1:])
    ]
    prefill, graph, training = (
        [(f"{batch} x {_thousands(tokens)}", ms["gka"], ms["attention"]) for (batch, tokens), ms in rows.items()]
        for rows in whole.values()
    )
    op = [(_thousands(tokens), ms["gka"], ms["sdpa"]) for (_, tokens, *_), ms in forward.items() if len(ms) == 2]
    return "\n".join(
        (
            f"- Decode on the CPU of the first table: {_compared(cpu, 'tokens/s', more_is_better=True)}.",
            f"- Decode of a 1.0B model on an NVIDIA H200, both measured in turns on one machine:"
            f" {_compared(gpu, 'ms per token')}.{''.join(overlap)}",
            f"- Prefill of such a model: {_compared(prefill, 'ms')}.",
            f"- Prefill of such a model as a CUDA graph (`PromptGraph`): {_compared(graph, 'ms')}.",
            f"- Training step of such a model, all weights, without a teacher: {_compared(training, 'ms')}.",
            f"- Forward pass of the op alone on an NVIDIA H200: {_compared(op, 'ms')}.",
        )
    )


def _span(row: dict) -> str:
    """The quickest and the slowest round but the first."""
    return f"{row['mixer']} {min(row['rounds'][1:]):.2f} to {max(row['rounds'][1:]):.2f}"


def _sequences(batch: int, context: int) -> str:
    return f"{batch} sequence{'s' * (batch > 1)} of {_thousands(context)}"


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k tokens"


def _compared(rows: list[tuple[str, float, float]], unit: str, more_is_better: bool = False) -> str:
    """`rows`: where, GKA's figure, attention's figure."""
    parts = []
    for word in ("slower", "faster"):
        found = [row for row in rows if (row[1] > row[2]) == ((word == "faster") == more_is_better)]
        if found:
            where, ours, theirs = max(found, key=lambda row: abs(row[1] / row[2] - row[2] / row[1]))
            *first, last = (row[0] for row in found)
            places = f"{', '.join(first)} and {last}" if first else last
            digits = ".0f" if more_is_better else ".2f"
            example = f"{ours:{digits}} instead of {theirs:{digits}} {unit}"
            parts.append(f"{word} with {places} ({example}{f' with {where}' if len(found) > 1 else ''})")
    return ", ".join(parts)
