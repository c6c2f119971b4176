"""What the conversion of a larger model costs: GPU hours and memory, for training/convert_your_model.md.

Only models of one size were timed. The hours of other sizes follow from a rule with two terms. Of the time of a
training step, the matrix products and the optimizer grow with the number of parameters P; everything else (mixers,
norms, copies) grows with the width W = layers x hidden size:

    seconds per token = factor (train + teacher),   each of both = products P / P0 + rest W / W0

"train" is a training step of the whole student and "teacher" one forward of the transformer, both from
kernels/benchmarks/results/model_h200.json. `factor` makes the rule give the speed of the one distillation that was
measured as a whole, a model of 1.3 billion parameters (experiments/several_gpus).
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_memmix.conversion.estimate import TRAINING_BYTES, estimate
from hf_memmix.conversion.records import bytes_text, markdown_table
from hf_memmix.training.experiments.measurements import read
from hf_memmix.training.recipe import load_recipe

CONTEXTS = (4096, 32768, 131072)  # of the memory table
TRAIN, TEACHER = (8, 2048), (1, 2048)  # sequences and tokens of the timed training step and forward
GROWS_WITH_PARAMETERS = ("matrix products", "optimizer")
LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}


@dataclass(frozen=True)
class Shape:
    """A Llama: its name in the tables and the fields of its configuration."""

    name: str
    fields: dict

    def model(self):
        """The model without weights, in bf16."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(LlamaConfig(**self.fields), dtype=torch.bfloat16)

    @functools.cached_property
    def parameters(self) -> int:
        return self.model().num_parameters()

    @property
    def width(self) -> int:
        """Layers times hidden size."""
        return self.fields["num_hidden_layers"] * self.fields["hidden_size"]


def _shape(name: str, hidden: int, layers: int, heads: int, head: int, inner: int, tied: bool, **fields) -> Shape:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head}
    return Shape(name, LLAMA | sizes | {"intermediate_size": inner, "tie_word_embeddings": tied} | fields)


# the model of kernels/benchmarks/benchmark_model.py, and that of experiments/several_gpus
TIMED = _shape("1.0B", 2048, 16, 32, 64, 8192, True, vocab_size=32000)
DISTILLED = _shape("1.2B", 2048, 16, 32, 64, 8192, True)
# shapes of the Llama 3 family
SHAPES = (DISTILLED, _shape("3.2B", 3072, 28, 24, 128, 8192, True), _shape("8.0B", 4096, 32, 32, 128, 14336, False))


def _scaled(row: dict, parameters: float, width: float) -> float:
    """Seconds of a measured row's call for a model with so many times the parameters and layers x hidden size."""
    products = sum(row["kernels"].get(kind, 0.0) for kind in GROWS_WITH_PARAMETERS) / row["kernel_ms"]
    return row["ms"] / 1e3 * (products * parameters + (1 - products) * width)


class Costs:
    """The rule of this module, from the committed measurements.

    Raises:
        ValueError: the measurements of whole models lack the teacher's forward.
    """

    def __init__(self, root: Path):
        rows = [row for row in read("models", root) if not row["compiled"] and not row.get("cuda_graph")]
        self.train = {row["mixer"]: row for row in rows if row["phase"] == "train" and (row["B"], row["T"]) == TRAIN}
        teacher = [
            row
            for row in rows
            if (row["mixer"], row["phase"], row["B"], row["T"]) == ("attention", "prefill", *TEACHER)
        ]
        if not teacher:
            raise ValueError(f"model_h200.json has no prefill of attention at {TEACHER}; run benchmark_model.py")
        # one sequence does not fill the GPU, so the time of the kernels counts, and not that of the call
        self.teacher = teacher[0] | {"ms": teacher[0]["kernel_ms"]}
        self.mixers = [mixer for mixer in self.train if mixer != "attention"]
        launches = read("multi_gpu", root)["launches"]["1b_single"]
        self.measured = {stage: row["tokens_per_second"] for stage, row in launches["stages"].items()}
        self.gpu, self.timed = rows[0]["gpu"], TIMED.parameters
        self.factor = 1 / (self.measured["distill"] * self._uncorrected(DISTILLED, "gka"))

    def _uncorrected(self, shape: Shape, mixer: str) -> float:
        ratios = shape.parameters / self.timed, shape.width / TIMED.width
        return _scaled(self.train[mixer], *ratios) / (TRAIN[0] * TRAIN[1]) + _scaled(self.teacher, *ratios) / (
            TEACHER[0] * TEACHER[1]
        )

    def seconds_per_token(self, shape: Shape, mixer: str, stage: str) -> float:
        """Seconds of one GPU. `align` was timed with gka alone: it grows with P, and by mixer as "train" does."""
        if stage == "distill":
            return self.factor * self._uncorrected(shape, mixer)
        step = {name: self.train[name]["ms"] for name in (mixer, "gka")}
        return shape.parameters / DISTILLED.parameters * step[mixer] / step["gka"] / self.measured["align"]

    def hours(self, shape: Shape, mixer: str, stage: str, tokens: float) -> float:
        return tokens * self.seconds_per_token(shape, mixer, stage) / 3600


