"""Averages over seeds: the mean with its spread, and the median. All tables of the experiments use these functions.

In every table a figure "mean ± spread" is the mean and the sample standard deviation over seeds.
"""

import math
import statistics
from collections.abc import Iterable

SPREAD_NOTE = "±: the standard deviation over seeds."


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float, float]:
    """Mean and sample standard deviation of the values that are not None.

    The deviation of one value is 0. Without values the mean is NaN and the deviation 0.
    """
    found = [value for value in values if value is not None]
    mean = statistics.fmean(found) if found else math.nan
    return mean, statistics.stdev(found) if len(found) > 1 else 0.0


def median(values: Iterable[float]) -> float:
    """The middle value; for an even number of values the mean of the two in the middle.

    Raises:
        ValueError: there are no values.
    """
    found = list(values)
    if not found:
        raise ValueError("the median of no values is not defined; give at least one value")
    return statistics.median(found)


def spread_text(values: Iterable[float | None], digits: int, alone: str = "") -> str:
    """ "mean ± deviation" with so many digits; the mean and `alone` for one value; "" without values."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    mean, deviation = mean_and_deviation(found)
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if len(found) > 1 else alone)


def percent_above(figures: dict[int, float], others: dict[int, float]) -> float | None:
    """By how many percent the mean of `figures` is above that of `others`, over the seeds that both have.

    Args:
        figures, others: by seed.

    Returns:
        None if they have no seed in common.
    """
    seeds = figures.keys() & others.keys()
    if not seeds:
        return None
    return 100 * (sum(figures[seed] for seed in seeds) / sum(others[seed] for seed in seeds) - 1)
