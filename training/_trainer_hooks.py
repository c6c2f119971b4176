"""The door of training to what transformers' Trainer does not promise to keep; `hf_memmix._transformers` has the rest.

Every name has a line here that says why, and a row in tests/core/test_door.py that fails when the library moves it or
changes how it is called. `TrainerHooks` translates the Trainer's private methods into methods with names of our own.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments

# the trackers by name, and what says which of them are known and installed: `--report-to` is checked before a run
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

__all__ = [
    "INTEGRATION_TO_CALLBACK",
    "TrainerHooks",
    "WrappedByUnits",
    "get_available_reporting_integrations",
    "get_reporting_integration_callbacks",
    "replace_contents",
    "use_one_gpu",
]


def use_one_gpu(arguments: TrainingArguments):
    """Train on one of several visible GPUs: the Trainer would wrap the model in nn.DataParallel."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # `n_gpu` cannot be set


def replace_contents(model: nn.Module, fresh: nn.Module):
    """Give `model` the modules and parameters of `fresh`, a new one of its class, in place.

    A constructor cannot do it: the caller holds this object, on which FSDP2 and DeepSpeed have put hooks and
    containers of parameters that cannot be taken off. What the caller has set on it beside them stays.
    """
    extra = {name: value for name, value in model.__dict__.items() if name not in fresh.__dict__}
    model.__dict__ = fresh.__dict__ | extra | {"generation_config": model.generation_config}


class WrappedByUnits:
    """A module whose `units()` are sharded one by one. Goes before nn.Module."""

    def units(self) -> Iterator[nn.Module]:
        """Modules that are gathered and freed as a whole when parameters are sharded."""
        raise NotImplementedError

    @property
    def _no_split_modules(self) -> list[str]:
        """What accelerate wraps one by one under FSDP2."""
        return sorted({type(module).__name__ for module in self.units()})


class TrainerHooks(Trainer):
    """The places where a run of ours is another than the Trainer's."""

    def rows_of_an_epoch(self, sampler: Sampler | None) -> Sampler | None:
        """The sampler to train with, from the library's."""
        return sampler

    def folder_of_checkpoints(self) -> str | None:
        """Where checkpoints are written now; None for the library's folder."""
        return None

    def checkpoint_writing(self) -> AbstractContextManager:
        """A context in which the library writes all files of a checkpoint."""
        return nullcontext()

    def write_student(self, folder: str):
        """Write the weights of a checkpoint; every process is called."""
        raise NotImplementedError

    def write_optimizer(self, folder: str) -> bool:
        """Write optimizer and scheduler of a checkpoint; False leaves it to the library."""
        return False

    def read_student(self, folder: str):
        """Load the weights of a checkpoint."""
        raise NotImplementedError

    def _get_train_sampler(self, *args, **kwargs):
        """Asked for when the loader of the training data is made."""
        return self.rows_of_an_epoch(super()._get_train_sampler(*args, **kwargs))

    def _get_output_dir(self, trial=None) -> str:
        """The folder of the folders `checkpoint-<step>`."""
        return self.folder_of_checkpoints() or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial=None):
        """Called every `save_steps` steps."""
        with self.checkpoint_writing():
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir=None, _internal_call=False):
        """A part of `_save_checkpoint`, which alone passes `_internal_call`."""
        self.write_student(output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str):
        """A part of `_save_checkpoint`."""
        if not self.write_optimizer(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Called at the start of a run that resumes."""
        self.read_student(resume_from_checkpoint)
