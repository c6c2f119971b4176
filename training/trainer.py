"""Student and teacher as one module for the Hugging Face Trainer, and a Trainer whose checkpoints are atomic.

The loss is computed inside `forward`, so one backward serves every parallel wrapper. The teacher is not a registered
child: it is in no state dict, no checkpoint and no optimizer.
"""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_memmix.conversion.convert import load_model
from hf_memmix.conversion.families import attention_module
from hf_memmix.conversion.heads import logits_head
from hf_memmix.conversion.saving import replace_folder
from hf_memmix.conversion.teacher_forcing import converted_layers, run_teacher_forced
from hf_memmix.training.losses import chunked_forward_kl, relative_mse

RUN_FILE = "memmix_run.json"


class Pair(nn.Module):
    """A student that trains and a frozen teacher; `forward(input_ids [B, T])` gives `{"loss": scalar}`."""

    def __init__(self, student: nn.Module, teacher: nn.Module):
        super().__init__()
        self.student = student
        self.config = student.config
        self._teacher = (teacher.eval().requires_grad_(False),)  # a tuple hides it from nn.Module

    @property
    def teacher(self) -> nn.Module:
        return self._teacher[0]

    def _apply(self, fn, *args, **kwargs):
        """Follow `.to(device)`."""
        self.teacher._apply(fn, *args, **kwargs)
        return super()._apply(fn, *args, **kwargs)

    def mixer_parameters(self) -> list[nn.Parameter]:
        """The parameters of all converted layers' mixers."""
        modules = (attention_module(self.student, layer) for layer in converted_layers(self.student))
        return [parameter for module in modules for parameter in module.parameters()]


class AlignPair(Pair):
    """Mean over layers of the relative error of each mixer on the teacher's layer inputs; only mixers train."""

    def __init__(self, student: nn.Module, teacher: nn.Module):
        super().__init__(student, teacher)
        student.requires_grad_(False)
        for parameter in self.mixer_parameters():
            parameter.requires_grad_(True)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        errors: list[Tensor] = []
        run_teacher_forced(
            self.teacher,
            self.student,
            input_ids,
            lambda layer, ours, theirs: errors.append(relative_mse(ours, theirs)),
        )
        return {"loss": torch.stack(errors).mean()}


class DistillPair(Pair):
    """Forward KL of the student's next-token distribution from the teacher's; everything trains."""

    def __init__(self, student: nn.Module, teacher: nn.Module, chunk_tokens: int = 2048):
        super().__init__(student, teacher)
        student.requires_grad_(True)
        self.chunk_tokens = chunk_tokens
        self.heads = (logits_head(student), logits_head(teacher))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        ours = self.student.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        with torch.no_grad():
            theirs = self.teacher.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return {"loss": chunked_forward_kl(ours, theirs, *self.heads, chunk_tokens=self.chunk_tokens)}


class PairTrainer(Trainer):
    """Trainer over a `Pair`: two learning rates, student-only checkpoints that are complete or absent.

    `rest_learning_rate`: of everything that is not a mixer. `identity`: what a run must share with the checkpoint it
    resumes from; it is written beside it. A run that diverges raises ValueError before it writes anything.
    """

    def __init__(self, *args, rest_learning_rate: float, identity: dict, **kwargs):
        self._staging: Path | None = None
        self.rest_learning_rate = rest_learning_rate
        self.identity = identity
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch: divide it when accumulating

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            pair = self.model
            mixers = {id(parameter) for parameter in pair.mixer_parameters()}
            trainable = [parameter for parameter in pair.parameters() if parameter.requires_grad]
            groups = [
                {"params": [p for p in trainable if id(p) in mixers], "lr": self.args.learning_rate},
                {"params": [p for p in trainable if id(p) not in mixers], "lr": self.rest_learning_rate},
            ]
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, pair)
            self.optimizer = kind([group for group in groups if group["params"]], **options)
        return self.optimizer

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise ValueError(self._diverged(f"the loss is {loss.item()}"))
        return loss

    def check_weights(self) -> None:
        """Raise ValueError if a trained weight is not finite: a finite loss may have an infinite gradient."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(parameter).all():
                raise ValueError(self._diverged(f"{name} has NaN or infinite entries"))

    def _diverged(self, what: str) -> str:
        return (
            f"{what} after {self.state.global_step} steps: training diverged and was stopped. Checkpoints in"
            f" {self.args.output_dir} are intact; lower learning_rate (now {self.args.learning_rate:g}) and start in"
            " another folder, from one of them or from the student"
        )

    def _get_output_dir(self, trial=None) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model, trial=None):
        """Write to a hidden folder, flush, rename: a kill at any moment leaves the last checkpoint whole."""
        self.check_weights()
        home = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = home / ".saving"
        if self.is_world_process_zero():
            shutil.rmtree(self._staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                staged = self._staging / name
                (staged / RUN_FILE).write_text(json.dumps(self.identity, indent=1))
                replace_folder(staged, home / name)
                rotate_checkpoints(str(home), self.args.save_total_limit)
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def _save(self, output_dir=None, state_dict=None):
        """The student alone, as a folder that `from_pretrained` loads; its fp32 training weights."""
        self.model.student.save_pretrained(output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        saved = load_model(resume_from_checkpoint, torch.float32)
        self.model.student.load_state_dict(saved.state_dict())
