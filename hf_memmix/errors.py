"""The error for what a user can correct. It needs no other module, so that a command can check before it imports."""

LONGEST = 2000  # characters of a message that are shown


class UserError(ValueError):
    """A value, a file or a machine that does not fit; the message names it, the limit and the remedy.

    The command line prints the message without a traceback. A message that quotes a very long value is cut.
    """

    def __init__(self, message: str):
        super().__init__(cut(message))


LOWEST_TEMPERATURE = 1e-6  # logits that are divided by a much lower one are infinite in fp32


def check_temperature(temperature: float | None, sampling: dict) -> None:
    """Raise UserError if the logits cannot be divided by the temperature, or if it is 0, which takes the likeliest
    token, and options of the sampling are given. sampling: their values by name; None is not given.
    """
    if temperature and not temperature >= LOWEST_TEMPERATURE:
        raise UserError(
            f"temperature is {temperature}; give at least {LOWEST_TEMPERATURE}, or 0 for the likeliest token"
        )
    for name, value in sampling.items():
        if temperature == 0 and value is not None:
            raise UserError(f"{name} is {value}, but temperature 0 takes the likeliest token; leave out one of them")


def cut(text: str, longest: int = LONGEST) -> str:
    """A text of at most about `longest` characters: the middle of a longer one is left out."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} ... ({len(text) - 2 * half:,} characters) ... {text[-half:]}"
