"""The tables of the README by which a user chooses a mixer: quality after conversion, memory, and speed."""

import statistics
from functools import partial
from pathlib import Path

from hf_memmix.conversion.estimate import estimate, meta_teacher
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.bundled.versions import as_sentence
from hf_memmix.training.documents.measurements import read

CONTEXT = 4096  # of the memory column
TEACHER = "hf_memmix/assets/tiny_teacher"
MIXERS = ("gka", "lattice", "coffee", "ska", "mamba2")  # the rows, in this order
NOT_MEASURED = "not measured"


def mixers_table(root: Path) -> str:
    """One row per mixer: quality with no and with half of the attention layers kept, and the memory of a sequence."""
    # not at the top: `memmix card` imports this package from a wheel, which has no experiments
    from hf_memmix.training.experiments.conversion.table_report import chosen

    results = read("conversion_table", root)
    teacher = [row for row in results["rows"] if row["mixer"] == "attention"]
    memory = {name: estimate(meta_teacher(root / TEACHER), name, contexts=(CONTEXT,))["state"][0] for name in MIXERS}
    attention = ["1.000", "0", "100 %", _recalled(teacher), "", "", ""]
    rows = [["attention (the transformer)", *attention, bytes_text(memory["gka"]["teacher"])]]
    gain = partial(_gain, of_teacher=_mean_gain(teacher))
    for name in MIXERS:
        figures = []
        for kept, columns in ((0.0, (_ratio, _kl, gain, _recalled)), (0.5, (_ratio, gain, _recalled))):
            found = chosen(results, name, kept)
            figures += [show(found) if found else NOT_MEASURED for show in columns]
        rows.append([f"`{name}`", *figures, bytes_text(memory[name]["student"])])
    head = ["mixer", "no attention kept: perplexity ratio", "KL", "use of context", "names recalled"]
    head += ["half of it kept: perplexity ratio", "use of context", "names recalled"]
    head += [f"memory after {CONTEXT // 1024}k tokens"]
    steps = results["settings"]["align_steps"], results["settings"]["distill_steps"]
    return (
        markdown_table(head, rows, figures=True)
        + f"\n\nA bundled transformer (5M parameters), converted and trained for {steps[0]} steps of `align` and "
        f"{steps[1]} of `distill` on one {results['environment']['hardware']}. Perplexity ratio: the student's "
        "perplexity on held-out text divided by the transformer's. KL: the divergence from the transformer's "
        "predictions there, in nats. Names recalled: how often the next token is right where a name is mentioned for "
        "the second time; use of context: how much the context raises the log-probability of this token, as a share "
        "of the transformer's figure. Memory: the cache of one sequence in bf16, computed by `memmix convert "
        "--dry-run`; no attention is kept." + as_sentence(results)
    )


def _ratio(rows: list[dict]) -> str:
    return f"{statistics.fmean(row['heldout_ppl_ratio'] for row in rows):.3f}"


def _kl(rows: list[dict]) -> str:
    return f"{statistics.fmean(row['heldout_kl'] for row in rows):.3f}"


def _mean_gain(rows: list[dict]) -> float:
    return statistics.fmean(row["probes"]["mentions"]["gain"] for row in rows)


def _gain(rows: list[dict], of_teacher: float) -> str:
    return f"{100 * _mean_gain(rows) / of_teacher:.0f} %"


def _recalled(rows: list[dict]) -> str:
    return f"{100 * statistics.fmean(row['probes']['mentions']['exact'] for row in rows):.1f} %"


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
