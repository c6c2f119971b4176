"""What each step of converting an 8B model on one GPU of 24 GiB needs, for training/README.md."""

from pathlib import Path

from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.measurements import read

DISTILLED = {"8B LoRA": "LoRA", "8B QLoRA": "QLoRA"}  # runs of measure_training.py, and their names in the table
DISTILL_TOKENS = 50_000_000


def _distill_rows(root: Path) -> list[list[str]]:
    """The steps of `distill` with (Q)LoRA, as far as they were measured."""
    found = {row["run"]: row for row in read("budget", root)["rows"] if "error" not in row}
    return [
        [
            f"`memmix distill`, {name}, {DISTILL_TOKENS / 1e6:.0f}M tokens",
            bytes_text(found[run]["reserved"]),
            "not measured",
            "none",
            f"{DISTILL_TOKENS / found[run]['tokens_s'] / 3600:.1f} hours",
        ]
        for run, name in DISTILLED.items()
        if run in found
    ]


def _memory(align: dict, measured: str, estimated: str) -> str:
    """Peak memory, and in brackets what `--dry-run` told, if that was measured too."""
    told = align.get("dry_run", {}).get(estimated)
    return bytes_text(align["peak_memory"][measured]) + (f" ({bytes_text(told)})" if told else "")


def _difference(found: dict) -> str:
    """How far two processes are from one."""
    weights, losses = found["largest_weight_difference"], found["largest_loss_difference"]
    if weights == losses == 0:
        return "have the losses and weights of one, bit for bit"
    return f"leave the weights of one but for {weights:.1g}, and its losses but for {losses:.1g}"


def _two_processes(found: dict | None) -> str:
    """One sentence about two processes that train the bundled pair, if that was measured."""
    if found is None:
        return ""
    where = f"{found['gpus']} x {found['environment']['hardware']}" if found["gpus"] else "a CPU"
    return f" Two processes on {where} {_difference(found)}."


def _two_gpus(found: dict | None) -> tuple[list[list[str]], str]:
    """The row of `align --stream` with two GPUs, and sentences about it; nothing if it was not measured."""
    if found is None or found["gpus"] != 2:
        return [], ""
    one, two = found["runs"]["1"], found["runs"]["2"]
    tokens, cost = two["computed"]["tokens"], two["cost"]
    row = [
        f"`memmix align --stream`, {tokens / 1e6:.0f}M tokens, two GPUs",
        bytes_text(max(memory["reserved"] for memory in two["gpu_memory"].values())) + " each",
        "not measured",
        f"{bytes_text(round(cost['spool_bytes'] * tokens / cost['tokens']))} (the spool)",
        f"{two['computed']['hours']:.2f} hours",
    ]
    seconds = [found["tokens"] / run["layer_tokens_per_second"] for run in (one, two)]
    noise = " (more than twice is noise)" if found["speedup"] > 2 else ""
    told = (
        f"\n\nTwo GPUs: {found['measured_layers']} layers of this shape with {found['tokens']:,} tokens each, by one"
        f" process and by two of `accelerate launch`. The two {_difference(found)} (tolerance of the losses:"
        f" {found['tolerance']:.0e}). A layer takes {seconds[1]:.2f} s in each of them and {seconds[0]:.2f} s in one"
        f" process, with which {tokens / 1e6:.0f}M tokens would take {one['computed']['hours']:.2f} hours in this"
        f" measurement. So two GPUs are {found['speedup']:.2f} times as fast{noise}. This leaves out that the second"
        " GPU waits for its first layer."
    )
    return [row], told


def _same_losses(found: dict[str, dict]) -> str:
    """How far the losses of `align --stream` are from those in memory, by dtype."""

    def differences(name: str) -> str:
        return ", ".join(
            f"{row[name]['largest_difference']:.1g} in {dtype} on {row['environment']['hardware']} (tolerance"
            f" {row[name]['tolerance']:.0e}{'' if row[name]['same'] else ', missed'})"
            for dtype, row in found.items()
        )

    (norm,) = {row["clip"] for row in found.values()}
    return (
        "The largest relative difference between the losses of `align` with and without `--stream`, for the bundled"
        f" transformer: {differences('unclipped')} without clipping of gradients; {differences('clipped')} if"
        f" gradients are clipped to the norm {norm:g}." + "".join(sorted({as_sentence(row) for row in found.values()}))
    )


def one_gpu_table(root: Path) -> str:
    """Memory, disk and time of the conversion and of `align --stream` of an 8B shape."""
    (convert, *_) = (row for row in read("streaming", root)["rows"] if row["shape"].endswith("-8b"))
    measured = read("streaming_align", root)
    align = measured["run"]
    two_gpus, told = _two_gpus(measured.get("shape_processes"))
    took, computed = convert["measured"], align["computed"]
    rows = [
        [
            "`memmix convert`",
            "none",
            bytes_text(took["peak_memory"]),
            f"{bytes_text(took['writes'])} (the student)",
            f"{took['seconds']:.0f} s",
        ],
        [
            f"`memmix align --stream`, {computed['tokens'] / 1e6:.0f}M tokens",
            _memory(align, "reserved", "device"),
            _memory(align, "host", "host"),
            f"{bytes_text(computed['spool_bytes'])} (the spool)",
            f"{computed['hours']:.2f} hours",
        ],
        *two_gpus,
        *_distill_rows(root),
    ]
    table = markdown_table(["step", "GPU memory", "memory", "disk", "time"], rows)
    rates = align["tokens_per_second"]
    timed = align["measured_layers"] - 2
    where = align["environment"]
    return (
        f"{table}\n\n"
        + ("In brackets: what `--dry-run` told. " if "dry_run" in align else "")
        + f"The shape of Llama 8B ({align['layers']} layers), random weights, `{align['mixer']}` in every"
        f" layer; {where['hardware']}, torch {where['torch']}, transformers {where['transformers']}. `convert`:"
        f" {convert['cores']} cores, measured as a whole. `align`: {align['measured_layers']} layers were trained with"
        f" {align['tokens']:,} tokens each ({align['steps']} steps of {align['batch_size']} x {align['block_size']}),"
        f" while PyTorch could use {bytes_text(align['limit'])} of the GPU. {timed} of them were timed: a mixer"
        f" reads {rates['train']:,.0f} tokens/s in training, and {rates['layer']:,.0f} tokens/s together with the"
        f" teacher's layer. The hours of all layers, {rates['whole']:,.0f} tokens/s, and the size of the spool are"
        " computed from this; reading the texts and writing the student are not in them. `distill`: median speed of"
        " training steps of one sequence of 2,048 tokens on the same GPU, with gradient checkpointing; the hours are"
        f" computed.\n\n{_same_losses(measured['same_losses'])}{_two_processes(measured.get('processes'))}{told}"
    )