def costs_table(root: Path) -> str:
    """GPU hours per 100M tokens by size and mixer, and those of two whole budgets."""
    costs = Costs(root)
    recipes = {stage: load_recipe(stage) for stage in ("align", "distill")}
    bundled = {stage: recipe.steps * recipe.tokens_per_step for stage, recipe in recipes.items()}
    (larger,) = (row for row in read("published_conversions", root) if "stages" in row)
    budgets = {"the bundled recipes": bundled, f"as {larger['name']}": larger["stages"]}
    lines = []
    for shape in SHAPES:
        for mixer in costs.mixers:
            per = [f"{costs.hours(shape, mixer, stage, 1e8):.2g}" for stage in ("align", "distill")]
            totals = [
                f"{sum(costs.hours(shape, mixer, stage, tokens) for stage, tokens in stages.items()):.2g}"
                for stages in budgets.values()
            ]
            lines.append([shape.name, f"`{mixer}`", *per, *totals])
    head = ["transformer", "mixer", "`align`, 100M tokens", "`distill`, 100M tokens", *budgets]
    told = "; ".join(
        f"{name}, {stages['align'] / 1e6:.0f}M and {stages['distill'] / 1e6:.0f}M tokens"
        for name, stages in budgets.items()
    )
    return (
        markdown_table(head, lines, figures=True)
        + f"\n\nHours of one {costs.gpu}; every layer is converted. Budgets of `align` and `distill`: {told}."
        f" Measured: a training step of a {TIMED.name} model with each mixer, and the whole pipeline with `gka` at"
        f" {DISTILLED.name} ({costs.measured['align']:,} and {costs.measured['distill']:,} tokens/s). All other"
        " figures are computed: matrix products grow with the parameters, the rest with layers x hidden size, times"
        f" {costs.factor:.2f}, by which the measured pipeline is slower than the sum of its parts."
    )


def conversion_memory_table(root: Path) -> str:
    """Bytes in training, and the cache of one sequence by context, for the shapes of `SHAPES`, with `gka`."""
    lines = []
    for shape in SHAPES:
        none, quarter = (estimate(shape.model(), "gka", keep, contexts=CONTEXTS) for keep in ("none", 0.25))
        weights = [bytes_text(none["weights"][stage]) for stage in ("align", "distill")]
        cache = [
            f"{bytes_text(a['teacher'])} / {bytes_text(b['student'])} / {bytes_text(a['student'])}"
            for a, b in zip(none["state"], quarter["state"], strict=True)
        ]
        lines.append([shape.name, *weights, *cache])
    head = [
        "transformer",
        "weights in `align`",
        "weights in `distill`",
        *(f"cache at {n // 1024}k tokens" for n in CONTEXTS),
    ]
    return (
        markdown_table(head, lines, figures=True)
        + "\n\nWeights: parameters, gradients and optimizer with a bf16 teacher as a second copy and an fp32 student, "
        f"{TRAINING_BYTES} further bytes per trained parameter; activations come on top. Cache of one sequence in"
        " bf16: the transformer / a student with a quarter of its layers kept / with none kept. Computed for `gka`, as"
        " `memmix convert --dry-run` does."
    )


def published_table(root: Path) -> str:
    """Conversions by others: how many tokens they took and what they report."""
    lines = [
        [f"[{row['name']}]({row['source']})", row["teachers"], row["mixer"], row["tokens"], row["reported"]]
        for row in read("published_conversions", root)
    ]
    return markdown_table(["published by others", "teacher", "mixer", "tokens", "what they report"], lines)
