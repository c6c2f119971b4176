"""`align` and `distill`: train a converted student against its teacher, on the Hugging Face Trainer and Accelerate.

    align    mixers only, teacher-forced per-layer relative error      (cheap: removes most of the gap)
    distill  everything, forward KL of the logits, T = 1, no CE        (mixers at `learning_rate`, the rest at
                                                                        `rest_learning_rate`)

Recipes are YAML files in `training/recipes`; every number can be given as an argument instead. An interrupted run
resumes from its last checkpoint and ends with exactly the weights of an uninterrupted one (on the same device).
`accelerate launch` with a file of `training/accelerate` runs the same recipe on several GPUs, with the same batches.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_memmix.conversion.limits import check_length, check_vocabularies
from hf_memmix.conversion.teacher_forcing import converted_layers
from hf_memmix.training import sharded, teachers
from hf_memmix.training.data import StreamedBlocks, TokenBlocks
from hf_memmix.training.groups import freeze_by_rate, refuse_shared
from hf_memmix.training.pairs import AlignPair, DistillPair, Pair
from hf_memmix.training.recipe import Recipe, load_recipe
from hf_memmix.training.teacher_cache import CachedBlocks
from hf_memmix.training.trainer import RUN_FILE, PairTrainer

__all__ = ["Recipe", "align", "distill", "find_checkpoint", "load_recipe", "train"]

# fields of a recipe that do not change what a run computes
FREE = ("save_every", "trainer", "chunk_tokens", "gradient_checkpointing")


def align(student: nn.Module, teacher: nn.Module, data: TokenBlocks, output_dir: str | Path, **options) -> dict:
    """Train the mixers of `student` (in place) to reproduce the attention they replaced. See `train`."""
    return train(student, teacher, data, output_dir, **{"recipe": "align", **options})


def distill(student: nn.Module, teacher: nn.Module, data: TokenBlocks, output_dir: str | Path, **options) -> dict:
    """Train all of `student` (in place) to give the teacher's next-token distribution. See `train`."""
    return train(student, teacher, data, output_dir, **{"recipe": "distill", **options})


