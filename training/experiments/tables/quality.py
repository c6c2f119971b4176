"""Tables of the product: what a conversion costs and brings at three sizes, and the mixers beside each other."""

import math
import statistics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memmix.conversion.estimate import estimate
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.evaluation.probes.grid import DEPTHS
from hf_memmix.training.experiments.common.harness import measured_at
from hf_memmix.training.experiments.common.llamas import DISTILLED, SHAPES, TIMED
from hf_memmix.training.experiments.recall_teacher.report import (
    GATE_LENGTH,
    ONE_RATE,
    PROBES,
    groups,
    largest_error,
    share_text,
    tokens_of,
)
from hf_memmix.training.experiments.results import read
from hf_memmix.training.experiments.smollm2 import arms_report
from hf_memmix.training.experiments.tables.costs import TRAIN, Costs
from hf_memmix.training.recipe import load_recipe

LONG, TOKENS = 131072, 1e8  # of a cache; of each training stage
SEQUENCES = (1, 32, 128)  # decoded at the same time
WINDOW = "window/1"  # of 512 tokens and the first one
CONTEXT = 4096  # of the memory of the mixers
MIXERS = ("gka", "lattice", "coffee", "ska", "mamba2")
WINDOWS = {"window-64": 64, "window-256": 256}  # controls: attention over the last tokens
KEPT = 3  # layers, chosen by `memmix select`
# the arms of SmolLM2, as options of the mixer
REAL = {arms_report.WINDOW: "`window=384`", "gka": "`gka`", arms_report.BESIDE: "`gka`, `window=64`"}
REAL_KEYS = 2 * 3 * 64 * 2  # bytes of the keys and values of one token in a layer: 3 heads of 64 in bf16
FACTORS = {"rate": "", "window_rate": " for mixers"}
REAL_LAYERS, REAL_CONTEXT = 30, 8192
REAL_PROBES = (("fact", 1024), ("fact", 4096))
SEVERAL = 32  # sequences of the second time of decoding


def front() -> str:
    """Three sizes of transformers with windows: the cache, the time of a decode step and the hours of a conversion."""
    rows = [row for row in read("model_windows_h100") if row["phase"] != "prefill"]
    found = {(row["phase"], row["B"], row["T"], row["mixer"]): row for row in rows}
    train = [found["train", *TRAIN, mixer]["ms"] for mixer in (WINDOW, "gka")]
    costs, lines = Costs(), []
    for shape in SHAPES:
        none, quarter = (
            estimate(shape.model(), "window", keep, contexts=(LONG,), window=512, sinks=1)["state"][0]
            for keep in ("none", 0.25)
        )
        cache = [bytes_text(size) for size in (none["teacher"], quarter["student"], none["student"])]
        times = [[found["decode", b, 1024, m]["ms"] for m in ("attention", WINDOW)] for b in SEQUENCES]
        hours = sum(costs.hours(shape, "gka", stage, TOKENS) for stage in ("align", "distill")) * train[0] / train[1]
        shown = [" → ".join(f"{ms:.1f}" for ms in pair) for pair in times]
        decode = shown if shape is SHAPES[0] else [""] * len(shown)
        lines.append([shape.name, " → ".join(cache[:2]), cache[2], *decode, f"{hours:.1f}"])
    head = ["transformer", f"cache at {LONG // 1024}k tokens, a quarter of the layers kept", "no layer kept"]
    head += [f"ms per token, {b} sequence{'s' * (b > 1)}" for b in SEQUENCES] + ["GPU hours"]
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nBefore → after, with `window=512`."
        f" Cache of one sequence: by `memmix convert --dry-run`. Decode: at {TIMED.name} on an"
        f" {rows[0]['gpu']} after 1k tokens, no layer kept; empty: not measured. Hours: for"
        f" {TOKENS / 1e6:.0f}M tokens of each stage on an {costs.gpu}, computed from training steps of {TIMED.name}"
        f" and {DISTILLED.name}, with `gka` and a window."
    )


