"""The gain of the context as text."""


def gain_text(means: dict | None) -> str:
    """The gain of `means` with its standard error, if there is one; "" without a gain."""
    if means is None or means["gain"] is None:
        return ""
    if means["gain_error"] is None:
        return f"{means['gain']:.2f}"
    return f"{means['gain']:.2f} ± {means['gain_error']:.2f}"
