"""What conversion and training cost, and which families can be converted.

Only models of one size were timed. The hours of other sizes follow from a rule with two terms. Of the time of a
training step, the matrix products and the optimizer grow with the number of parameters P; everything else (mixers,
norms, copies) grows with the width W = layers x hidden size:

    seconds per token = factor (train + teacher),   each of both = products P / P0 + rest W / W0

"train" is a training step of the whole student and "teacher" one forward of the transformer, both from
kernels/benchmarks/results/model_h200.json. `factor` makes the rule give the speed of the one distillation that was
measured as a whole, a model of 1.3 billion parameters (experiments/several_gpus).
"""

from dataclasses import asdict

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hf_memmix.backbones import BACKBONES, layer_rotates
from hf_memmix.conversion import convert_model
from hf_memmix.conversion.estimate import TRAINING_BYTES, estimate
from hf_memmix.conversion.families import FAMILIES, extract_attention
from hf_memmix.conversion.from_attention import STARTS
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.mixers import MIXERS
from hf_memmix.training.experiments.bundled.versions import as_sentence
from hf_memmix.training.experiments.common.llamas import DISTILLED, SHAPES, TIMED, Shape
from hf_memmix.training.experiments.results import read
from hf_memmix.training.planning.stage_settings import plan_stages
from hf_memmix.training.recipe import load_recipe

CONTEXTS = (4096, 32768, 131072)  # of the memory table
TRAIN, TEACHER = (8, 2048), (1, 2048)  # sequences and tokens of the timed training step and forward
GROWS_WITH_PARAMETERS = ("matrix products", "optimizer")
GPU, BUDGET = 24 * 2**30, 50_000_000  # bytes; tokens


def _scaled(row: dict, parameters: float, width: float) -> float:
    """Seconds of a measured row's call for a model with so many times the parameters and layers x hidden size."""
    products = sum(row["kernels"].get(kind, 0.0) for kind in GROWS_WITH_PARAMETERS) / row["kernel_ms"]
    return row["ms"] / 1e3 * (products * parameters + (1 - products) * width)


class Costs:
    """The rule of this module."""

    def __init__(self):
        rows = [row for row in read("model_h200") if not row["compiled"] and not row.get("cuda_graph")]
        found = {(row["phase"], row["B"], row["T"], row["mixer"]): row for row in rows}
        self.train = {key[-1]: row for key, row in found.items() if key[:-1] == ("train", *TRAIN)}
        teacher = found["prefill", *TEACHER, "attention"]
        # one sequence does not fill the GPU, so the time of the kernels counts, and not that of the call
        self.teacher = teacher | {"ms": teacher["kernel_ms"]}
        self.mixers = [mixer for mixer in self.train if mixer != "attention"]
        stages = read("multi_gpu")["launches"]["1b_single"]["stages"]
        self.measured = {stage: row["tokens_per_second"] for stage, row in stages.items()}
        self.gpu, self.timed = rows[0]["gpu"], TIMED.parameters
        self.factor = 1 / (self.measured["distill"] * self._uncorrected(DISTILLED, "gka"))

    def _uncorrected(self, shape: Shape, mixer: str) -> float:
        ratios = shape.parameters / self.timed, shape.width / TIMED.width
        train, teacher = (_scaled(row, *ratios) for row in (self.train[mixer], self.teacher))
        return train / (TRAIN[0] * TRAIN[1]) + teacher / (TEACHER[0] * TEACHER[1])

    def seconds_per_token(self, shape: Shape, mixer: str, stage: str) -> float:
        """Seconds of one GPU. `align` was timed with gka alone: it grows with P, and by mixer as "train" does."""
        if stage == "distill":
            return self.factor * self._uncorrected(shape, mixer)
        step = {name: self.train[name]["ms"] for name in (mixer, "gka")}
        return shape.parameters / DISTILLED.parameters * step[mixer] / step["gka"] / self.measured["align"]

    def hours(self, shape: Shape, mixer: str, stage: str, tokens: float) -> float:
        return tokens * self.seconds_per_token(shape, mixer, stage) / 3600


