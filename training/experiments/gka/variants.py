"""What does a part of GKA give? One part is changed at a time, on recall (MQAR) and as a small language model.

    python training/experiments/gka/variants.py --text text.npy --out gka_variants.json --workers 6

The sketches of Appendix H solve the ridge regression in half and in a quarter of the head size. "no decay" is Appendix
F.2 of the paper, "no alpha" F.3, and the ridges are those of Appendix G. The others look for the reason of GKA's low
recall with 64 pairs: `IN_GRID` are the variants of that grid.

All models of a task have the same number of parameters (the MLP takes the difference), the same data and the same
learning rate, which is the best one of GKA in the experiments `recall` and `coffee_language`, unless a variant has its
own. One rate for all variants is a limit of this experiment: a variant may have a better one.
"""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.command_options import command
from hf_memmix.conversion.from_attention.gka import start_decay
from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common.fit import memory_of, train_language_model
from hf_memmix.training.experiments.common.harness import execute
from hf_memmix.training.experiments.common.mqar import check_cell
from hf_memmix.training.experiments.common.options import (
    BatchTokens,
    PlottedOptions,
    Tokens,
    TrainingText,
    check_names,
    draw_if_asked,
)
from hf_memmix.training.experiments.common.recall import train_recall
from hf_memmix.training.experiments.common.text import describe_training_text
from hf_memmix.training.experiments.gka.variants_report import plot


@dataclass(frozen=True)
class Variant:
    """What differs from GKA with its default options.

    Args:
        options: options of the mixer.
        sketch: the head size divided by the sketch's; 1 is without a sketch.
        rate: factor of the task's learning rate.
        half_lives: tokens after which the memory has forgotten one half, log-spaced over the heads from the first to
            the second value at the start of the training; None: as `GKAMixer.init_weights` draws them.
        heads: factor of the number of heads, at the same hidden size; 0.5 gives heads and states of twice the size.
    """

    options: dict = field(default_factory=dict)
    sketch: int = 1
    rate: float = 1.0
    half_lives: tuple[float, float] | None = None
    heads: float = 1.0


SKETCHES = {"s = D": Variant(), "s = D/2": Variant(sketch=2), "s = D/4": Variant(sketch=4)}
ABLATIONS = {
    "no decay": Variant({"use_decay": False}),
    "no alpha": Variant({"use_alpha": False}),
    "ridge 0.01": Variant({"ridge": 0.01}),
    "ridge 0.05": Variant({"ridge": 0.05}),
    "ridge 0.1": Variant({"ridge": 0.1}),
}
# with 64 pairs. The paper's Figure 3a is measured "without any gating or alpha-connection" (its Appendix D)
IN_GRID = {
    "as in Figure 3a": Variant({"use_decay": False, "use_alpha": False}),
    "as in Figure 3a, rate x 0.5": Variant({"use_decay": False, "use_alpha": False}, rate=0.5),
    "rate x 0.5": Variant(rate=0.5),
    "rate x 0.75": Variant(rate=0.75),
    "rate x 1.5": Variant(rate=1.5),
    "slow decay": Variant(half_lives=(64, 4096)),
    "slow decay, rate x 0.5": Variant(half_lives=(64, 4096), rate=0.5),
    "v not convolved": Variant({"use_v_conv": False}),
    "half the heads": Variant(heads=0.5),
    "no beta": Variant({"use_beta": False}),
}
VARIANTS = SKETCHES | ABLATIONS | IN_GRID


@dataclass(frozen=True)
class Task:
    """A task with the size of its models and the learning rate that was best for GKA."""

    hidden_size: int
    layers: int
    heads: int
    lr: float


TASKS = {"recall": Task(64, 2, 2, 3e-3), "text": Task(256, 4, 4, 4e-3)}


def rows_to_run(done: list[dict], args) -> list[dict]:
    """All rows of a seed before those of the next one."""
    recall = [{"task": "recall", "length": length, "pairs": pairs} for length, pairs in args.cells]
    tasks = {"recall": recall, "text": [{"task": "text", "context": args.context}]}
    return [
        {**task, "variant": name, "seed": seed}
        for seed in args.seeds
        for kind in args.tasks
        for task in tasks[kind]
        for name in args.variants
    ]


def sizes_of(task: Task, variant: Variant, args) -> tuple[SimpleNamespace, dict]:
    """The settings that `fit.build` reads, and the options of the mixer."""
    heads = round(task.heads * variant.heads)
    sizes = {"hidden_size": task.hidden_size, "layers": task.layers, "heads": heads}
    sketch = {} if variant.sketch == 1 else {"sketch_dim": task.hidden_size // heads // variant.sketch}
    return SimpleNamespace(**{**vars(args), **sizes}), {**variant.options, **sketch}


def run(row: dict, args) -> dict:
    task, variant = TASKS[row["task"]], VARIANTS[row["variant"]]
    own, options = sizes_of(task, variant, args)
    lr = task.lr * variant.rate

    def prepare(model):
        for mixer in memory_mixers(model).values() if variant.half_lives else ():
            start_decay(mixer, variant.half_lives)

    if row["task"] == "recall":
        own.tokens = args.recall_tokens
        result = train_recall(own, "gka", options, row["length"], row["pairs"], lr, row["seed"], prepare)
    else:
        result = train_language_model({**row, "lr": lr}, own, "gka", options, prepare)
    floats, _ = memory_of(own, "gka", options)
    return result | {"lr": lr, "options": options, "state_bytes": 4 * floats}


class Options(PlottedOptions):
    text: TrainingText
    batch_tokens: BatchTokens = 32768
    tokens: Tokens = 16_000_000
    recall_tokens: Annotated[int, typer.Option(help="training tokens per model on the recall task")] = 100_000_000
    context: Annotated[int, typer.Option(help="tokens of a sequence of text")] = 512
    cells: Annotated[str, typer.Option(help="[[length, pairs], ...] as JSON")] = "[[256, 32]]"
    tasks: Annotated[list[str], typer.Option(help="recall, text; repeatable")] = tuple(TASKS)
    variants: Annotated[list[str], typer.Option(help="what to compare; repeatable")] = tuple(SKETCHES)
    seeds: Annotated[list[int], typer.Option(help="seeds; repeatable")] = (0, 1)


@command(Options)
def main(args) -> None:
    """Train every variant on every task and write the results."""
    args.cells = json.loads(args.cells)
    for cell in args.cells:
        check_cell(*cell)
    check_names("--tasks", args.tasks, TASKS)
    check_names("--variants", args.variants, VARIANTS)
    results = execute("gka_variants", __file__, args, rows_to_run, **describe_training_text(args.text))
    draw_if_asked(args, plot, results)


if __name__ == "__main__":
    typer.run(main)
