"""`align` and `distill`: train a converted student against its teacher, on the Hugging Face Trainer and Accelerate.

    align    trains the mixers: relative error per layer, on the inputs of the teacher's layers. It is cheap and
             removes most of the difference.
    distill  trains all parameters: forward KL divergence of the logits, at temperature 1, without cross-entropy. The
             mixers have `learning_rate`, all other parameters `rest_learning_rate`.

Recipes are YAML files in `training/recipes`; every setting can be given as an argument instead. An interrupted run
resumes from its last checkpoint. On a CPU it ends with exactly the weights of an uninterrupted one; on one GPU too,
where its kernels round alike in every step, which those of kept attention do not do in the backward pass.
`accelerate launch` with a file of `training/accelerate` runs the same recipe with the same batches on several GPUs.
"""

import logging
import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_memmix._transformers import tensor_parallel_size
from hf_memmix.conversion.families import attention_module, attention_prefix
from hf_memmix.conversion.far_attention import check_far
from hf_memmix.conversion.limits import check_length, check_vocabularies
from hf_memmix.conversion.loading import check_finite_weights
from hf_memmix.conversion.model_files import check_converted, check_transformer
from hf_memmix.errors import UserError
from hf_memmix.quantization import refuse_quantized
from hf_memmix.training import sharded, teachers
from hf_memmix.training.compiled_layers import check_compile, compiled
from hf_memmix.training.data import StreamedBlocks, TokenBlocks
from hf_memmix.training.groups import freeze_by_rate, refuse_shared
from hf_memmix.training.recipe import Recipe, load_recipe, shortened_warmup
from hf_memmix.training.run_identity import find_checkpoint, identity_of
from hf_memmix.training.run_lock import run_lock
from hf_memmix.training.step_graph import obstacle
from hf_memmix.training.student_teacher import (
    AlignStudentTeacher,
    DistillStudentTeacher,
    StudentTeacher,
    far_windows,
)
from hf_memmix.training.teacher_cache import CachedBlocks
from hf_memmix.training.trainer import PairTrainer
from hf_memmix.training.trainer_arguments import check_packages, training_arguments, uses_bf16
from hf_memmix.training_length import only_window, slow_learners

logger = logging.getLogger(__name__)

__all__ = ["Recipe", "align", "distill", "find_checkpoint", "load_recipe", "train"]


def align(student: nn.Module, teacher: nn.Module, data: TokenBlocks, output_dir: str | Path, **options) -> dict:
    """Train the mixers of `student` (in place) to reproduce the attention they replaced. See `train`."""
    return train(student, teacher, data, output_dir, stage="align", **{"recipe": "align", **options})


def distill(student: nn.Module, teacher: nn.Module, data: TokenBlocks, output_dir: str | Path, **options) -> dict:
    """Train all of `student` (in place) to give the teacher's next-token distribution. See `train`."""
    return train(student, teacher, data, output_dir, stage="distill", **{"recipe": "distill", **options})


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
    """Run one stage. Afterwards `student` has the trained weights in fp32 and is in eval mode. With `teacher: lora` in
    bf16 autocast, the frozen matrices of a bf16 student are bf16 during training and after it, and both models end on
    the CPU.

    Under `accelerate launch` every process calls this function with the same arguments and gets the whole student.

    Args:
        student: a converted model, which is trained in place.
        teacher: the transformer that it was made from. With `teacher: cache:DIR` in the recipe: the teacher's folder,
            which is compared with the cache, or None for no comparison.
        output_dir: folder for `checkpoint-<step>` folders, every `save_every` steps (0: none). Only one process at a
            time may train there.
        recipe: name, path or `Recipe`.
        resume: continue from the last checkpoint in `output_dir`.
        callbacks: replace the library's progress bar.
        overrides: fields of `Recipe`.

    Returns:
        `{"stage", "steps", "tokens", "first_loss", "last_loss", "seconds", "resumed", "log": [{"step", "loss",
        "learning_rate", "tokens"}]}`. If the run was resumed, `seconds` are those since then; all else is of the whole
        run.

    Raises:
        ValueError: data, teacher, recipe and student do not fit together; a weight is not finite; a checkpoint in
            `output_dir` is broken or belongs to another run, or there is one although `resume` is off; another process
            trains there; a checkpoint cannot be written; or training diverges. Earlier checkpoints stay intact.
    """
    recipe = recipe_of(recipe, overrides)
    with run_lock(output_dir):
        return _train(student, teacher, data, Path(output_dir), recipe, resume, callbacks)


def recipe_of(recipe: str | Path | Recipe, overrides: dict) -> Recipe:
    """A recipe with `overrides`. Raises ValueError if their `stage` differs from that of the recipe."""
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, **overrides)
    if (stage := overrides.get("stage", recipe.stage)) != recipe.stage:
        raise UserError(f"the recipe is for {recipe.stage}, not for {stage}; give a recipe of {stage}")
    return replace(recipe, **(shortened_warmup(asdict(recipe), overrides) | overrides)) if overrides else recipe


