"""What does a part of GKA give? One part is changed at a time, on recall (MQAR) and as a small language model.

    python training/experiments/gka/variants.py --text text.npy --out gka_variants.json --workers 6

The sketches of Appendix H solve the ridge regression in half and in a quarter of the head size. `ABLATIONS` are
Appendices F and G of the paper: no decay, no alpha, other ridges. `HYBRIDS` have attention in some
layers (Appendix I). `IN_GRID` look for the reason of GKA's low recall with 64 pairs.

All models of a task have the same number of parameters (the MLP takes the difference), the same data and the same
learning rate, which is the best one of GKA in the experiments `recall` and `baselines_language`, unless a variant has
its own. One rate for all variants is a limit of this experiment: a variant may have a better one.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Annotated

import typer

from hf_memmix.conversion.from_attention.half_lives import start_decay
from hf_memmix.mixers import ATTENTION
from hf_memmix.swap import memory_mixers
from hf_memmix.training.experiments.common.fit import memory_of, train_language_model
from hf_memmix.training.experiments.common.harness import Experiment
from hf_memmix.training.experiments.common.options import (
    BatchTokens,
    Cells,
    Options,
    Tokens,
    TrainingText,
    check_names,
    read_cells,
)
from hf_memmix.training.experiments.common.recall import train_recall
from hf_memmix.training.experiments.common.text import describe_training_text


@dataclass(frozen=True)
class Variant:
    """What differs from GKA with its default options.

    Args:
        options: options of the mixer.
        mixer: the mixer.
        sketch: the head size divided by the sketch's; 1 is without a sketch.
        rate: factor of the task's learning rate.
        half_lives: tokens after which the memory has forgotten one half, log-spaced over the heads from the first to
            the second value at the start of the training; None: as `GKAMixer.init_weights` draws them.
        heads: factor of the number of heads, at the same hidden size; 0.5 gives heads and states of twice the size.
        equal_start: whether the projection of q starts with the weights of that of k.
        attention: the layers that have attention; negative numbers count from the last layer.
    """

    options: dict = field(default_factory=dict)
    mixer: str = "gka"
    sketch: int = 1
    rate: float = 1.0
    half_lives: tuple[float, float] | None = None
    heads: float = 1.0
    equal_start: bool = False
    attention: tuple[int, ...] = ()

    def layers(self, count: int) -> list[str]:
        """The mixer of each of `count` layers."""
        places = {place % count for place in self.attention}
        return [ATTENTION if layer in places else self.mixer for layer in range(count)]

    def prepare(self, model) -> None:
        """Set the start of a new model's weights."""
        for mixer in memory_mixers(model).values():
            if self.half_lives:
                start_decay(mixer, self.half_lives, mixer.a_proj)
            if self.equal_start:
                mixer.q_proj.weight.data.copy_(mixer.k_proj.weight)


SKETCHES = {"s = D": Variant(), "s = D/2": Variant(sketch=2), "s = D/4": Variant(sketch=4)}
ABLATIONS = {
    "no decay": Variant({"use_decay": False}),
    "no alpha": Variant({"use_alpha": False}),
    "ridge 0.01": Variant({"ridge": 0.01}),
    "ridge 0.05": Variant({"ridge": 0.05}),
    "ridge 0.1": Variant({"ridge": 0.1}),
}
HYBRIDS = {
    "attention first": Variant(attention=(0,)),
    "attention second": Variant(attention=(1,)),
    "attention last": Variant(attention=(-1,)),
    "attention second and last": Variant(attention=(1, -1)),
    "attention in all layers": Variant(attention=(0, 1, 2, 3)),
}
# with 64 pairs. The paper's Figure 3a is measured "without any gating or alpha-connection" (its Appendix D)
PLAIN = {"use_decay": False, "use_alpha": False}
IN_GRID = {
    "as in Figure 3a": Variant(PLAIN),
    "rate x 0.5": Variant(rate=0.5),
    "rate x 0.75": Variant(rate=0.75),
    "rate x 1.5": Variant(rate=1.5),
    "rate x 2": Variant(rate=2.0),
    "slow decay": Variant(half_lives=(64, 4096)),
    "v not convolved": Variant({"use_v_conv": False}),
    "half the heads": Variant(heads=0.5),
    "q starts as k": Variant(equal_start=True),
    "DEC, own projection of q, rate x 0.5": Variant({"variant": "dec", "share_qk": False}, mixer="lattice", rate=0.5),
    "delta, own projection of q, rate x 0.5": Variant(
        {"variant": "delta", "share_qk": False}, mixer="lattice", rate=0.5
    ),
}
VARIANTS = SKETCHES | ABLATIONS | HYBRIDS | IN_GRID


@dataclass(frozen=True)
class Task:
    """A task with the size of its models, the learning rate that was best for GKA, and the steps of the warm-up.

    Without a number of steps the rate warms up over a twentieth of the training.
    """

    hidden_size: int
    layers: int
    heads: int
    lr: float
    warmup_steps: int | None = None


# the text has the rate and the warm-up of GKA in baselines/language.py: hybrids have attention, which needs a long one
TASKS = {"recall": Task(64, 2, 2, 3e-3), "text": Task(256, 4, 4, 8e-3, warmup_steps=150)}


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

    layers = variant.layers(task.layers)
    if row["task"] == "recall":
        own.tokens = args.recall_tokens
        result = train_recall(own, layers, options, row["length"], row["pairs"], lr, row["seed"], variant.prepare)
    else:
        result = train_language_model(
            {**row, "lr": lr}, own, layers, options, variant.prepare, warmup_steps=task.warmup_steps
        )
    floats, _ = memory_of(own, variant.mixer, options)
    return result | {"lr": lr, "options": options, "layers": layers, "state_bytes": 4 * floats}


class VariantOptions(Options):
    text: TrainingText
    batch_tokens: BatchTokens = 32768
    tokens: Tokens = 16_000_000
    recall_tokens: Annotated[int, typer.Option(help="training tokens per model on the recall task")] = 100_000_000
    context: Annotated[int, typer.Option(help="tokens of a sequence of text")] = 512
    cells: Cells = "[[256, 32]]"
    tasks: Annotated[list[str], typer.Option(help="recall, text; repeatable")] = tuple(TASKS)
    variants: Annotated[list[str], typer.Option(help="what to compare; repeatable")] = tuple(SKETCHES)
    seeds: Annotated[list[int], typer.Option(help="seeds; repeatable")] = (0, 1, 2)


def check(args) -> None:
    read_cells(args)
    check_names("--tasks", args.tasks, TASKS)
    check_names("--variants", args.variants, VARIANTS)


main = Experiment(
    "gka_variants", __file__, VariantOptions, rows_to_run, check, lambda args: describe_training_text(args.text)
).command()


if __name__ == "__main__":
    typer.run(main)
