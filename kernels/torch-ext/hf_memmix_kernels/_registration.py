"""What ops share of torch.library: decode steps without its cost in eager calls, and gradients that are None."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def or_zeros(gradient: Tensor | None, like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """The gradient of an output; where it is None, because nothing used the output, zeros as `like` (of `shape`).

    Ops call `ctx.set_materialize_grads(False)`: autograd would otherwise fill zeros for what forward keeps for
    backward, too, which never has a gradient (403 MB per call for COFFEE at 8 x 4096 x 1536 x 16).
    """
    return like.new_zeros(like.shape if shape is None else shape) if gradient is None else gradient


def step_op(name: str, mutates_args: tuple[str, ...]) -> Callable:
    """Decorator: a function without autograd that changes tensors in place, as a custom op named `name`.

    torch.compile, torch.export and dispatch modes (fake tensors, recorders) see the registered op. Every other call
    goes straight to the function, because the layers of a custom op cost tens of microseconds of host time per call,
    on a CPU more than a small step itself. Arguments are positional. `register_fake` of the result is that of the op.
    """

    def decorate(function: Callable) -> Callable:
        op = torch.library.custom_op(name, mutates_args=mutates_args)(function)
        direct = torch.no_grad()(function)

        @functools.wraps(function)
        def call(*args):
            # torch has no public question for an active dispatch mode
            traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            return op(*args) if traced else direct(*args)

        call.register_fake = op.register_fake
        return call

    return decorate
