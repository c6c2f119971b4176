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
    rows = [["the transformer", "1.000", "0", *shares, "", "", "", "", bytes_text(memory["attention"])]]
    shown = []
    for name in (*MIXERS, *WINDOWS):
        cells, keys = [], ((0, "uniform", name), (KEPT, "select", name))
        shown += keys
        for key in keys:
            cells += [f"{_mean(found[key], 'heldout_ppl_ratio'):.3f}", f"{_mean(found[key], 'heldout_kl'):.3f}"]
            cells += [share_text(found[key], task, GATE_LENGTH).partition(" ")[0] for task in tasks]
        title = f"last {WINDOWS[name]} tokens of attention" if name in WINDOWS else f"`{name}`"
        rows.append([title, *cells, bytes_text(memory[name])])
    columns = ["KL", *(f"{PROBES[task][2].partition(',')[0]}, %" for task in tasks)]
    head = ["mixer", "no attention kept: ratio", *columns]
    head += [f"{KEPT} of 12 kept: ratio", *columns, f"memory after {CONTEXT // 1024}k tokens"]
    seeds = {len(found[key]) for key in shown}
    return (
        markdown_table(head, rows, figures=True)
        + "\n\nA transformer of 23M parameters that was trained to recall, converted and trained on"
        f" {tokens_of(results) / 1e6:.1f}M tokens; means of {', '.join(map(str, sorted(seeds)))} seeds; one learning"
        " rate for all mixers and windows, tuned for none of them. Ratio of perplexities, and KL: on held-out text."
        f" Needle and MQAR (32 pairs): exact answers at {GATE_LENGTH} tokens; needles may be off by 8 points. Kept"
        " layers: chosen by `memmix select`. Memory: the cache of one sequence in bf16 without kept layers, computed"
        f" by `memmix convert --dry-run`. {measured_at(results)}."
    )


def _mean(rows: list[dict], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)