def conversion_costs() -> str:
    """GPU hours per 100M tokens by size, and those of two whole budgets: with gka, and the range of all mixers."""
    costs = Costs()
    recipes = {stage: load_recipe(stage) for stage in ("align", "distill")}
    (larger,) = (row for row in read("published_conversions") if "stages" in row)
    budgets = {f"`{stage}`, 100M tokens": {stage: 1e8} for stage in recipes} | {
        "the bundled recipes": {stage: recipe.steps * recipe.tokens_per_step for stage, recipe in recipes.items()},
        f"as {larger['name']}": larger["stages"],
    }
    lines = []
    for shape in SHAPES:
        cells = []
        for stages in budgets.values():
            hours = {m: sum(costs.hours(shape, m, *stage) for stage in stages.items()) for m in costs.mixers}
            cells.append(f"{hours['gka']:.2g} ({min(hours.values()):.2g} to {max(hours.values()):.2g})")
        lines.append([shape.name, *cells])
    told = [
        f"{name}, {' and '.join(f'{tokens / 1e6:.0f}M' for tokens in of.values())} tokens"
        for name, of in budgets.items()
    ]
    return (
        markdown_table(["transformer", *budgets], lines, figures=True)
        + f"\n\nHours of one {costs.gpu} with `gka` (from the fastest to the slowest of {len(costs.mixers)} mixers);"
        f" every layer is converted. Tokens of `align` and `distill`: {'; '.join(told[2:])}. Measured: a training step"
        f" of a {TIMED.name} model with each mixer, and the whole pipeline with `gka` at {DISTILLED.name}"
        f" ({costs.measured['align']:,} and {costs.measured['distill']:,} tokens/s). The rest is computed."
    )


def conversion_memory() -> str:
    """Bytes in training, and the cache of one sequence by context, for the shapes of `SHAPES`, with `gka`."""
    lines = []
    for shape in SHAPES:
        none, quarter = (estimate(shape.model(), "gka", keep, contexts=CONTEXTS) for keep in ("none", 0.25))
        weights = [bytes_text(none["weights"][stage]) for stage in ("align", "distill")]
        cache = [
            " / ".join(map(bytes_text, (a["teacher"], b["student"], a["student"])))
            for a, b in zip(none["state"], quarter["state"], strict=True)
        ]
        lines.append([shape.name, *weights, *cache])
    head = ["transformer", "weights in `align`", "weights in `distill`"]
    head += [f"cache at {n // 1024}k tokens" for n in CONTEXTS]
    return (
        markdown_table(head, lines, figures=True)
        + "\n\nWeights: parameters, gradients and optimizer with a bf16 teacher as a second copy and an fp32 student, "
        f"{TRAINING_BYTES} further bytes per trained parameter; activations come on top. Cache of one sequence in"
        " bf16: the transformer / a student with a quarter of its layers kept / with none kept. Computed for `gka`, as"
        " `memmix convert --dry-run` does."
    )


def published_conversions() -> str:
    """Conversions by others: how many tokens they took and what they report."""
    lines = [
        [f"[{row['name']}]({row['source']})", *(row[key] for key in ("teachers", "mixer", "tokens", "reported"))]
        for row in read("published_conversions")
    ]
    table = markdown_table(["published by others", "teacher", "mixer", "tokens", "what they report"], lines)
    return f"{table}\n\nFrom the papers' abstracts and first pages; empty: these do not say."


def one_gpu_distil() -> str:
    """The stages of `distill` of an 8B model on a GPU of 24 GiB: what `memmix plan` computes."""
    teacher, lines, runs = SHAPES[-1].model(), [], set()
    for stage in plan_stages(teacher, convert_model(teacher, "gka"), GPU, BUDGET):
        if not stage.name.startswith("distill"):
            continue
        runs |= {stage.measured_run} - {None}
        if not stage.fits:
            lines.append([stage.name, f"no, at least {bytes_text(stage.need)}", "", ""])
            continue
        parts = asdict(stage.memory)
        largest = max(parts, key=parts.get)
        told = f"{bytes_text(stage.memory.total)}, of which {bytes_text(parts[largest])} {largest}"
        lines.append([stage.name, "yes", told, "not measured" if stage.hours is None else f"{stage.hours:.1f}"])
    head = ["stage", "fits", "GPU memory", f"hours for {BUDGET / 1e6:.0f}M tokens"]
    told = f"; hours from the measured run {', '.join(sorted(runs))}" if runs else ""
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nThe shape of Llama 8B, `gka` in every layer, as `memmix plan`"
        f" computes it{told}."
    )