def _train(student, teacher, data, output_dir: Path, recipe: Recipe, resume: bool, callbacks) -> dict:
    if recipe.cache_dir:
        data, teacher = CachedBlocks(data, recipe.cache_dir, teacher), None
    check_packages(recipe)
    check_fit(student, teacher, data, recipe)
    arguments = training_arguments(recipe, output_dir)
    identity = identity_of(student, teacher, data, recipe)
    checkpoint = find_checkpoint(output_dir, identity) if resume else None
    if not resume and output_dir.is_dir() and (last := get_last_checkpoint(str(output_dir))):
        raise UserError(
            f"{last} belongs to an earlier run, but resume is off, so the two would be mixed; remove it, or give"
            " another output folder"
        )

    pair = make_pair(in_training_dtype(student, recipe).train(), teacher, recipe, arguments.device)
    try:
        parameter_rates = freeze_by_rate(student, recipe)
        if teacher is not None:
            refuse_shared(student, teacher)
        trainer = PairTrainer(
            model=pair,
            args=arguments,
            train_dataset=data,
            parameter_rates=parameter_rates,
            identity=identity,
            tokens_per_step=recipe.tokens_per_step,
            callbacks=callbacks,
        )
        if callbacks:
            for default in (ProgressCallback, PrinterCallback):
                trainer.remove_callback(default)
        shards = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        check_compile(recipe, arguments.device, shards)
        if record_steps(recipe, arguments.device, shards, getattr(student.config, "layerdrop", 0.0)):
            pair.record_steps(recipe.gradient_accumulation)
        with compiled(pair.modules_to_compile()) if recipe.compile else nullcontext():
            seconds = trainer.run(checkpoint)
        if trainer.is_deepspeed_enabled or sharded.is_sharded(pair):
            sharded.unshard_student(pair)
        elif recipe.teacher == "lora":  # a GPU that holds the frozen weights may not hold the corrected ones as well
            student.cpu(), teacher.cpu()
        else:
            student.to(arguments.device)
    finally:
        pair.forget_steps()
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
        "resumed": checkpoint is not None,
        "log": log,
    }


def record_steps(recipe: Recipe, device: torch.device, sharded: bool = False, layerdrop: float = 0.0) -> bool:
    """Whether a run records its steps as a CUDA graph, see `obstacle`. Raises ValueError if it should and cannot."""
    reason = obstacle(recipe, device, sharded, layerdrop)
    if recipe.cuda_graph is True and reason is not None:
        raise UserError(f"cuda_graph is true, but the steps of this run cannot be recorded: {reason}; set it to auto")
    if device.type == "cuda" and (reason or not recipe.cuda_graph):
        logger.info("steps run without a CUDA graph: %s", reason or "cuda_graph is false")
    return reason is None and bool(recipe.cuda_graph)


def in_training_dtype(student: nn.Module, recipe: Recipe) -> nn.Module:
    """The student in fp32, in place. With LoRA in autocast, what is frozen and stored in bf16 stays in bf16."""
    if not (recipe.teacher == "lora" and uses_bf16(recipe) and student.dtype == torch.bfloat16):
        return student.float()
    corrected = set(teachers.lora_names(student, recipe.lora_mixers))
    for layer in student.config.memory_layers:
        mixer = attention_module(student, layer)
        for name, module in mixer.named_modules(prefix=attention_prefix(student, layer)):
            if name not in corrected:
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.float()
    return student


def make_pair(
    student: nn.Module, teacher: nn.Module | None, recipe: Recipe, device: torch.device | None = None
) -> StudentTeacher:
    """The module of student and teacher that a stage trains. Raises ValueError if weights are sharded and shared.

    device: where it will be trained; matrices that the recipe quantises go there already.
    """
    bf16 = uses_bf16(recipe)
    student.requires_grad_(True)
    if recipe.stage == "align":
        layers = recipe.layer_slice(student.config.memory_layers, student.config.num_hidden_layers)
        far = {"far_weight": recipe.far_weight, "far_window": recipe.far_window}
        return AlignStudentTeacher(student, teacher, layers, bf16, recipe.gradient_checkpointing, **far)
    if recipe.teacher in ("shared", "lora"):
        if sharding := os.environ.get("ACCELERATE_USE_FSDP") or os.environ.get("ACCELERATE_USE_DEEPSPEED"):
            raise UserError(
                f"teacher is {recipe.teacher!r}, but sharded weights cannot be shared with it ({sharding=}); use"
                " teacher: copy or cache:DIR, or launch without FSDP and DeepSpeed"
            )
        teachers.share_weights(student, teacher)
        if recipe.quantize != "none":
            compute = torch.bfloat16 if bf16 else torch.float32
            teachers.quantize_frozen(student, teacher, recipe.quantize, compute, recipe.lora_mixers, device)
        if recipe.teacher == "lora":
            teachers.add_lora(student, recipe.lora_rank, recipe.seed, recipe.lora_mixers)
    if recipe.gradient_checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    return DistillStudentTeacher(student, teacher, recipe.chunk_tokens, bf16)


