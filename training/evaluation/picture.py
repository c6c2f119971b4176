"""Pictures of results, drawn without a screen. Files hold no time and no version: equal numbers give equal files."""

from pathlib import Path


def new_picture(rows: int = 1, columns: int = 1, **options) -> tuple:
    """A figure and its axes; `options` are those of `pyplot.subplots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, constrained_layout=True, **options)


def write_picture(figure, path: str | Path, dpi: int = 130) -> None:
    """Write a figure of `new_picture` as a PNG, and close it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    pyplot.close(figure)
