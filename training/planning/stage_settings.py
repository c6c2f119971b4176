"""Chooses for every stage the settings with which it fits a GPU, and says what it then needs.

Settings are tried in the order in which they cost speed: a smaller batch, gradient checkpointing, an optimizer with
states in 8 bit, one whose states wait in the memory of the CPU, smaller chunks of logits, several GPUs.
"""

import itertools
from dataclasses import asdict, dataclass, replace

from torch import nn

from hf_memmix.training.planning import CONTEXT
from hf_memmix.training.planning.memory import Memory, Settings, memory_of
from hf_memmix.training.planning.shapes import Shapes
from hf_memmix.training.planning.speed import measured, speed_of
from hf_memmix.training.teachers import lora_names

FRAGMENTED = 0.05  # what the allocator holds but cannot use
ROWS = (8, 4, 2, 1)
# (optimizer, checkpointing), chunk of logits
STEPS = (
    ("adamw_torch_fused", False),
    ("adamw_torch_fused", True),
    ("adamw_bnb_8bit", True),
    ("paged_adamw_8bit", True),
)
CHUNKS = (2048, 512)
LORA = {"teacher": "lora", "lora_mixers": True}
# name of the stage, kind of its measured speed, settings
STAGES = (
    ("align", "align", Settings("align")),
    ("align --stream", "align --stream", Settings("align --stream")),
    ("distill, all weights", "full", Settings("distill")),
    ("distill, all weights, cached teacher", "full", Settings("distill", teacher="cache")),
    ("distill, LoRA", "lora", Settings("distill", **LORA)),
    ("distill, QLoRA", "lora 4bit", Settings("distill", quantize="4bit", **LORA)),
)


@dataclass(frozen=True)
class Stage:
    """One line of a plan.

    Args:
        name: of the stage.
        fits: whether there are settings with which it fits; `settings` and `memory` are then the first that do,
            otherwise those that need least.
        need: bytes of GPU memory that the GPU must have, with the CUDA context and fragmentation.
        tokens_s, hours: estimated speed of all GPUs and time; None if nothing like it was measured, or if it does not
            fit.
        measured_run: the measured run from which they were computed; `larger`: its parameters over the teacher's.
        compiled_hours: the time with `compile: true`, as `hours`, and of compiling; None if it was not measured at the
            size of that run.
    """

    name: str
    fits: bool
    settings: Settings
    memory: Memory
    need: float
    tokens_s: float | None = None
    hours: float | None = None
    measured_run: str | None = None
    larger: float | None = None
    compiled_hours: float | None = None

    def record(self) -> dict:
        """JSON values; `recipe` has the fields of the recipe that differ from its defaults."""
        settings = asdict(self.settings)
        return {
            "stage": self.name,
            "fits": self.fits,
            "gpus": settings["gpus"],
            "rows_per_gpu": settings["rows"],
            "length": settings["length"],
            "recipe": self.recipe(),
            "memory": {name: round(value) for name, value in asdict(self.memory).items()},
            "peak": round(self.memory.total),
            "need": round(self.need),
            "tokens_s": None if self.tokens_s is None else round(self.tokens_s),
            "hours": None if self.hours is None else round(self.hours, 4),
            "compiled_hours": None if self.compiled_hours is None else round(self.compiled_hours, 4),
            "measured_run": self.measured_run,
            "larger": None if self.larger is None else round(self.larger, 2),
        }

    def recipe(self) -> dict:
        """The fields of a recipe for these settings."""
        run = self.settings
        fields = {"batch_size": run.rows * run.gpus, "block_size": run.length}
        if run.stage == "distill":
            fields["teacher"] = "cache:DIR" if run.teacher == "cache" else run.teacher
            fields |= {"lora_mixers": True} if run.lora_mixers else {}
            fields |= {"quantize": run.quantize} if run.quantize != "none" else {}
            fields |= {"chunk_tokens": run.chunk_tokens} if run.chunk_tokens != CHUNKS[0] else {}
        fields |= {"gradient_checkpointing": True} if run.checkpointing else {}
        if run.optimizer != STEPS[0][0]:
            fields["trainer"] = {"optim": run.optimizer}
        return fields


def need_of(memory: Memory) -> float:
    """Bytes that a GPU must have for this peak."""
    return memory.total * (1 + FRAGMENTED) + CONTEXT


def plan_stages(
    teacher: nn.Module, student: nn.Module, gpu_memory: int, tokens: int, gpus: int = 1, length: int = 2048
) -> list[Stage]:
    """The stages of a conversion, from the models' shapes; both models may be on the meta device.

    Args:
        gpu_memory: bytes of one GPU.
        tokens: tokens of each stage.
        gpus: number of GPUs that may be used.
        length: tokens per sequence.

    Raises:
        ValueError: the memory of one of the mixers is not known.
    """
    shapes = Shapes.of(teacher, student)
    linear = all(type(student.get_submodule(name)) is nn.Linear for name in lora_names(student, mixers=True))
    return [
        _stage(name, kind, replace(base, length=length), shapes, gpu_memory, tokens, gpus)
        for name, kind, base in STAGES
        if linear or base.quantize == "none"  # only nn.Linear can be quantised
    ]


def _stage(name: str, kind: str, base: Settings, shapes: Shapes, budget: int, tokens: int, gpus: int) -> Stage:
    least = None
    for settings in _candidates(base, gpus):
        memory = memory_of(shapes, settings)
        if least is None or memory.total < least.memory.total:
            least = Stage(name, False, settings, memory, need_of(memory))
        if need_of(memory) <= budget:
            break
    else:
        return least
    run = kind, shapes.active, shapes.kinds, settings.checkpointing, settings.tokens, settings.gpus
    speed, compiled = speed_of(*run), speed_of(*run, compiled=True)
    known = {} if speed is None else asdict(speed) | {"hours": tokens / speed.tokens_s / 3600}
    # of runs of another size, the two times would differ by more than what compiling gives
    if None not in (speed, compiled) and compiled.larger == speed.larger:
        known["compiled_hours"] = (tokens / compiled.tokens_s + measured()["compile_s"]) / 3600
    return Stage(name, True, settings, memory, need_of(memory), **known)


def _candidates(base: Settings, gpus: int):
    """Settings from the fastest to the smallest; with several GPUs data parallel first, then sharded."""
    chunks = CHUNKS if base.stage == "distill" else CHUNKS[:1]
    sharded = (False, True) if gpus > 1 and base.stage == "distill" and not base.lora else (False,)
    for shard, chunk, (optimizer, checkpointing) in itertools.product(sharded, chunks, STEPS):
        if shard and optimizer != STEPS[0][0]:
            continue  # states in 8 bit cannot be sharded
        for rows in ROWS:
            yield replace(
                base, rows=rows, checkpointing=checkpointing, optimizer=optimizer, chunk_tokens=chunk, gpus=gpus,
                sharded=shard,
            )  # fmt: skip


def measured_beside() -> list[dict]:
    """The runs whose memory was measured: name, measured and computed bytes at the peak, and their ratio."""
    return [
        {"run": row["run"], "measured": row["bytes"], "computed": row["predicted_bytes"],
         "ratio": round(row["predicted_bytes"] / row["bytes"], 3)}
        for row in measured()["rows"]
        if "bytes" in row
    ]  # fmt: skip
