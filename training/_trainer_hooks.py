"""All uses of private methods of transformers' Trainer; those of the rest of transformers are in
`hf_memmix._transformers`.

A comment here explains why each one is needed, and a row in tests/core/test_door.py fails if the library renames it or
changes its arguments. `TrainerHooks` overrides private methods of the Trainer and calls methods with public names.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments
from transformers.integrations import deepspeed as deepspeed_state

# the installed trackers, with which `--report-to` is checked before a run
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

from hf_memmix import launch
from hf_memmix.versions import check_methods

__all__ = [
    "OneGPUArguments",
    "TrainerHooks",
    "WrappedByUnits",
    "get_available_reporting_integrations",
    "get_reporting_integration_callbacks",
    "replace_contents",
    "whole_models",
]


# methods of the Trainer and the parameters, in their order, that our runs override or call
RELIED_ON = {
    "_get_train_sampler": "train_dataset",
    "_get_output_dir": "trial",
    "_save_checkpoint": "model trial",
    "save_model": "output_dir _internal_call",
    "_save_optimizer_and_scheduler": "output_dir",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_get_grad_norm": "model grad_norm",
    "create_optimizer": "model",
    "get_optimizer_cls_and_kwargs": "args model",
}


class OneGPUArguments(TrainingArguments):
    """Arguments of a process that trains on one GPU: on its current one if no launcher gives it a GPU.

    `TrainingArguments` takes the first visible GPU then, and the Trainer would wrap the model in nn.DataParallel for
    the other ones.
    """

    # the device is chosen here and nowhere else
    @cached_property
    def _setup_devices(self) -> torch.device:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        on_cpu = self.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        if not index or on_cpu or launch.is_launched():
            device = super()._setup_devices
            self._n_gpu = min(self._n_gpu, 1)  # `n_gpu` cannot be set
            return device
        # the method above would make the first GPU the current one, and occupy memory there
        AcceleratorState._reset_state(reset_partial_state=True)
        self.distributed_state, self._n_gpu = PartialState(backend=self.ddp_backend), 1
        return torch.device("cuda", index)


def replace_contents(model: nn.Module, fresh: nn.Module):
    """Replace the modules and parameters of `model`, in place, by those of `fresh`, a new model of the same class.

    The object must stay the same, because the caller holds it. FSDP2 and DeepSpeed have added hooks and parameter
    containers to its old modules, which cannot be removed. Other attributes that the caller has set are kept.
    """
    extra = {name: value for name, value in model.__dict__.items() if name not in fresh.__dict__}
    model.__dict__ = fresh.__dict__ | extra | {"generation_config": model.generation_config}


@contextmanager
def whole_models():
    """A context in which `from_pretrained` loads whole models, also while the arguments of a ZeRO-3 run exist.

    The library keeps a reference to their settings, and while it is there, it shards every model that it loads.
    """
    settings = deepspeed_state._hf_deepspeed_config_weak_ref
    deepspeed_state.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed_state._hf_deepspeed_config_weak_ref = settings


class WrappedByUnits:
    """A module whose `units()` are sharded one by one. This base class stands before nn.Module."""

    def units(self) -> Iterator[nn.Module]:
        """Modules whose sharded parameters are gathered and freed together."""
        raise NotImplementedError

    @property
    def _no_split_modules(self) -> list[str]:
        """Names of the classes whose modules accelerate wraps one by one under FSDP2."""
        return sorted({type(module).__name__ for module in self.units()})


class TrainerHooks(Trainer):
    """The methods of the Trainer that our runs change. RuntimeError if one is missing or has other parameters."""

    def __init__(self, *args, **kwargs):
        check_methods(Trainer, RELIED_ON, "the Trainer")
        super().__init__(*args, **kwargs)

    def rows_of_an_epoch(self, sampler: Sampler | None) -> Sampler | None:
        """The sampler to train with, made from the library's `sampler`."""
        return sampler

    def folder_of_checkpoints(self) -> str | None:
        """The folder in which checkpoints are written; None for the library's folder."""
        return None

    def checkpoint_writing(self) -> AbstractContextManager:
        """A context manager around the writing of all files of a checkpoint."""
        return nullcontext()

    def write_student(self, folder: str):
        """Write the weights of a checkpoint. It is called in every process."""
        raise NotImplementedError

    def write_optimizer(self, folder: str) -> bool:
        """Write optimizer and scheduler of a checkpoint, and return True; False lets the library write them."""
        return False

    def read_student(self, folder: str):
        """Load the weights of a checkpoint."""
        raise NotImplementedError

    def before_optimizer_step(self, norm: torch.Tensor | float | None):
        """Check `norm`, that of all gradients before they were clipped. DeepSpeed has made the step already."""

    def _get_train_sampler(self, *args, **kwargs):
        """The Trainer calls it when it makes the data loader."""
        return self.rows_of_an_epoch(super()._get_train_sampler(*args, **kwargs))

    def _get_output_dir(self, trial=None) -> str:
        """The folder that holds the folders `checkpoint-<step>`."""
        return self.folder_of_checkpoints() or super()._get_output_dir(trial)

    def _save_checkpoint(self, model, trial=None):
        """The Trainer calls it every `save_steps` steps."""
        with self.checkpoint_writing():
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir=None, _internal_call=False):
        """`_save_checkpoint` calls it; no other caller passes `_internal_call`."""
        self.write_student(output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str):
        """`_save_checkpoint` calls it."""
        if not self.write_optimizer(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """The Trainer calls it at the start of a run that resumes."""
        self.read_student(resume_from_checkpoint)

    def _get_grad_norm(self, model, grad_norm=None):
        """The Trainer calls it after clipping, or instead of it, in every step. No callback is given the norm."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.before_optimizer_step(norm)
        return norm