def smollm2() -> str:
    """One row per replacement of attention in SmolLM2: its cache, and what the student keeps."""
    files, decode = [read("rates"), read("tasks")], read("decode")["rows"]
    teacher = arms_report.finished(files[0])[0]
    whole = [str(REAL_LAYERS), "", _cache(REAL_LAYERS, 0), _decode_text(decode, "teacher", 0), "0", "1.000"]
    lines = [[*whole, *map(_mean_text, _recalled([teacher]))]]
    used: list[dict] = []
    seeds: dict[str, list[list[float]]] = {}
    factors: list[str] = []
    for kept, arm, changes in arms_report.SHOWN:
        rows = arms_report.shown(files, kept, arm, changes)
        quality = [f"{statistics.mean(row[of] for row in rows):.3f}" for of in ("heldout_kl", "domain_ppl_ratio")]
        cost = [_cache(kept, rows[0]["state_bytes"]), _decode_text(decode, arm, kept)]
        recalled = _recalled(rows)
        lines.append([str(kept), REAL[arm], *cost, *quality, *map(_mean_text, recalled)])
        used += rows
        name = f"{kept}, {REAL[arm]}"
        seeds |= {name: recalled} if len(rows) > 1 else {}
        factors += [f"{value:g}{FACTORS[change]} ({name})" for change, value in changes.items()]
    head = ["layers kept", "others", f"cache at {REAL_CONTEXT // 1024}k", "ms per token", "KL", "ratio"]
    head += [*(f"`{task}` {n:,}" for task, n in REAL_PROBES), "written", "tasks"]
    furthest = max(abs(one - statistics.mean(cell)) for cells in seeds.values() for cell in cells for one in cell)
    questions = sum(files[0]["few_shot"]["questions"].values())
    answers = {cell["answers"] for row in used for cell in row["recall"]}
    counts = ", ".join(f"{len(cells[0])} ({name})" for name, cells in seeds.items())
    recipe = load_recipe("distill")
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nSmolLM2-135M-Instruct, {used[0]['tokens'] / 1e6:.0f}M tokens,"
        f" half of them drills. One seed, or means of {counts}, each within {math.ceil(furthest)} points. Rates of"
        f" `distill`: {recipe.learning_rate:g} for mixers, {recipe.rest_learning_rate:.5f} for the rest, or times"
        f" {', '.join(factors)}. Training: {_minutes(used)} minutes of a shared GPU. Ms: `generate()` behind"
        f" {REAL_CONTEXT // 1024}k tokens, 1 and {SEVERAL} sequences. KL: on held-out text; ratio of perplexities: on"
        f" another domain. `fact`: % right of {max(answers)} questions, ± {_error(used)}; a short window has"
        f" {_short_window(used[0])}. Written: own answers, at 1,024. Tasks: % right of {questions:,} questions, ± 2."
        f" {measured_at(files[0] | {'rows': [teacher, *used]})}."
    )


def _decode_text(rows: list[dict], arm: str, kept: int) -> str:
    """Milliseconds per token with one and with several sequences; "" if they were not measured."""
    found = {row["sequences"]: f"{row['ms']:.1f}" for row in rows if (row["arm"], row["kept"]) == (arm, kept)}
    return ", ".join(found[count] for count in (1, SEVERAL)) if {1, SEVERAL} <= found.keys() else ""


def _minutes(rows: list[dict]) -> str:
    """The shortest and the longest training, in minutes."""
    minutes = [sum(row[stage]["seconds"] for stage in ("align_run", "distill_run")) / 60 for row in rows]
    return f"{min(minutes):.0f} to {max(minutes):.0f}"


def _error(rows: list[dict]) -> str:
    """Half of the widest interval of the choices that are shown, in points of percent."""
    cells = [
        cell["student"] for row in rows for cell in row["recall"] if (cell["task"], cell["length"]) in REAL_PROBES
    ]
    return f"{max(50 * (high - low) for low, high in (cell['choice_interval'] for cell in cells)):.0f}"


def _cache(kept: int, state_bytes: int) -> str:
    return bytes_text(kept * REAL_CONTEXT * REAL_KEYS + (REAL_LAYERS - kept) * state_bytes)


