"""A recipe: all settings of one training stage, read from a YAML file. The bundled ones are in `training/recipes`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path

import yaml

from hf_memmix.conversion.layer_choice import LayerChoice
from hf_memmix.conversion.yaml_text import read_yaml
from hf_memmix.errors import UserError, check_temperature

TEACHERS = ("copy", "shared", "lora")
CHOICES = {
    "stage": ("align", "distill"),
    "quantize": ("none", "4bit", "8bit"),
    "bos": ("rows", "documents"),
    "loss": ("all", "answers"),
}
# least and largest value of each number but the rates, which lie in [0, 1)
BOUNDS = {
    "steps": (1, 10**9),
    "batch_size": (1, 10**6),
    "gradient_accumulation": (1, 10**6),
    "block_size": (2, 10**7),
    "warmup_steps": (0, 10**9),
    "min_lr_ratio": (0.0, 1.0),
    "lora_rank": (1, 10**5),
    "far_weight": (0.0, 1000.0),
    "far_window": (0, 10**7),
    "window_rate": (0.0, 1.0),
    "drills": (0.0, 1.0),
    "chunk_tokens": (1, 10**9),
    "save_every": (0, 10**9),
    "seed": (0, 2**32 - 1),  # what numpy takes
}
# those that transformers knows: the library itself is too slow to ask
TRACKERS = ("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow")
TRACKERS += ("neptune", "swanlab", "tensorboard", "trackio", "wandb")
NUMBERS = (int, int | None, float)
RATES = ("learning_rate", "rest_learning_rate", "weight_decay")


@dataclass(frozen=True)
class Recipe:
    """The settings of one stage.

    One step reads `batch_size * gradient_accumulation * block_size` tokens, however many processes share them. The
    learning rate rises over `warmup_steps` (None: 20, or all steps of a shorter run) and falls as a cosine to
    `min_lr_ratio` of its peak. Another `lr_scheduler_type` in `trainer` may end elsewhere, without `min_lr_ratio`.

    groups: rows `{"match": regular expression, "learning_rate": ..., "weight_decay": ...}` for the student's parameter
        names. The first row that matches decides; both rates are optional. A learning rate of 0 freezes a parameter.
        Without a matching row, parameters of mixers have `learning_rate`, all others `rest_learning_rate`, and those
        that steer a memory (`hf_memmix.no_weight_decay_names`) have no weight decay.
    window_rate: factor of `learning_rate` in layers that are windows alone, not beside a memory; 0.1 in the bundled
        distill. They begin as the teacher's attention, from which the rate of a new memory takes them too far.
    layers: memory layers that `align` trains, e.g. "0-3,8"; "all" or "" for all of them. Several machines can
        train different layers; `memmix merge` joins them.
    teacher: where the teacher's distribution comes from. "copy": a second model. "shared": a model that uses the
        student's tensors outside the converted attention; they are frozen. "lora": the same, but the student also
        learns corrections of these tensors of rank `lora_rank`. "cache:DIR": the top-k probabilities that
        `memmix cache-teacher` has written; no teacher is in memory.
    lora_mixers: with teacher "lora", freeze the large matrices of the mixers too and learn corrections of them. What
        steers a memory (decays, gates, convolutions, norms) is trained as a whole.
    quantize: with teacher "lora", hold the frozen matrices in "4bit" (NF4 of bitsandbytes) or "8bit" (int8 of
        torchao). Student and teacher both use them. The saved student has the values that these matrices stand for.
    far_weight: `align` adds this factor times the relative error in which a token weighs as much as its attention
        reads from outside a window, so that near tokens, which are the easy part, do not decide alone. It costs one
        more attention of the teacher; 0 is off.
    far_window: tokens of that window; 0 is the window beside the memory (`local_window`).
    chunk_tokens: number of tokens whose logits are in memory at a time.
    bf16: use autocast to bf16 with fp32 weights; "auto": only on a GPU that has bf16.
    cuda_graph: record the forward and backward pass of a step once and repeat it, see `step_graph`; "auto": where it
        can be done, that is on one GPU, without `pack`, `gradient_checkpointing`, `quantize`, `layerdrop` of the
        student and sharding. Other steps, and all if recording fails, run without it.
    compile: compile the layers of student and teacher by torch.compile, which rounds otherwise: a run must be resumed
        as it began. Not with `pack`, `quantize` or sharding.
    pack: no layer mixes tokens of two documents. A teacher whose family ignores packing (GPT-OSS, BioGPT) is refused.
    bos: what begins as the tokenizer begins a text, for a tokenizer that adds BOS. "rows": every row, also one that
        is cut in the middle of a document, because a student that generates always reads BOS first; "documents":
        documents alone.
    loss: the tokens that count: "all", or those that the assistant says in conversations ("answers").
    drills: the share of the rows that are drills of recall: facts in the text that are asked for again, in English,
        see `fact_drills`. Their answers together weigh as much as their row.
    stream: read the data during training instead of loading all tokens first.
    trainer: further TrainingArguments of transformers, by name.
    """

    stage: str = "align"
    steps: int = 200
    batch_size: int = 8
    gradient_accumulation: int = 1
    block_size: int = 512
    learning_rate: float = 1e-3
    rest_learning_rate: float = 1e-5
    window_rate: float = 1.0
    weight_decay: float = 0.0
    groups: list = field(default_factory=list)
    warmup_steps: int | None = None
    min_lr_ratio: float = 0.01
    layers: str = "all"
    teacher: str = "copy"
    lora_rank: int = 16
    lora_mixers: bool = False
    quantize: str = "none"
    far_weight: float = 0.0
    far_window: int = 0
    chunk_tokens: int = 2048
    bf16: str | bool = "auto"
    gradient_checkpointing: bool = False
    cuda_graph: str | bool = "auto"
    compile: bool = False
    pack: bool = False
    bos: str = "rows"
    loss: str = "all"
    drills: float = 0.0
    stream: bool = False
    save_every: int = 0
    seed: int = 0
    trainer: dict = field(default_factory=dict)

    def __post_init__(self):
        check_choice("stage", self.stage)
        if self.warmup_steps is None and isinstance(self.steps, int):
            object.__setattr__(self, "warmup_steps", min(20, self.steps))
        for item in fields(self):
            value, kind = getattr(self, item.name), (float, int) if item.type is float else item.type
            if value is None:
                raise UserError(f"{item.name} is null; give a value, or leave the line out for the default")
            if not isinstance(value, kind) or (isinstance(value, bool) and item.type in NUMBERS):
                hint = "; in YAML write 1.0e-3, as 1e-3 is a text" if item.type is float else ""
                name = getattr(item.type, "__name__", str(item.type))
                raise UserError(f"{item.name} is {value!r}, not of type {name}{hint}")
        for name, (least, largest) in BOUNDS.items():
            if not least <= getattr(self, name) <= largest:
                kind = "at least" if getattr(self, name) < least else "at most"
                limit = least if kind == "at least" else largest
                raise UserError(f"{name} is {getattr(self, name)}; it must be {kind} {limit}")
        if self.warmup_steps > self.steps:
            raise UserError(
                f"warmup_steps is {self.warmup_steps}, but the run has {self.steps} steps and would never reach its"
                f" learning rate; give at most {self.steps}, or more steps"
            )
        _check_rates("the recipe", {name: getattr(self, name) for name in RATES})
        for name in ("bf16", "cuda_graph"):
            if (value := getattr(self, name)) not in ("auto", True, False):
                raise UserError(f'{name} is {value!r}; it must be "auto", true or false')
        if self.teacher not in TEACHERS and not self.cache_dir:
            raise UserError(f"teacher is {self.teacher!r}; it must be {', '.join(TEACHERS)} or cache:DIR")
        if self.teacher != "copy" and self.stage == "align":
            raise UserError(f"teacher is {self.teacher!r}, but align reads the teacher's attention; use copy")
        if self.teacher == "shared" and self.rest_learning_rate:
            raise UserError(
                "teacher is 'shared', so the tensors that it uses cannot be trained, but rest_learning_rate is"
                f" {self.rest_learning_rate:g}; set it to 0.0, or set teacher to lora or copy"
            )
        check_choice("quantize", self.quantize)
        for name, idle in (("lora_rank", 16), ("lora_mixers", False), ("quantize", "none")):
            if (value := getattr(self, name)) != idle and self.teacher != "lora":
                raise UserError(
                    f"{name} is {value!r}, but only a run with LoRA has frozen matrices; set teacher to lora, or leave"
                    f" {name} out"
                )
        for name, idle in (("pack", False), ("quantize", "none")):
            if self.compile and (value := getattr(self, name)) != idle:
                raise UserError(
                    f"compile is true, which does not work with {name}: {value}; set one of them to {idle}"
                )
        if self.far_weight and self.stage != "align":
            raise UserError(f"far_weight is {self.far_weight:g}, but only align compares attentions; leave it out")
        if self.far_window and not self.far_weight:
            raise UserError(f"far_window is {self.far_window}, but far_weight is 0; set far_weight, e.g. to 1.0")
        check_choice("bos", self.bos)
        check_choice("loss", self.loss)
        for name, idle in (("stream", False), ("loss", "all")):
            if self.drills and (value := getattr(self, name)) != idle:
                raise UserError(
                    f"drills is {self.drills:g}, which does not work with {name}: {value}; leave one of them out"
                )
        if self.layers not in ("", "all") and self.stage != "align":
            raise UserError(f"layers is {self.layers!r}, but only align trains a part of the layers")
        for row in self.groups:
            _check_group(row)
        rates = [self.learning_rate] + ([self.rest_learning_rate] if self.stage == "distill" else [])
        if not any([*rates, *(row.get("learning_rate") for row in self.groups)]):
            raise UserError("every learning rate of the recipe is 0; nothing would be trained")

    @property
    def cache_dir(self) -> str | None:
        """The folder of "cache:DIR", or None."""
        return self.teacher.removeprefix("cache:") if self.teacher.startswith("cache:") else None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step reads, over all processes."""
        return self.batch_size * self.gradient_accumulation * self.block_size

    def layer_slice(self, converted: list[int], num_layers: int) -> list[int]:
        """The `converted` layers that the field `layers` names, in a model of `num_layers` layers.

        Raises:
            ValueError: it names no memory layer, or a layer that does not exist.
        """
        if self.layers in ("", "all"):
            return converted
        named = LayerChoice.listed(self.layers, "layers").layers(num_layers)
        chosen = [layer for layer in converted if layer in named]
        if not chosen:
            raise UserError(f"layers is {self.layers!r}, which names no memory layer; memory layers are {converted}")
        return chosen


