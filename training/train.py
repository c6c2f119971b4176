"""`align` and `distill`: train a converted student against its teacher, on the Hugging Face Trainer and Accelerate.

    align    mixers only, teacher-forced per-layer relative error      (cheap: removes most of the gap)
    distill  everything, forward KL of the logits, T = 1, no CE        (mixers at `learning_rate`, the rest at
                                                                        `rest_learning_rate`)

Recipes are YAML files in `training/recipes`; every number can be given as an argument instead. An interrupted run
resumes from its last checkpoint and ends with exactly the weights of an uninterrupted one (on the same device).
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path

import torch
import yaml
from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_memmix.conversion.teacher_forcing import converted_layers
from hf_memmix.training.data import TokenBlocks
from hf_memmix.training.trainer import RUN_FILE, AlignPair, DistillPair, PairTrainer

STAGES = {"align": AlignPair, "distill": DistillPair}


@dataclass(frozen=True)
class Recipe:
    """The numbers of one stage. `trainer` takes further TrainingArguments of transformers by name.

    One step reads `batch_size * gradient_accumulation * block_size` tokens. The learning rate rises over
    `warmup_steps` and falls as a cosine to `min_lr_ratio` of its peak.
    """

    stage: str = "align"
    steps: int = 200
    batch_size: int = 8
    gradient_accumulation: int = 1
    block_size: int = 512
    learning_rate: float = 1e-3
    rest_learning_rate: float = 1e-5
    warmup_steps: int = 20
    min_lr_ratio: float = 0.01
    save_every: int = 0
    seed: int = 0
    trainer: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.stage not in STAGES:
            raise ValueError(f"stage is {self.stage!r}; it must be one of {', '.join(STAGES)}")
        for item in fields(self):
            value, kind = getattr(self, item.name), (float, int) if item.type is float else item.type
            if not isinstance(value, kind) or isinstance(value, bool):
                hint = "; in YAML write 1.0e-3, as 1e-3 is a text" if item.type is float else ""
                raise ValueError(f"{item.name} is {value!r}, not of type {item.type.__name__}{hint}")
        for name in ("steps", "batch_size", "gradient_accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "rest_learning_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1)")


def load_recipe(recipe: str | Path, **overrides) -> Recipe:
    """A recipe by name ("align", "distill", ...) or YAML path, with `overrides` on top (None means: leave it)."""
    bundled = resources.files("hf_memmix.training") / "recipes" / f"{recipe}.yaml"
    source = bundled if bundled.is_file() else Path(recipe)
    if not source.is_file():
        names = sorted(p.name.removesuffix(".yaml") for p in bundled.parent.iterdir() if p.name.endswith(".yaml"))
        raise ValueError(f"no recipe {str(recipe)!r}; give a YAML file or one of {', '.join(names)}")
    try:
        values = yaml.safe_load(source.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {str(recipe)!r} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {str(recipe)!r} must be a YAML mapping of Recipe fields")
    known = {f.name for f in fields(Recipe)}
    values |= {name: value for name, value in overrides.items() if value is not None}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"recipe {str(recipe)!r}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return Recipe(**values)


def align(student: nn.Module, teacher: nn.Module, data: TokenBlocks, output_dir: str | Path, **options) -> dict:
    """Train the mixers of `student` (in place) to reproduce the attention they replaced. See `train`."""
    return train(student, teacher, data, output_dir, **{"recipe": "align", **options})


def distill(student: nn.Module, teacher: nn.Module, data: TokenBlocks, output_dir: str | Path, **options) -> dict:
    """Train all of `student` (in place) to give the teacher's next-token distribution. See `train`."""
    return train(student, teacher, data, output_dir, **{"recipe": "distill", **options})


