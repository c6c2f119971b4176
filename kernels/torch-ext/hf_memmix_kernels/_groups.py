"""Arguments in groups. A registered op and a tape take flat arguments; the functions behind them take NamedTuples.

class Inputs(NamedTuple):
    x: Tensor
    scale: float

@flat(Inputs)
def f(a: Inputs) -> Tensor: ...     # f(x, scale), or f(*inputs)
"""

import functools
import inspect
from collections.abc import Callable

from torch import Tensor


def flat(*groups: type) -> Callable[[Callable], Callable]:
    """Decorator: a function of these NamedTuples becomes a function of all their fields, in this order.

    Its signature names the fields, so that torch.library can read the schema of an op from it.
    """
    fields = [field for group in groups for field in group.__annotations__.items()]
    assert len(dict(fields)) == len(fields), "two groups have a field of the same name"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=type_) for name, type_ in fields]
    new, first, cuts, stop = tuple.__new__, groups[0], [], 0
    for group in groups:
        cuts.append((group, slice(stop, stop := stop + len(group._fields))))

    def decorate(function: Callable) -> Callable:
        def one(*args):
            return function(new(first, args))

        def several(*args):
            return function(*[new(group, args[part]) for group, part in cuts])

        call = functools.update_wrapper(one if len(groups) == 1 else several, function)
        returned = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(parameters, return_annotation=returned)
        return call

    return decorate


def tensors(count: int) -> type:
    """The type of an op's result of so many tensors."""
    return tuple[(Tensor,) * count]