def check_choice(name: str, value: str) -> None:
    """Raise ValueError if it is none of `CHOICES[name]`."""
    if value not in CHOICES[name]:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(CHOICES[name])}")


def check_tracker_names(names: Iterable[str], option: str) -> None:
    """Raise ValueError unless all are `TRACKERS`, "none" or "all"; `option` is the name of what lists them."""
    if unknown := sorted({*names} - {*TRACKERS, "none", "all"}):
        raise UserError(
            f"{option} is {unknown[0]!r}, which is not a tracker of transformers; give one of {', '.join(TRACKERS)}"
        )


@dataclass(frozen=True)
class Sampling:
    """How a teacher answers prompts.

    Args:
        max_new_tokens: largest number of tokens of an answer.
        temperature: 0 takes the likeliest tokens; None: what the teacher's generation config says.
        top_p: as in `generate()`, and then the teacher samples; None: what its generation config says.
        batch_size: prompts that are answered together.

    Raises:
        ValueError: `top_p` or a seed is given with temperature 0.
    """

    max_new_tokens: int = 512
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0
    batch_size: int = 8

    def __post_init__(self):
        check_temperature(self.temperature, {"top-p": self.top_p, "seed": self.seed or None})


def _check_group(row) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("match"), str):
        raise UserError(f"group {row!r} needs a regular expression under match")
    if unknown := sorted(row.keys() - {"match", "learning_rate", "weight_decay"}):
        raise UserError(f"group {row['match']!r} has {', '.join(unknown)}; it takes learning_rate and weight_decay")
    try:
        re.compile(row["match"])
    except re.error as error:
        raise UserError(f"group {row['match']!r} is not a regular expression: {error}") from None
    _check_rates(f"group {row['match']!r}", {key: value for key, value in row.items() if key != "match"})


