"""The Hugging Face Trainer for a `StudentTeacher`: learning rates by group, counted tokens, atomic checkpoints."""

import math
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import RandomSampler
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_memmix.conversion.convert import load_model
from hf_memmix.conversion.saving import explain_write_errors, replace_folder
from hf_memmix.errors import UserError
from hf_memmix.training import sharded
from hf_memmix.training._trainer_hooks import TrainerHooks, whole_models
from hf_memmix.training.groups import optimizer_groups
from hf_memmix.training.losses import mean_over_processes
from hf_memmix.training.run_identity import write_run_file
from hf_memmix.training.teachers import lora_layers

STAGING = ".saving"
LORA_FILE = "memmix_lora.safetensors"


class _LogTheLastStep(TrainerCallback):
    """Log the last step, even if `logging_steps` does not divide the number of steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= state.global_step >= state.max_steps


class _Arriving:
    """A scalar on its way from a GPU to the CPU."""

    def __init__(self, value: torch.Tensor):
        self._value = value.detach().to("cpu", non_blocking=value.is_cuda)  # else nothing tells its arrival
        self._arrival = torch.cuda.Event() if value.is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    def item(self) -> float:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._value.item()


class PairTrainer(TrainerHooks):
    """Trainer for a `StudentTeacher`, with `accelerate launch` on one process, DDP, FSDP2 or ZeRO-3.

    Args:
        parameter_rates: learning rate and weight decay by the student's parameter names, see `groups.parameter_rates`.
        identity: see `run_identity.identity_of`; it is written into every checkpoint.
        tokens_per_step: tokens of one optimizer step over all processes, for the log and the trainer's state.

    If training diverges, ValueError is raised before a checkpoint is written.
    """

    def __init__(self, *args, parameter_rates: dict, identity: dict, tokens_per_step: int, **kwargs):
        self._staging: Path | None = None
        self._loss = self._norm = None  # of the last step, until they are read
        self.parameter_rates, self.identity, self.tokens_per_step = parameter_rates, identity, tokens_per_step
        super().__init__(*args, **kwargs)
        self.add_callback(_LogTheLastStep())
        # an interrupted run of this process may have left it false: FSDP2 would not load the optimizer's states
        self.accelerator.sync_gradients = True
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch: divide it when accumulating
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            if getattr(plugin, "fsdp_version", 1) != 2:
                raise UserError("FSDP1 is not supported; use fsdp_version: 2, as training/accelerate/fsdp2.yaml does")
            # the pair uses autocast itself; this policy would also cast the parameters that must stay fp32 (decays)
            plugin.mixed_precision_policy = None
            plugin.cpu_ram_efficient_loading = False  # every process has already loaded the weights
        self.model.place_teacher(self.args.device)

    def run(self, checkpoint: str | None) -> float:
        """Train from the start or from a checkpoint to the last step; returns the seconds of this call's training."""
        if self.is_world_process_zero():  # left by a run that was killed while it saved
            shutil.rmtree(Path(self.args.output_dir) / STAGING, ignore_errors=True)
        if checkpoint is not None:
            state = TrainerState.load_from_json(Path(checkpoint) / "trainer_state.json")
            if state.global_step >= self.args.max_steps:
                self.state = state  # training is complete; the library would train one more step
                self.read_student(checkpoint)
                return 0.0
        result = super().train(resume_from_checkpoint=checkpoint)
        self.check_weights()
        return result.metrics["train_runtime"]

    def rows_of_an_epoch(self, sampler):
        """A sampler that leaves out rows so that an epoch has whole optimizer steps.

        With gradient accumulation, the last step of an epoch would otherwise have fewer rows.
        """
        step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        if not isinstance(sampler, RandomSampler) or len(sampler.data_source) < step:
            return sampler
        return RandomSampler(sampler.data_source, num_samples=len(sampler.data_source) // step * step)

    def get_batch_samples(self, *args, **kwargs):
        """The micro-batches of a step. If not all tokens count, each weighs as many as count in it.

        The Trainer takes the mean of their losses, each of which is a mean over the tokens of one micro-batch, of all
        processes. That of `align` is relative to the teacher's outputs of this micro-batch: those of the whole step
        are not known before its last forward pass.
        """
        batches, items = super().get_batch_samples(*args, **kwargs)
        if len(batches) > 1 and "loss_mask" in batches[0]:
            counts = mean_over_processes(torch.stack([batch["loss_mask"].sum() for batch in batches]).float())
            weights = counts / counts.mean().clamp_min(1e-12)  # no token counts: all weigh 0
            for batch, weight in zip(batches, weights, strict=True):
                batch["loss_weight"] = weight
        return batches, items

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            pair = self.model
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, pair)
            groups = optimizer_groups(pair.plain_student, list(pair.parameters()), self.parameter_rates)
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def before_optimizer_step(self, norm):
        """With a norm that is not finite, the optimizer changes no weight.

        Gradients whose norm overflows may be finite, but clipping has multiplied them by zero.
        """
        if self.is_deepspeed_enabled:
            return
        norm = sharded.whole(norm)
        self._norm = _Arriving(norm)
        if self.optimizer.defaults.get("fused") and not self.is_fsdp_enabled:
            # the kernel reads it, so that the program need not wait for the GPU
            self.optimizer.optimizer.found_inf = (~norm.isfinite()).float()
        else:
            self.check_loss()

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.check_loss()
        self._loss = _Arriving(loss)
        if not loss.is_cuda:  # otherwise the next step reads it, so that the program need not wait for the GPU here
            self.check_loss()
        return loss

    def check_loss(self) -> None:
        """Read what was not read yet of the last step. Raises ValueError if its loss or gradient is not finite."""
        if self._norm is not None:
            norm, self._norm = self._norm.item(), None
            if not math.isfinite(norm):
                raise UserError(self._diverged(f"the norm of the gradients is {norm}"))
        if self._loss is None:
            return
        loss, self._loss = self._loss.item(), None
        if not math.isfinite(loss):
            raise UserError(self._diverged(f"the loss is {loss}"))
        # the loss of this process and the last micro-batch, which the Trainer has divided by the accumulation steps.
        # The progress display shows it between two logs
        self.state.newest_loss = loss * self.current_gradient_accumulation_steps

    def check_weights(self) -> None:
        """Raise ValueError if a trained weight is not finite: the gradient of a finite loss can be infinite."""
        self.check_loss()
        part = sharded.whole if self.is_deepspeed_enabled else sharded.local  # of ZeRO-3's part, the end is undefined
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(part(parameter)).all():
                raise UserError(self._diverged(f"{name} has NaN or infinite entries"))

    def _diverged(self, what: str) -> str:
        return (
            f"{what} after {self.state.global_step} steps: training diverged and was stopped. Checkpoints in"
            f" {self.args.output_dir} are intact; lower learning_rate (now {self.args.learning_rate:g}) and start in"
            " another folder, from one of them or from the student"
        )

    def log(self, logs: dict, *args, **kwargs) -> None:
        """Add the number of tokens read so far to the log and to the trainer's state."""
        self.state.num_input_tokens_seen = self.state.global_step * self.tokens_per_step
        if "loss" in logs:
            logs["tokens"] = self.state.num_input_tokens_seen
        super().log(logs, *args, **kwargs)

    # ---- checkpoints

    def folder_of_checkpoints(self) -> str | None:
        """The hidden folder in which a checkpoint is being written, or None."""
        return None if self._staging is None else str(self._staging)

    @contextmanager
    def checkpoint_writing(self):
        """Write to a hidden folder, flush it to disk and rename it, so that a kill cannot damage a checkpoint."""
        self.check_weights()
        self.state.num_input_tokens_seen = self.state.global_step * self.tokens_per_step
        home = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = home / STAGING
        if self.is_world_process_zero():
            shutil.rmtree(self._staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        remedy = "Earlier checkpoints are complete: make room and run the same command again to continue from the last"
        try:
            with explain_write_errors(home / name, remedy):
                yield
                self.accelerator.wait_for_everyone()
                if self.is_world_process_zero():
                    staged = self._staging / name
                    write_run_file(staged, self.identity)
                    replace_folder(staged, home / name)
                    rotate_checkpoints(str(home), self.args.save_total_limit)
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def write_student(self, folder: str) -> None:
        """Write the student's fp32 weights to a folder that `from_pretrained` can load."""
        pair, writes = self.model, self.args.should_save
        if self.is_deepspeed_enabled:
            state = self.accelerator.get_state_dict(self.deepspeed)  # all processes take part
        elif sharded.is_sharded(pair):
            state = dict(sharded.gather(pair, keep=writes))
        else:
            state = pair.state_dict()
        if not writes:
            return
        folder, student = Path(folder), pair.plain_student
        student.save_pretrained(folder, state_dict=sharded.student_state(pair, state))
        if lora_layers(student):
            names = pair.student_names()
            own = {names[name]: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
            save_file({name: tensor for name, tensor in own.items() if ".lora_" in name}, folder / LORA_FILE)

    def write_optimizer(self, folder: str) -> bool:
        """With FSDP2, write the optimizer but not the sharded weights, which `write_student` has written already."""
        if not self.is_fsdp_enabled:
            return False
        from accelerate.utils import save_fsdp_optimizer

        plugin = self.accelerator.state.fsdp_plugin
        save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, folder)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(folder) / "scheduler.pt")
        return True

    def read_student(self, folder: str) -> None:
        """Load the weights of a checkpoint into the pair."""
        folder = Path(folder)
        with whole_models():
            state = load_model(folder, torch.float32).state_dict()
        if lora_layers(self.model.plain_student):
            # the file holds weights with merged corrections; the frozen weights are those from the start of the run
            own = self.model.plain_student.state_dict()
            state = {name: state.get(name, tensor) for name, tensor in own.items()} | load_file(folder / LORA_FILE)
        sharded.load(self.model, state)
