"""A command that warns of an option which is given twice: only its last value counts, the others have no effect."""

from collections import Counter

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command of typer. Switches, and options that take several values, are repeated without a warning."""

    def make_parser(self, ctx):
        """The parser of the command, whose `parse_args` prints the warnings to stderr."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_and_warn(args):
            values, rest, order = parse(args)  # `order` has an entry for each time that a parameter was given
            for parameter, times in Counter(order).items():
                if parameter.param_type_name != "option" or parameter.multiple or parameter.is_flag:
                    continue
                if times > 1 and not ctx.resilient_parsing:
                    name, last = parameter.opts[0], values[parameter.name]
                    typer.echo(f"warning: {name} is given {times} times; only the last value counts: {last}", err=True)
            return values, rest, order

        parser.parse_args = parse_and_warn
        return parser
