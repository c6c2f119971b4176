"""The time of a training stage as text."""


def time_text(result: dict) -> str:
    """The time of a stage; of a run that was resumed, only that since then is known."""
    return f"{result['seconds']:.0f} s" + (" since it was resumed" if result.get("resumed") else "")