def _recalled(rows: list[dict]) -> list[list[float]]:
    """Percent of right answers, one number per seed: the probes, the generated answers, the mean of the tasks."""
    names = (*(f"{task}_{n}_choice" for task, n in REAL_PROBES), "generated_answers")
    cells = [[100 * row[name] for row in rows] for name in names]
    return [*cells, [100 * arms_report.mean_of_tasks(row) for row in rows]]


def _mean_text(values: list[float]) -> str:
    return f"{statistics.mean(values):.0f}"


def _short_window(row: dict) -> str:
    """The right choices of a short window in percent: it reads the last depth, and guesses at the others."""
    chance = next(cell["chance"] for cell in row["recall"] if cell["task"] == REAL_PROBES[0][0])
    return f"{100 * (1 + (len(DEPTHS) - 1) * chance) / len(DEPTHS):.0f}"


def _recall_teacher_shape() -> LlamaForCausalLM:
    """The transformer of the mixers' table, without weights."""
    own = read("teacher_kept")["settings"]
    sizes = {"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_hidden_layers": "layers"}
    sizes |= {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads"}
    fields = {name: own[key] for name, key in sizes.items()}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, tie_word_embeddings=True, **fields))
    return model.to(torch.bfloat16)


def _memory_of_mixers() -> dict[str, int]:
    """Bytes of the cache of one sequence of `CONTEXT` tokens in bf16: "attention", the mixers and the windows."""
    model = _recall_teacher_shape()
    found = {name: estimate(model, name, contexts=(CONTEXT,))["state"][0] for name in MIXERS}
    attention = found[MIXERS[0]]["teacher"]
    windows = {name: attention * tokens // CONTEXT for name, tokens in WINDOWS.items()}
    return {"attention": attention, **{name: sizes["student"] for name, sizes in found.items()}, **windows}


def mixers() -> str:
    """One row per mixer: quality with no and with a quarter of the attention layers kept, and a sequence's memory."""
    results, memory, tasks = read("grid"), _memory_of_mixers(), ("niah", "mqar_32")
    found, shown = groups(results), []
    teacher = [row for row in results["rows"] if row["stage"] == "teacher"]
    shares = [share_text(teacher, task, GATE_LENGTH) for task in tasks]
    rows = [["the transformer", "1.000", "0", *shares, "", "", "", "", bytes_text(memory["attention"])]]
    for name in (*MIXERS, *WINDOWS):
        cells, keys = [], ((0, "uniform", name), (KEPT, "select", name))
        shown += keys
        for key in keys:
            for figure in ("heldout_ppl_ratio", "heldout_kl"):
                cells.append(f"{statistics.fmean(row[figure] for row in found[key]):.3f}")
            cells += [share_text(found[key], task, GATE_LENGTH).partition(" ")[0] for task in tasks]
        title = f"last {WINDOWS[name]} tokens of attention" if name in WINDOWS else f"`{name}`"
        rows.append([title, *cells, bytes_text(memory[name])])
    columns = ["KL", *(f"{PROBES[task].partition(',')[0]}, %" for task in tasks)]
    head = ["mixer", "no attention kept: ratio", *columns]
    head += [f"{KEPT} of 12 kept: ratio", *columns, f"memory after {CONTEXT // 1024}k tokens"]
    parameters = read("teacher_kept")["parameters"]
    error = largest_error([student for key in shown for student in found[key]])
    seeds = ", ".join(map(str, sorted({len(found[key]) for key in shown})))
    return (
        markdown_table(head, rows, figures=True)
        + f"\n\nA transformer of {parameters / 1e6:.0f}M parameters that was trained to recall, converted and trained"
        f" on {tokens_of(results) / 1e6:.1f}M tokens; means of {seeds} seeds. {ONE_RATE}"
        f" Ratio of perplexities, and KL: on held-out text. Needle and MQAR (32 pairs): exact answers at {GATE_LENGTH}"
        f" tokens; needles may be off by {error} points. Kept layers: chosen by `memmix select`. Memory: the cache of"
        f" one sequence in bf16 without kept layers, computed by `memmix convert --dry-run`. {measured_at(results)}."
    )
