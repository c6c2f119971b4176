"""Registration of ops with torch.library, without its cost in eager calls.

torch.compile, torch.export and dispatch modes (fake tensors, recorders) see a registered op. Every other call goes
straight to the function, because the layers of a custom op cost tens to hundreds of microseconds of host time per
call: on a CPU more than a small step itself, on a GPU more than the kernels of a short prompt.
"""

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


@functools.cache
def module(name: str, package: str):
    """A module that is imported when it is first needed. An import in a function costs a microsecond per call."""
    return importlib.import_module(name, package)


PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list))  # no tensor subclasses


def needs_op(args: tuple) -> bool:
    """Whether the call must go through the registered op: under a compiler, a dispatch mode or a tensor subclass."""
    # torch has no public function that returns whether a dispatch mode is active
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not all_plain(args)


def op_is_faster(x: Tensor) -> bool:
    """Whether a compiled program should call the op. On a CPU, torch.compile fuses the operators itself."""
    return x.is_cuda


def all_plain(args: tuple) -> bool:
    """Whether no argument is a tensor subclass, which may hold its elements elsewhere or in another form."""
    for a in args:  # noqa: SIM110  all() would take twice the time, and this runs before every decode step
        if type(a) not in PLAIN and isinstance(a, Tensor):
            return False
    return True


def saves_for_backward(*tensors: Tensor | None) -> bool:
    """Whether forward keeps checkpoints, which spare a second forward in backward.

    An exported program keeps none: the shape of a buffer with one part per so many tokens would fix the lengths that
    it can read.
    """
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return needed and not torch.compiler.is_exporting()


def or_zeros(gradient: Tensor | None, like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """The gradient of an output. If it is None, because the output was not used: zeros like `like` (of `shape`).

    Ops call `ctx.set_materialize_grads(False)`. Otherwise autograd would also fill zeros for the tensors that forward
    keeps for backward. These never have a gradient (403 MB per call for COFFEE at 8 x 4096 x 1536 x 16).
    """
    return like.new_zeros(like.shape if shape is None else shape) if gradient is None else gradient


def step_op(name: str, mutates_args: tuple[str, ...]) -> Callable:
    """Decorator that registers a function as a custom op named `name`. The function changes tensors in place.

    The op has no autograd and takes positional arguments. `register_fake` of the result is that of the op.
    """

    def decorate(function: Callable) -> Callable:
        op = torch.library.custom_op(name, mutates_args=mutates_args)(function)
        without_grad = torch.no_grad()(function)

        @functools.wraps(function)
        def call(*args):
            if needs_op(args):
                return op(*args)
            # a generating program has switched gradients off already: doing it again costs some microseconds
            return without_grad(*args) if torch.is_grad_enabled() else function(*args)

        call.register_fake = op.register_fake
        return call

    return decorate


class _CannotBeDifferentiated(torch.autograd.Function):
    """The first `count` tensors, as a function of all; a gradient that would pass through it is a RuntimeError."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor | None):
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(
            f"the gradient of {ctx.name} cannot be differentiated again: its kernels compute first derivatives only."
            " For second derivatives (gradient penalties, Hessians), take differences of gradients"
        )


class _UnpackedOnce:
    """The context of a backward, whose saved tensors are read once: hooks of checkpoints refuse to be asked again."""

    def __init__(self, ctx):
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str):
        return getattr(self._ctx, name)


def first_derivative(name: str, backward: Callable) -> Callable:
    """`backward(ctx, *gradients)` such that a derivative of what it returns raises RuntimeError.

    torch's `once_differentiable` raises only if that derivative is taken by all leaves, as `Tensor.backward` does:
    its result is not connected to the inputs, so `torch.autograd.grad(gradient, inputs)` would leave this op out.
    """

    def call(ctx, *gradients):
        if not torch.is_grad_enabled():  # as it is without create_graph=True
            return backward(ctx, *gradients)
        ctx = _UnpackedOnce(ctx)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        places = [i for i, gradient in enumerate(found) if gradient is not None]
        causes = (*gradients, *ctx.saved_tensors)
        linked = _CannotBeDifferentiated.apply(name, len(places), *(found[i] for i in places), *causes)
        found = list(found)
        for i, gradient in zip(places, linked, strict=True):
            found[i] = gradient
        return tuple(found)

    return call


def eager_function(name: str, forward: Callable, backward: Callable, setup_context: Callable) -> Callable:
    """`forward(*args)` with the gradient `backward(ctx, *gradients)`, for eager calls, at the least host time.

    `setup_context(ctx, args, output)` keeps the tensors that backward needs. The gradient cannot be differentiated
    again.
    """
    backward = first_derivative(name, backward)

    def with_context(ctx, *args):
        output = forward(*args)
        setup_context(ctx, args, output)
        return output

    def function(**methods) -> Callable:
        methods = {key: staticmethod(method) for key, method in methods.items()}
        return type(f"{name}_autograd", (torch.autograd.Function,), methods).apply

    with_grad = function(forward=with_context, backward=backward)
    # torch.func needs `setup_context` as a method of its own, and then every call inspects the signature of forward
    with_transforms = function(forward=forward, backward=backward, setup_context=setup_context)

    def call(*args):
        if torch._C._are_functorch_transforms_active():
            return with_transforms(*args)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return with_grad(*args)
        # kernels would drop a tangent of forward-mode differentiation; an autograd function refuses it
        return with_grad(*args) if forward_ad._current_level >= 0 else forward(*args)

    return call


class ChunkOp:
    """A function of a whole sequence that changes no argument, registered as a custom op by `chunk_op`."""

    def __init__(self, name: str, function: Callable):
        self._op = torch.library.custom_op(name, mutates_args=())(function)
        self._name, self._eager = name.split("::")[-1], function
        self.register_fake = self._op.register_fake
        functools.update_wrapper(self, function)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """As `register_autograd` of a custom op. The gradient cannot be differentiated again."""
        self._op.register_autograd(first_derivative(self._name, backward), setup_context=setup_context)
        self._eager = eager_function(self._name, self._eager, backward, setup_context)

    def __call__(self, *args):
        return self._op(*args) if needs_op(args) else self._eager(*args)


def chunk_op(name: str) -> Callable[[Callable], ChunkOp]:
    """Decorator that registers a function as a custom op named `name`. The function changes none of its arguments.

    Arguments are positional. `register_fake` and `register_autograd` of the result are those of the op.
    """
    return functools.partial(ChunkOp, name)