def _check_rates(where: str, rates: dict) -> None:
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(
                f"{name} of {where} is {value!r}, not a number; in YAML write 1.0e-3, because 1e-3 is read as text"
            )
        if not 0 <= value < 1:
            raise UserError(f"{name} is {value} in {where}; it must lie in [0, 1)")


def load_recipe(recipe: str | Path, **overrides) -> Recipe:
    """A recipe by its name ("align", "distill", ...) or the path of a YAML file.

    If `steps` alone is overridden by fewer than the recipe's `warmup_steps`, the learning rate rises over all of them.

    Raises ValueError if there is none, if it has unknown or impossible values, or gives one twice, or if another
    `stage` than its own is asked for.
    """
    bundled = resources.files("hf_memmix.training") / "recipes" / f"{recipe}.yaml"
    source = bundled if bundled.is_file() else Path(recipe)
    if not source.is_file():
        names = sorted(p.name.removesuffix(".yaml") for p in bundled.parent.iterdir() if p.name.endswith(".yaml"))
        raise UserError(f"no recipe {str(recipe)!r}; give a YAML file or one of {', '.join(names)}")
    try:
        values = read_yaml(source.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {str(recipe)!r} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"recipe {str(recipe)!r} must be a YAML mapping of Recipe fields")
    known = {f.name for f in fields(Recipe)}
    asked, own = overrides.get("stage"), values.get("stage")
    if asked is not None and own is not None and asked != own:
        raise UserError(f"recipe {str(recipe)!r} is for {own}, not for {asked}; give a recipe of {asked}")
    given = {name: value for name, value in overrides.items() if value is not None}
    values |= shortened_warmup(values, given) | given
    if unknown := sorted(map(str, values.keys() - known)):
        raise UserError(f"recipe {str(recipe)!r}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return Recipe(**values)


def shortened_warmup(recipe: dict, overrides: dict) -> dict:
    """The `warmup_steps` of a recipe that is run for fewer steps; {} if the recipe contradicts itself."""
    warmup, steps, run = recipe.get("warmup_steps"), recipe.get("steps", Recipe.steps), overrides.get("steps")
    if not all(isinstance(value, int) for value in (warmup, steps, run)) or warmup > steps:
        return {}
    return {"warmup_steps": min(warmup, run)}