def quantized() -> str:
    """Memory and decode speed of the 1B shape and perplexity of the bundled student, with every quantiser."""
    found = read("quantized_h200")
    students = {row["method"]: row.get("perplexity") for row in found["student"]}
    lines = []
    for row in found["shape"]:
        speeds = [row.get(name) for name in ("decode_tokens_s", "generate_tokens_s")]
        cells = [bytes_text(row[name]) if name in row else "" for name in ("weights", "peak")]
        cells += ["not measured" if speed is None else f"{speed:,.0f}" for speed in speeds]
        cells.append(f"{row['error'] / row['error_of_bf16']:.2f}" if "error" in row else "")
        perplexity = students[row["method"]]
        lines.append([row["method"], *cells, "not measured" if perplexity is None else f"{perplexity:.2f}"])
    head = ["weights", "after loading", "peak of the decode", "tokens/s, CUDA graph", "tokens/s, `generate`"]
    head += ["error, times bf16", "perplexity of the bundled student"]
    where = found["environment"]
    return (
        f"{markdown_table(head, lines, figures=True)}\n\nA Llama of {DISTILLED.name} parameters, random weights,"
        f" `gka` in every layer, one sequence, without torch.compile; {where['hardware']}, torch {where['torch']},"
        f" torchao {where['torchao']}, bitsandbytes {where['bitsandbytes']}. The error is that of the logits"
        f" to those of fp32 with the same rounded weights.{as_sentence(found)}"
    )


def long_prompts() -> str:
    """One row per model and length of the prompt."""
    measured = [row for row in read("long_h200") if row["phase"] == "prompt"]
    measured.sort(key=lambda row: (row["mixer"] != "attention", row["mixer"], row["T"]))
    rows = []
    for row in measured:
        name = "attention (Llama)" if row["mixer"] == "attention" else f"`{row['mixer']}`"
        sizes = (bytes_text(round(row[key] * 2**20)) for key in ("peak_mib", "cache_mib"))
        rows.append([name, f"{row['T']:,}", f"{row['seconds']:.2f} s", f"{row['tokens_s']:,}", *sizes])
    (gpu,), (chunk,) = ({row[name] for row in measured} for name in ("gpu", "chunk"))
    versions = ", ".join(sorted({f"torch {row['torch']}, Triton {row['triton']}" for row in measured}))
    return (
        markdown_table(["layers", "prompt", "first token after", "tokens/s", "peak memory", "of it the cache"], rows)
        + f"\n\nThe shape of a Llama with {TIMED.parameters / 1e9:.2f} billion parameters, random bf16 weights, one"
        " mixer in every layer;"
        f" `generate(prefill_chunk_size={chunk})`, one sequence; {gpu}, {versions}."
    )


LAUNCHES = {
    "single": "1 GPU",
    "single_accumulated": "1 GPU, halves",
    "ddp": "2 GPUs, DDP",
    "fsdp2": "2 GPUs, FSDP2",
    "zero3": "2 GPUs, ZeRO-3",
}


def gpus() -> str:
    """Speed, memory and loss of every launch of `several_gpus/compare_launches.py`."""
    results, lines = read("multi_gpu"), []
    for model, model_name in {"bundled": "bundled, 5M", "1b": "Llama shape, 1.3B"}.items():
        for launch, title in LAUNCHES.items():
            for stage, row in results["launches"].get(f"{model}_{launch}", {"stages": {}})["stages"].items():
                compared = results["summary"].get(f"{model}_{launch}_{stage}", {})
                cells = [model_name, stage, title, f"{row['tokens_per_second']:,}"]
                cells.append(f"{row['peak_memory_bytes'] / 2**30:.1f}")
                for name, digits in (("scaling_efficiency", 0), ("loss_difference", 4)):
                    share = compared.get(name)
                    cells.append("" if share is None else f"{100 * share:.{digits}f}")
                lines.append(cells)
    head = ["model", "stage", "launch", "tokens/s", "peak, GiB", "efficiency, %", "loss off by, %"]
    return (
        markdown_table(head, lines, figures=True)
        + f"\n\n{results['gpus']} x {results['hardware']}, torch {results['torch']}, commit "
        f"{results['commit']}. Loss off by: the largest relative difference from the loss on one GPU, over all steps. "
        "Halves: gradient accumulation in two parts; the last rows of an epoch, fewer than a batch, had more weight."
        + as_sentence(results)
    )


