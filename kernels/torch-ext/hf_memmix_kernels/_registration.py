"""Registration of decode steps with torch.library, without its cost in eager calls."""

import functools
from collections.abc import Callable

import torch


def step_op(name: str, mutates_args: tuple[str, ...]) -> Callable:
    """Decorator: a function without autograd that changes tensors in place, as a custom op named `name`.

    torch.compile, torch.export and dispatch modes (fake tensors, recorders) see the registered op. Every other call
    goes straight to the function, because the layers of a custom op cost tens of microseconds of host time per call,
    on a CPU more than a small step itself. Arguments are positional. `register_fake` of the result is that of the op.
    """

    def decorate(function: Callable) -> Callable:
        op = torch.library.custom_op(name, mutates_args=mutates_args)(function)
        without_grad = torch.no_grad()(function)

        @functools.wraps(function)
        def call(*args):
            # torch has no public question for an active dispatch mode
            traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            if traced:
                return op(*args)
            # a generating program has switched gradients off already: doing it again costs some microseconds
            return without_grad(*args) if torch.is_grad_enabled() else function(*args)

        call.register_fake = op.register_fake
        return call

    return decorate
