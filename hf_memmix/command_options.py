"""A command whose options are the attributes of a class, so that several commands declare what they share once."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace


def command(options: type, without: tuple[str, ...] = ()) -> Callable:
    """A decorator that makes a command for typer of `function(args)`; `args` holds the values of the options.

    The options are the annotated attributes of the class and its bases, in the order in which they are declared. An
    attribute without a value is required. The help of the command is the function's docstring.

    Args:
        without: names of attributes that this command does not have.
    """
    kinds = {}
    for cls in reversed(options.__mro__):
        kinds |= inspect.get_annotations(cls)
    kinds = {name: kind for name, kind in kinds.items() if name not in without}
    parameters = []
    for name, kind in kinds.items():
        default = getattr(options, name, inspect.Parameter.empty)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))

    def decorate(function: Callable[[SimpleNamespace], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**values) -> None:
            function(SimpleNamespace(**values))

        del run.__wrapped__  # typer reads the signature below, not that of the function
        run.__signature__, run.__annotations__ = inspect.Signature(parameters), kinds
        return run

    return decorate