def streaming() -> str:
    """Memory, bytes and time of conversions by streaming, measured, and estimated by `--dry-run`."""
    rows = []
    for row in read("streaming")["rows"]:
        measured, estimated, where = row["measured"], row["estimated"], row["environment"]
        pairs = [f"{bytes_text(measured[key])} ({bytes_text(estimated[key])})" for key in ("peak_memory", "writes")]
        seconds = f"{measured['seconds']:.0f} s ({estimated['seconds']:.0f} s)"
        versions = f"torch {where['torch']}, transformers {where['transformers']}"
        machine = f"{row['cores']} cores of {where['hardware']}; {versions}"
        model = [f"{row['shape']}, `{row['mixer']}`", machine, bytes_text(row["largest_shard"])]
        rows.append([*model, *pairs, seconds])
    head = ["model", "machine", "largest file", "peak memory", "written", "time"]
    return markdown_table(head, rows) + "\n\nIn brackets: what the dry run estimated."


def _by_reason(refused: dict[str, str]) -> str:
    """Markdown: a line for each reason with its families."""
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {reason}." for reason, names in reasons.items())


def teachers() -> str:
    """One row for all families with equal positions and losses, and which mixers use rotary embeddings."""
    rows: dict[tuple[str, str], list[str]] = {}
    for model_type in sorted(FAMILIES):
        rows.setdefault(_traits(model_type), []).append(f"`{model_type}`")
    table = markdown_table(
        ["teachers", "positions", "not carried over"], [(", ".join(names), *row) for row, names in rows.items()]
    )
    with torch.device("meta"):
        attention = extract_attention(AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1)), 0)
    own = [name for name, mixer in MIXERS.items() if mixer.__module__.startswith("hf_memmix.mixers.")]
    keep = {name: STARTS[name].options(attention).get("use_rope", False) for name in own if name in STARTS}
    told = [", ".join(f"`{name}`" for name in keep if keep[name] == kept) for kept in (True, False)]
    return (
        f"{len(FAMILIES)} families:\n\n{table}\n\n{told[0]} keep the rotary embeddings; {told[1]} do not use them,"
        " because their states depend on the order of the tokens."
    )


def _traits(model_type: str) -> tuple[str, str]:
    family, config = FAMILIES[model_type], AutoConfig.for_model(model_type)
    lost = {
        "soft-cap of scores": "attn_logit_softcapping" in (fields := config.to_dict()),
        "window": family.window,
        "clipping": "clip_qkv" in fields,
        "norm after rotation": family.norm_last,
    }
    positions = "learned"
    if family.rotary is not None:
        part = (config.rope_parameters or {}).get("partial_rotary_factor") or 1.0
        positions = "rotary, neighbours paired" if family.interleaved else "rotary, halves paired"
        positions += f", {part:.0%} of a head" if part < 1 else ""
        everywhere = all(layer_rotates(config, i) for i in range(config.num_hidden_layers))
        positions += "" if everywhere else ", not in all layers"
    return positions, ", ".join([text for text, is_lost in lost.items() if is_lost] + list(family.extra))


def refusals() -> str:
    """The families that are refused, grouped by the reason."""
    swap, conversion = (
        {name: getattr(row, field) for name, row in BACKBONES.items() if getattr(row, field)}
        for field in ("refused", "no_conversion")
    )
    return "\n\n".join(
        [
            "No mixer can take the place of the attention of these families. `memmix_config` refuses them too:",
            _by_reason(swap),
            "These can have mixers in a model that is trained from scratch, but no pretrained model of theirs can be"
            " converted:",
            _by_reason(conversion),
        ]
    )
