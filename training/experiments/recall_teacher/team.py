"""One model in several processes, one per GPU: each reads its own batches, and the gradients are averaged.

`torchrun --nproc-per-node 2 teacher.py ...` starts such a team; a process that was started without it is a team of
one. Time-based schedules follow the clock of the first process, so all processes take the same steps.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(seconds=60)  # how long a process waits for the others


class Team:
    """The processes of one training. `rank` is 0 in the first process, which writes the files."""

    def __init__(self):
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))

    def connect(self) -> None:
        """Find the other processes; call this after the workers of the data loaders are forked."""
        if self.size == 1:
            return
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)

    def clock(self, value: float) -> float:
        """The value of the first process, in all processes. The device is not waited for."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0)
        return shared.item()

    def average(self, parameters: list[Tensor]) -> None:
        """Replace the gradients of the parameters by their means over the processes."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
