"""Averages over seeds: what "mean ± spread" and "median" mean in every table."""

import math
import statistics

import pytest

from hf_memmix.training.experiments.common.averages import mean_and_deviation, median, spread_text
from hf_memmix.training.experiments.common.report import cells_not_run, spread_note


def test_the_spread_is_the_sample_standard_deviation():
    """Of two values it is their distance by the root of two, and not half of their distance."""
    assert mean_and_deviation([1.0, None, 3.0]) == (2.0, pytest.approx(2 / math.sqrt(2)))
    assert mean_and_deviation([1.0, 2.0, 6.0]) == (3.0, pytest.approx(statistics.stdev([1, 2, 6])))
    assert mean_and_deviation([5.0]) == (5.0, 0.0)
    mean, deviation = mean_and_deviation([None])
    assert math.isnan(mean) and deviation == 0


def test_the_median_of_an_even_number_is_between_the_two_in_the_middle():
    assert median([4.0, 1.0, 3.0, 2.0]) == 2.5 and median(iter([3.0, 1.0, 2.0])) == 2.0
    with pytest.raises(ValueError, match="median of no values is not defined"):
        median([])


def test_text():
    assert spread_text([0.5, 1.5], 2) == "1.00 ± 0.71"
    assert spread_text([None, 2.0], 1, alone=" (1 seed)") == "2.0 (1 seed)" and spread_text([2.0], 1) == "2.0"
    assert spread_text([None], 1) == spread_text([], 3) == ""


def test_captions_count_seeds_and_name_cells_that_were_not_run():
    assert spread_note([[{}, {}], [{}]]) == "±: the standard deviation over 2 seeds."
    assert spread_note([[{}] * 3, [{}] * 2]) == "±: the standard deviation over 2 or 3 seeds."
    assert spread_note([[{}]]) == "±: the standard deviation over seeds."
    rows = [{"model": model, "context": context} for model, context in (("a", 8), ("b", 8), ("a", 16), ("a", 32))]
    settings = {"models": ["b", "a", "planned"], "contexts": [8, 16, 32]}
    assert cells_not_run({"settings": settings, "rows": rows}) == " Not run at 16: b; at 32: b."
    assert cells_not_run({"settings": settings | {"contexts": [8]}, "rows": rows}) == ""
