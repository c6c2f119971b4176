"""What tests of training share: rows, copies of weights and folders, and a run that is stopped."""

import torch
from transformers import TrainerCallback

from hf_memmix.training.data import TokenBlocks

# the smallest recipe
SMALL_RUN = {"batch_size": 4, "block_size": 16, "warmup_steps": 1}


def random_rows(count=20, positions=None):
    """Rows of 16 random tokens of a tiny teacher."""
    tokens = torch.randint(3, 64, (count * 16,), generator=torch.Generator().manual_seed(0))
    return TokenBlocks(tokens, 16, positions)


def weights(model):
    """Copies of all tensors of a model, by name."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model, before):
    """The names of the tensors that are not as in `before`. A run leaves its student on the GPU."""
    after = model.state_dict()
    assert after.keys() == before.keys()
    return {name for name in before if not torch.equal(before[name].cpu(), after[name].cpu())}


def contents(folder):
    """The bytes of the files of a folder, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Stopped(Exception):
    """A run has been stopped."""


class StopBefore(TrainerCallback):
    """Stops a run when it has made so many steps."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.steps:
            raise Stopped