def check_fit(student: nn.Module, teacher: nn.Module | None, data, recipe: Recipe) -> None:
    check_converted(student.config.to_dict())
    refuse_quantized(student, "the student", "give the original student, and set quantize in the recipe")
    if data.block_size != recipe.block_size:
        raise UserError(
            f"data has blocks of {data.block_size} tokens, but block_size of the recipe is {recipe.block_size}; give"
            " data with blocks of this size"
        )
    if data.loss != recipe.loss:
        raise UserError(
            f"the data count {data.loss} tokens, but loss of the recipe is {recipe.loss}; give one of them"
        )
    if (share := data.drills) != recipe.drills:
        raise UserError(
            f"the recipe says that {recipe.drills:g} of the rows are drills, and in the data {share:g} are; make them"
            f" by with_drills(data, tokenizer, {recipe.drills:g}), or set drills to {share:g}"
        )
    workers = recipe.trainer.get("dataloader_num_workers", 0)
    if isinstance(data, StreamedBlocks) and workers > 1:
        raise UserError(
            f"trainer sets dataloader_num_workers to {workers}, but the data are read as a stream, which every worker"
            " would read as a whole; set it to 0 or 1"
        )
    rows = recipe.tokens_per_step // recipe.block_size
    if not isinstance(data, StreamedBlocks) and len(data) < rows:
        raise UserError(
            f"the data are {len(data)} rows of {recipe.block_size} tokens, one step reads {rows} (batch_size times"
            " gradient_accumulation); give more text, or a smaller batch or block"
        )
    if not student.config.memory_layers:
        raise UserError("the student has no memory layer to train; convert it with fewer kept layers")
    _check_lengths(student, data)
    if recipe.far_weight:
        _check_far(student, teacher, recipe)
    check_finite_weights(student, "the student")
    if teacher is not None:
        check_transformer(teacher.config.to_dict())
        check_finite_weights(teacher, "the teacher")
        check_vocabularies(student, teacher)
        check_length(teacher, "teacher", recipe.block_size, "block_size", "give a smaller block")
    data.check_vocabulary(student.config.vocab_size)


def _check_far(student: nn.Module, teacher: nn.Module, recipe: Recipe) -> None:
    layers = recipe.layer_slice(student.config.memory_layers, student.config.num_hidden_layers)
    read = min(near.tokens + near.first for near in far_windows(student, layers, recipe.far_window).values())
    if read >= recipe.block_size:
        raise UserError(
            f"far_weight is {recipe.far_weight:g}, but no token of a block of {recipe.block_size} lies outside a"
            f" window of {read}; give a larger block_size or a smaller far_window"
        )
    if tensor_parallel_size(teacher.config) > 1:
        raise UserError("far_weight needs all heads of the teacher, which tensor parallelism divides; set it to 0")
    for layer in layers:
        check_far(attention_module(teacher, layer))


def _check_lengths(student: nn.Module, data) -> None:
    """Raise ValueError if a mixer learns nothing from rows or packed documents that short: its loss would not move.

    Logs a warning if that is true of most tokens, or if windows read whole rows: another teacher can still be learned.
    """
    window = only_window(student.config)
    if window is not None and data.block_size <= window:
        logger.warning(
            "block_size is %d, and the windows of this student read %d tokens, so they compute what the attention"
            " does and have nothing to learn; give a larger block_size, or convert with a smaller window",
            data.block_size,
            window,
        )
    lengths = data.document_lengths()
    for name, mixer in {mixer.name: mixer for mixer in slow_learners(student)}.items():
        # one less than for a loss of the next token: both stages also train the last token of a row
        least = mixer.minimum_training_length(mixer.options) - 1
        if data.block_size < least:
            raise UserError(
                f"block_size is {data.block_size}, but the mixer {name} of this student learns only from blocks of at"
                f" least {least} tokens; give a larger block_size"
            )
        if (longest := int(lengths.max())) < least:
            raise UserError(
                f"the longest packed document has {longest} tokens, but the mixer {name} of this student learns only"
                f" from documents of at least {least} tokens; give longer documents, or set pack: false"
            )
        short = int(lengths[lengths < least].sum()) / int(lengths.sum())
        if short > 0.5:
            logger.warning(
                "%.0f %% of the tokens are in packed documents of fewer than %d tokens, from which the mixer %s"
                " learns nothing; give longer documents, or set pack: false",
                100 * short,
                least,
                name,
            )