def train(
    student: nn.Module,
    teacher: nn.Module,
    data: TokenBlocks,
    output_dir: str | Path,
    *,
    recipe: str | Path | Recipe,
    resume: bool = True,
    callbacks: list[TrainerCallback] | None = None,
    **overrides,
) -> dict:
    """Run one stage; `student` holds the trained weights (fp32) afterwards, and is back in eval mode.

    `output_dir` receives `checkpoint-<step>` folders every `save_every` steps (0: none); with `resume` the last one
    there is continued, and is refused if data, recipe or converted layers differ. On a GPU the forward runs in bf16
    autocast over fp32 weights. `callbacks` take the place of the library's progress bar. `overrides`: fields of
    `Recipe`. Returns
    `{"stage", "steps", "tokens", "first_loss", "last_loss", "seconds", "log": [{"step", "loss", "learning_rate"}]}`.

    Raises:
        ValueError: data, teacher, recipe and student do not fit, a checkpoint in `output_dir` is broken or of another
            run (with `resume` off: there is one), or training diverges; checkpoints are intact then.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, **overrides)
    elif overrides:
        recipe = replace(recipe, **overrides)
    if data.blocks.shape[1] != recipe.block_size:
        raise ValueError(f"data has blocks of {data.blocks.shape[1]} tokens, the recipe asks for {recipe.block_size}")
    if not converted_layers(student):
        raise ValueError("the student has no converted layer to train; convert it with fewer kept layers")
    if int(data.blocks.max()) >= student.config.vocab_size:
        raise ValueError(
            f"token {int(data.blocks.max())} is outside the vocabulary of {student.config.vocab_size}; "
            "use the teacher's own tokenizer"
        )
    identity = {
        "recipe": {k: v for k, v in asdict(recipe).items() if k not in ("save_every", "trainer")},
        "data": data.fingerprint(),
        "mixer_types": list(student.config.mixer_types),
    }
    checkpoint = find_checkpoint(output_dir, identity) if resume else None
    if not resume and Path(output_dir).is_dir() and (last := get_last_checkpoint(str(output_dir))):
        raise ValueError(f"{last} is of an earlier run, which resume=False would mix with this one; remove it first")

    pair = STAGES[recipe.stage](student.float().train(), teacher)
    trainer = PairTrainer(
        model=pair,
        args=_training_arguments(recipe, output_dir),
        train_dataset=data,
        rest_learning_rate=recipe.rest_learning_rate,
        identity=identity,
        callbacks=callbacks,
    )
    if callbacks:
        for default in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(default)
    try:
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.check_weights()
    finally:
        student.eval().requires_grad_(True)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    log = [{name: entry[name] for name in ("step", "loss", "learning_rate")} for entry in log]
    return {
        "stage": recipe.stage,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * recipe.batch_size * recipe.gradient_accumulation * recipe.block_size,
        "first_loss": log[0]["loss"] if log else result.training_loss,
        "last_loss": log[-1]["loss"] if log else result.training_loss,
        "seconds": round(result.metrics["train_runtime"], 2),
        "log": log,
    }


def find_checkpoint(output_dir: str | Path, identity: dict) -> str | None:
    """The last checkpoint of `output_dir`, or None. Raises ValueError if it belongs to another run or is broken."""
    if not Path(output_dir).is_dir():
        return None
    last = get_last_checkpoint(str(output_dir))
    if last is None:
        return None
    try:
        saved = json.loads((Path(last) / RUN_FILE).read_text())
    except (OSError, ValueError):
        raise ValueError(f"{last} has no readable {RUN_FILE}; remove it, or start with resume off elsewhere") from None
    different = [
        f"{key} was {saved.get(key)}, is {value}" for key, value in identity.items() if saved.get(key) != value
    ]
    if different:
        raise ValueError(f"{last} is of another run ({'; '.join(different)}); use another folder or remove it")
    return last


def _training_arguments(recipe: Recipe, output_dir: str | Path) -> TrainingArguments:
    values = {
        "output_dir": str(output_dir),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": recipe.min_lr_ratio},
        "warmup_steps": recipe.warmup_steps,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": torch.cuda.is_available(),
        "save_strategy": "steps" if recipe.save_every else "no",
        "save_steps": recipe.save_every or 500,
        "save_total_limit": 2,
        "logging_steps": max(1, recipe.steps // 50),
        "seed": recipe.seed,
        "report_to": "none",
        "remove_unused_columns": False,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    if unknown := sorted(recipe.trainer.keys() - {f.name for f in fields(TrainingArguments)}):
        raise ValueError(f"trainer names {', '.join(unknown)}, which transformers.TrainingArguments does not have")
    arguments = TrainingArguments(**(values | recipe.trainer))
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # several GPUs need a launcher (accelerate launch); nn.DataParallel cannot split a pair
    return arguments