def train(
    student: nn.Module,
    teacher: nn.Module | str | Path | None,
    data: TokenBlocks | StreamedBlocks,
    output_dir: str | Path,
    *,
    recipe: str | Path | Recipe,
    resume: bool = True,
    callbacks: list[TrainerCallback] | None = None,
    **overrides,
) -> dict:
    """Run one stage; `student` holds the trained weights (fp32) afterwards, and is back in eval mode.

    `output_dir` receives `checkpoint-<step>` folders every `save_every` steps (0: none); with `resume` the last one
    there is continued, and is refused if data, recipe or converted layers differ. `callbacks` take the place of the
    library's progress bar. `overrides`: fields of `Recipe`. Under `accelerate launch` every process calls this with
    the same arguments, and every process has the whole student afterwards. Returns `{"stage", "steps", "tokens",
    "first_loss", "last_loss", "seconds", "log": [{"step", "loss", "learning_rate", "tokens"}]}`.

    With `teacher: cache:DIR` in the recipe, `teacher` is only compared with the cache's: its folder, or None for no
    comparison.

    Raises:
        ValueError: data, teacher, recipe and student do not fit, a checkpoint in `output_dir` is broken or of another
            run (with `resume` off: there is one), it cannot be written, or training diverges; checkpoints are intact
            then.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, **overrides)
    elif overrides:
        recipe = replace(recipe, **overrides)
    if recipe.cache_dir:
        data, teacher = CachedBlocks(data, recipe.cache_dir, teacher), None
    _check_fit(student, teacher, data, recipe)
    identity = {
        "recipe": {k: v for k, v in asdict(recipe).items() if k not in FREE},
        "data": data.fingerprint(),
        "mixer_types": list(student.config.mixer_types),
    }
    checkpoint = find_checkpoint(output_dir, identity) if resume else None
    if not resume and Path(output_dir).is_dir() and (last := get_last_checkpoint(str(output_dir))):
        raise ValueError(f"{last} is of an earlier run, which resume=False would mix with this one; remove it first")

    arguments = _training_arguments(recipe, output_dir)
    pair = make_pair(student.float().train(), teacher, recipe)
    try:
        rates = freeze_by_rate(student, recipe)
        if teacher is not None:
            refuse_shared(student, teacher)
        trainer = PairTrainer(
            model=pair,
            args=arguments,
            train_dataset=data,
            rates=rates,
            identity=identity,
            tokens_per_step=recipe.tokens_per_step,
            callbacks=callbacks,
        )
        if callbacks:
            for default in (ProgressCallback, PrinterCallback):
                trainer.remove_callback(default)
        seconds = trainer.run(checkpoint)
        if trainer.is_deepspeed_enabled or sharded.is_sharded(pair):
            sharded.unshard_student(pair)
        else:
            student.to(arguments.device)
    finally:
        if recipe.gradient_checkpointing:
            student.gradient_checkpointing_disable()
        teachers.merge_lora(student)
        if recipe.teacher in ("shared", "lora"):
            teachers.unshare_weights(student, teacher)
        student.eval().requires_grad_(True)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    log = [{name: entry[name] for name in ("step", "loss", "learning_rate", "tokens")} for entry in log]
    return {
        "stage": recipe.stage,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.global_step * recipe.tokens_per_step,
        "first_loss": log[0]["loss"],
        "last_loss": log[-1]["loss"],
        "seconds": round(seconds, 2),
        "log": log,
    }


def make_pair(student: nn.Module, teacher: nn.Module | None, recipe: Recipe) -> Pair:
    """The module that a stage trains."""
    bf16 = torch.cuda.is_available() if recipe.bf16 == "auto" else recipe.bf16
    student.requires_grad_(True)
    if recipe.stage == "align":
        layers = recipe.layer_slice(converted_layers(student))
        return AlignPair(student, teacher, layers, bf16, recipe.gradient_checkpointing)
    if recipe.teacher in ("shared", "lora"):
        if sharding := os.environ.get("ACCELERATE_USE_FSDP") or os.environ.get("ACCELERATE_USE_DEEPSPEED"):
            raise ValueError(
                f"teacher is {recipe.teacher!r}, but sharded weights cannot be shared with it ({sharding=}); use"
                " teacher: copy or cache:DIR, or launch without FSDP and DeepSpeed"
            )
        teachers.share_weights(student, teacher)
        if recipe.teacher == "lora":
            teachers.add_lora(student, recipe.lora_rank, recipe.seed)
    if recipe.gradient_checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    return DistillPair(student, teacher, recipe.chunk_tokens, bf16)


def _check_fit(student: nn.Module, teacher: nn.Module | None, data, recipe: Recipe) -> None:
    if data.block_size != recipe.block_size:
        raise ValueError(f"data has blocks of {data.block_size} tokens, the recipe asks for {recipe.block_size}")
    if not converted_layers(student):
        raise ValueError("the student has no converted layer to train; convert it with fewer kept layers")
    if teacher is not None:
        check_vocabularies(student, teacher)
        check_length(teacher, "teacher", recipe.block_size, "block_size", "give a smaller block")
    data.check_vocabulary(student.config.vocab_size)


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
    different = "; ".join(_differences(saved, identity))
    if different:
        raise ValueError(
            f"{last} is of another run ({different}); begin anew with resume off, or give another output folder"
        )
    return last


def _differences(saved: dict, now: dict, within: str = "") -> Iterator[str]:
    """What two runs' identities differ in, field by field of the recipe."""
    for key, value in now.items():
        old = saved.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            yield from _differences(old, value, f"{key}.")
        elif old != value:
            yield f"{within}{key} was {old}, is {value}"


def _training_arguments(recipe: Recipe, output_dir: str | Path) -> TrainingArguments:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if recipe.batch_size % processes:
        raise ValueError(
            f"batch_size is {recipe.batch_size}, which {processes} processes cannot share; give a multiple of them"
        )
    values = {
        "output_dir": str(output_dir),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.batch_size // processes,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": recipe.min_lr_ratio},
        "warmup_steps": recipe.warmup_steps,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "save_strategy": "steps" if recipe.save_every else "no",
        "save_steps": recipe.save_every or 500,
        "save_total_limit": 2,
        "logging_steps": max(1, recipe.steps // 50),
        "seed": recipe.seed,
        "logging_first_step": True,
        "report_to": "none",
        "ddp_find_unused_parameters": False,
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
