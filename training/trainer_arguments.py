"""The arguments of transformers' Trainer for a recipe; its field `trainer` may set some of them, which is checked."""

import importlib.util
import math
import os
import typing
from pathlib import Path

import torch
from huggingface_hub.dataclasses import type_validator
from transformers import TrainingArguments, get_scheduler

from hf_memmix import launch
from hf_memmix.errors import UserError
from hf_memmix.training._trainer_hooks import OneGPUArguments, get_available_reporting_integrations
from hf_memmix.training.quantized import check_installed
from hf_memmix.training.recipe import Recipe, check_tracker_names

# arguments that `trainer` must not set, and the field of the recipe or argument of `train` that sets them
DECIDED_ELSEWHERE = {
    "output_dir": "the output folder of the command",
    "resume_from_checkpoint": "resume",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "warmup_steps": "warmup_steps",
    "bf16": "bf16",
    "fp16": "bf16",
    "parallelism_config": "the launch file of accelerate",
    "torch_compile": "compile",
    "torch_compile_backend": "compile",
    "torch_compile_mode": "compile",
    "gradient_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing_kwargs": "gradient_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing",
    "save_strategy": "save_every",
    "save_steps": "save_every",
    "save_only_model": "save_every",
    "seed": "seed",
    "label_smoothing_factor": "the loss of the stage",  # 0 means nothing
    "neftune_noise_alpha": "the loss of the stage",
    "logging_strategy": "logging_steps",
    "logging_first_step": "logging_steps",
    "dataloader_drop_last": "the kind of the data",
    "remove_unused_columns": "the kind of the data",
}
# optimizers by a part of their names, and the package that computes them; the first part that a name contains counts
OPTIMIZER_PACKAGES = {
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "bnb": "bitsandbytes",
    "8bit": "bitsandbytes",
    "paged": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "lion": "bitsandbytes",
}
# the schedules of learning rates that end at a part of the peak
SCHEDULE, ENDS_AT_A_PART = "cosine_with_min_lr", ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
# these choose their own parameters or need the gradients while they are made, so rates by group have no effect
OWN_GROUPS = ("galore", "apollo", "lomo")
# fields of accelerate's ParallelismConfig that split sequences: their names in words, and what else can be done
SPLIT_SEQUENCES = {
    "cp_size": ("context parallelism", ", or fine-tune with the Trainer"),
    "sp_size": ("sequence parallelism", ""),
}
POSITIVE = ("logging_steps", "save_total_limit")
BELOW_ONE = ("adam_beta1", "adam_beta2")


def training_arguments(recipe: Recipe, output_dir: str | Path) -> TrainingArguments:
    """The arguments of one process of a run.

    Raises:
        ValueError: the number of processes does not divide the batch size, the launch file splits sequences, or
            `trainer` has an unknown name, a name in `DECIDED_ELSEWHERE`, or an impossible value.
    """
    _check_launch()
    processes = launch.processes()
    if recipe.batch_size % processes:
        raise UserError(
            f"batch_size is {recipe.batch_size}, which {processes} processes cannot share; give a multiple of them"
        )
    values = {
        "output_dir": str(output_dir),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.batch_size // processes,
        "gradient_accumulation_steps": recipe.gradient_accumulation,
        "learning_rate": recipe.learning_rate,
        **_schedule(recipe),
        "warmup_steps": recipe.warmup_steps,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "save_strategy": "steps" if recipe.save_every else "no",
        "save_steps": recipe.save_every or 500,
        "save_total_limit": 2,
        "logging_steps": max(1, recipe.steps // 50),
        "seed": recipe.seed,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # it reads every loss at once, which waits for the GPU; ours are checked
        "report_to": "none",
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
        "dataloader_drop_last": True,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    _check(recipe.trainer)
    check_schedule(recipe)
    if _offloads(recipe.trainer) and torch.cuda.is_available():
        values["ddp_backend"] = "cuda:nccl,cpu:gloo"  # NCCL cannot sum the norms of gradients on the CPU
    try:
        arguments = OneGPUArguments(**(values | recipe.trainer))
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"trainer of the recipe: {str(error).strip().splitlines()[0]}") from None
    check_trackers(arguments.report_to)
    return arguments


def _schedule(recipe: Recipe) -> dict:
    """The fields `lr_scheduler_type` and `lr_scheduler_kwargs` of a recipe's arguments."""
    name = recipe.trainer.get("lr_scheduler_type", SCHEDULE)
    own = {"min_lr_rate": recipe.min_lr_ratio} if name in ENDS_AT_A_PART else None
    return {"lr_scheduler_type": name, "lr_scheduler_kwargs": recipe.trainer.get("lr_scheduler_kwargs", own)}


def check_schedule(recipe: Recipe) -> None:
    """Raise ValueError if the schedule of the learning rate does not exist, or lacks options, or has other ones.

    It loads nothing, so a command can call it first.
    """
    chosen = _schedule(recipe)
    name, options = chosen["lr_scheduler_type"], chosen["lr_scheduler_kwargs"]
    if not isinstance(name, str) or not isinstance(options, dict | None):
        return  # the library checks these
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    try:
        get_scheduler(name, optimizer, recipe.warmup_steps, recipe.steps, options)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"trainer sets lr_scheduler_type to {name!r} and its lr_scheduler_kwargs to {options}, with which there is"
            f" no schedule: {error}"
        ) from None


