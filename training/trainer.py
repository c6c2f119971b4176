"""The Hugging Face Trainer over a `StudentTeacher`: rates by group, tokens counted, checkpoints whole or absent."""

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
from hf_memmix.training import sharded
from hf_memmix.training._trainer_hooks import TrainerHooks
from hf_memmix.training.groups import optimizer_groups
from hf_memmix.training.run_identity import write_run_file
from hf_memmix.training.teachers import lora_layers

STAGING = ".saving"
LORA_FILE = "memmix_lora.safetensors"


class _LogTheLastStep(TrainerCallback):
    """Also where `logging_steps` does not divide the number of steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= state.global_step >= state.max_steps


class PairTrainer(TrainerHooks):
    """Trainer over a `StudentTeacher`, under `accelerate launch` on one process, DDP, FSDP2 or ZeRO-3.

    Args:
        parameter_rates: learning rate and weight decay by the student's parameter names, see `groups.parameter_rates`.
        identity: what a run must share with the checkpoint it resumes from; it is written beside it.
        tokens_per_step: tokens of one optimizer step over all processes, for the log and the trainer's state.

    A run that diverges raises ValueError before it writes anything.
    """

    def __init__(self, *args, parameter_rates: dict, identity: dict, tokens_per_step: int, **kwargs):
        self._staging: Path | None = None
        self.parameter_rates, self.identity, self.tokens_per_step = parameter_rates, identity, tokens_per_step
        super().__init__(*args, **kwargs)
        self.add_callback(_LogTheLastStep())
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the batch: divide it when accumulating
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            if getattr(plugin, "fsdp_version", 1) != 2:
                raise ValueError("FSDP1 is not supported; use fsdp_version: 2, as training/accelerate/fsdp2.yaml does")
            # the forward is autocast by the pair: a cast of all parameters would take the fp32 of the decays as well
            plugin.mixed_precision_policy = None
            plugin.cpu_ram_efficient_loading = False  # every process has loaded the weights
        self.model.place_teacher(self.args.device)

    def run(self, checkpoint: str | None) -> float:
        """Train from the start or from a checkpoint to the last step; returns the seconds of this call's training."""
        if self.is_world_process_zero():  # of a run that was killed in a save
            shutil.rmtree(Path(self.args.output_dir) / STAGING, ignore_errors=True)
        if checkpoint is not None:
            state = TrainerState.load_from_json(Path(checkpoint) / "trainer_state.json")
            if state.global_step >= self.args.max_steps:
                self.state = state  # complete but for its export: the library would train one step more
                self.read_student(checkpoint)
                return 0.0
        result = super().train(resume_from_checkpoint=checkpoint)
        self.check_weights()
        return result.metrics["train_runtime"]

    def rows_of_an_epoch(self, sampler):
        """Rows of whole optimizer steps: accumulation would end an epoch with a step of fewer."""
        step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        if not isinstance(sampler, RandomSampler) or len(sampler.data_source) < step:
            return sampler
        return RandomSampler(sampler.data_source, num_samples=len(sampler.data_source) // step * step)

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            pair = self.model
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, pair)
            groups = optimizer_groups(pair.plain_student, list(pair.parameters()), self.parameter_rates)
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise ValueError(self._diverged(f"the loss is {loss.item()}"))
        # of this process and of the last micro-batch; accumulation has divided it. Progress shows it between two logs
        self.state.newest_loss = loss.item() * self.current_gradient_accumulation_steps
        return loss

    def check_weights(self) -> None:
        """Raise ValueError if a trained weight is not finite: a finite loss may have an infinite gradient."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(sharded.local(parameter)).all():
                raise ValueError(self._diverged(f"{name} has NaN or infinite entries"))

    def _diverged(self, what: str) -> str:
        return (
            f"{what} after {self.state.global_step} steps: training diverged and was stopped. Checkpoints in"
            f" {self.args.output_dir} are intact; lower learning_rate (now {self.args.learning_rate:g}) and start in"
            " another folder, from one of them or from the student"
        )

    def log(self, logs: dict, *args, **kwargs) -> None:
        """With the tokens seen so far, which also stand in the trainer's state."""
        self.state.num_input_tokens_seen = self.state.global_step * self.tokens_per_step
        if "loss" in logs:
            logs["tokens"] = self.state.num_input_tokens_seen
        super().log(logs, *args, **kwargs)

    # ---- checkpoints

    def folder_of_checkpoints(self) -> str | None:
        """A hidden folder while a checkpoint is written."""
        return None if self._staging is None else str(self._staging)

    @contextmanager
    def checkpoint_writing(self):
        """Write to a hidden folder, flush, rename: a kill at any moment leaves the last checkpoint whole."""
        self.check_weights()
        self.state.num_input_tokens_seen = self.state.global_step * self.tokens_per_step
        home = Path(self.args.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._staging = home / STAGING
        if self.is_world_process_zero():
            shutil.rmtree(self._staging, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        remedy = "The checkpoints before it are whole: make room and run the same command again to continue from there"
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
        """The plain student as a folder that `from_pretrained` loads, in its fp32 training weights."""
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
        """Under FSDP2 the weights are in the student's own files: only the optimizer is left to write."""
        if not self.is_fsdp_enabled:
            return False
        from accelerate.utils import save_fsdp_optimizer

        plugin = self.accelerator.state.fsdp_plugin
        save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, folder)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(folder) / "scheduler.pt")
        return True

    def read_student(self, folder: str) -> None:
        """The weights of a checkpoint, into the pair."""
        folder = Path(folder)
        state = load_model(folder, torch.float32).state_dict()
        if lora_layers(self.model.plain_student):
            # what the file holds is merged; frozen weights are those that the run began with
            own = self.model.plain_student.state_dict()
            state = {name: state.get(name, tensor) for name, tensor in own.items()} | load_file(folder / LORA_FILE)
        sharded.load(self.model, state)
