"""torch.compile of the layers of student and teacher, for the recipe's field `compile`.

Each layer is compiled alone: all layers of a kind share the code, so compiling takes seconds and not minutes, and what
is between the layers (hooks, masks, checkpoints, the loss in chunks) stays as it is. A CUDA graph of the step records
the compiled kernels.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_memmix.errors import UserError
from hf_memmix.training.recipe import Recipe

BACKEND = "inductor"


def check_compile(recipe: Recipe, device: torch.device, sharded: bool = False) -> None:
    """Raise ValueError if a recipe asks for compiled layers and they cannot be had on a device.

    sharded: the launch file divides the weights (FSDP2, ZeRO-3), also of one process.
    """
    if not recipe.compile:
        return
    if sharded:
        raise UserError(
            "compile is true, but the launch file shards the weights (FSDP, DeepSpeed), which torch.compile was not"
            " tried with; set compile to false, or launch with training/accelerate/single.yaml or ddp.yaml"
        )
    try:
        torch.compile(_probe, backend=BACKEND, dynamic=False)(torch.ones(8, device=device))
    except Exception as failure:  # of Inductor, Triton or the C++ compiler
        error = getattr(failure, "inner_exception", failure)
        told = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UserError(
            f"compile is true, but torch.compile does not work on {device}: {type(error).__name__}: {told[:300]}."
            " It needs a C++ compiler, and on a GPU Triton; install them, or set compile to false"
        ) from None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).relu()


@contextmanager
def compiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside this context, `forward` of each module is compiled when it is first called. Its hooks are not."""
    modules = list(modules)
    # a kind of layer is compiled once with and once without gradients; where layers differ in a number that their code
    # reads, once for each, and beyond the limit a layer would run uncompiled
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(modules) + 8)
    total = max(torch._dynamo.config.accumulated_recompile_limit, limit)
    with torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=total):
        try:
            for module in modules:
                module.forward = torch.compile(module.forward, backend=BACKEND, dynamic=False)
            yield
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)