def uses_bf16(recipe: Recipe) -> bool:
    """Whether a run computes in autocast to bf16; with "auto", on a GPU that multiplies bf16, as from Ampere on."""
    if recipe.bf16 != "auto":
        return bool(recipe.bf16)
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def check_packages(recipe: Recipe) -> None:
    """Raise ValueError if the optimizer or the quantisation of a recipe cannot be used, or its package is missing.

    It loads nothing, so a command can call it first.
    """
    check_installed(recipe.quantize)
    optimizer = str(recipe.trainer.get("optim", "adamw_torch"))
    found = [(part, package) for part, package in OPTIMIZER_PACKAGES.items() if part in optimizer]
    if not found:
        return
    part, package = found[0]
    if part in OWN_GROUPS:
        raise UserError(
            f"trainer sets optim to {optimizer!r}, which chooses its own parameters, so the rates of the recipe would"
            " have no effect; give adamw_torch, adafactor, adamw_8bit or paged_adamw_8bit"
        )
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"trainer sets optim to {optimizer!r}, which {package} computes, and it is missing; pip install {package},"
            " or give adamw_torch or adafactor"
        )


def _offloads(given: dict) -> bool:
    """Whether `trainer` asks FSDP to keep parameters, gradients and the optimizer's states in the CPU's memory."""
    kind, config = given.get("fsdp") or "", given.get("fsdp_config") or {}
    named = isinstance(kind, str) and "offload" in kind.split()
    return named or bool(kind) and isinstance(config, dict) and bool(config.get("cpu_offload"))


def _check_launch() -> None:
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise UserError(
            f"ACCELERATE_DYNAMO_BACKEND is {backend!r}, which would compile student and teacher as one module; launch"
            " with --dynamo_backend no and set compile: true in the recipe"
        )
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return
    for field, (kind, remedy) in SPLIT_SEQUENCES.items():
        parts = int(os.environ.get(f"PARALLELISM_CONFIG_{field.upper()}", "1"))
        if parts > 1:
            raise UserError(
                f"the launch file asks for {kind} ({field} {parts}), in which align and distill cannot train;"
                f" take training/accelerate/fsdp2.yaml{remedy}"
            )


def _check(given: dict) -> None:
    types = typing.get_type_hints(TrainingArguments)
    if unknown := sorted(str(name) for name in given if name not in types):
        raise UserError(f"trainer names {', '.join(unknown)}, which transformers.TrainingArguments does not have")
    for name, value in given.items():
        if name in DECIDED_ELSEWHERE and not (name == "label_smoothing_factor" and value == 0):
            raise UserError(f"trainer sets {name}, which {DECIDED_ELSEWHERE[name]} decides; remove it from trainer")
        try:
            # transformers prefers a boolean for fsdp, which its type does not name
            if not (types[name] is float and type(value) is int or name == "fsdp" and type(value) is bool):
                type_validator(name, value, types[name])
        except TypeError:
            kind = getattr(types[name], "__name__", types[name])
            raise UserError(f"trainer sets {name} to {value!r}, which is not of type {kind}") from None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_number(name, value)


def _check_number(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UserError(f"trainer sets {name} to {value!r}; it must be finite and at least 0")
    if name in POSITIVE and value == 0:
        raise UserError(f"trainer sets {name} to {value!r}; it must be more than 0")
    if name in BELOW_ONE and value >= 1:
        raise UserError(f"trainer sets {name} to {value!r}; it must be below 1")


def check_trackers(names: list[str], option: str = "report_to") -> None:
    """Raise ValueError if transformers does not support a tracker, or its package is not installed.

    option: name of the option that lists the trackers, for error messages.
    """
    check_tracker_names(names, option)
    if missing := sorted({*names} - {"none", "all"} - set(get_available_reporting_integrations())):
        raise UserError(f"{option} is {missing[0]!r}, which is not installed; pip install {missing[0]}")
