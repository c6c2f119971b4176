"""`coffee_method` against the grid that kernels/benchmarks/coffee_dispatch.py measured."""

import json
from itertools import groupby
from pathlib import Path

import pytest

import hf_memmix_kernels as K
from hf_memmix_kernels.coffee.sizes import SHOOTING_TOKENS, shooting_chunk

GRID = Path(__file__).parents[2] / "kernels/benchmarks/results/coffee_dispatch_h200.json"
SLOWER = 1.25  # allowed time relative to the fastest measured method
FALLBACK = 0.3  # share of the scan's tokens that shooting may compute before it stops without convergence


def cells() -> dict[tuple[int, int, int, int], dict[str, float]]:
    """For each size (B, T, D, n), the milliseconds of every method that converged; only sizes that have a timed
    method.
    """
    found = {}
    for size, rows in groupby(
        json.loads(GRID.read_text())["rows"], lambda row: (row["B"], row["T"], row["D"], row["n"])
    ):
        times = {row["method"]: row["ms"] for row in rows if row["ms"] is not None}
        if times:
            found[size] = times
    return found


@pytest.mark.parametrize(("size", "times"), cells().items(), ids=str)
def test_the_rule_picks_a_method_near_the_best(size, times):
    """The chosen method converged, and takes at most SLOWER times as long as the fastest one that converged."""
    picked = K.coffee_method(*size)
    assert picked in times, f"{picked} did not converge"
    assert times[picked] <= SLOWER * min(times.values())


def test_both_methods_and_both_sides_of_the_rule_were_measured():
    found, grid = cells(), json.loads(GRID.read_text())
    assert grid["commit"] and "H200" in grid["gpu"]
    assert len(found) >= 35
    assert {K.coffee_method(*size) for size in found} == {"scan", "shooting"}


def test_cells_that_were_not_measured_give_the_reason():
    for row in json.loads(GRID.read_text())["rows"]:
        assert (row["ms"] is None) == bool(row["note"]), row


@pytest.mark.parametrize("tokens", [SHOOTING_TOKENS * k for k in (1, 2, 3, 4, 16, 64)])
def test_shooting_that_fails_has_computed_few_tokens(tokens):
    """Convergence depends on the data, but the largest cost of a failed attempt does not."""
    shooting = pytest.importorskip("hf_memmix_kernels.coffee.launch_shooting")
    assert (shooting.MAX_ITERATIONS + 1) * shooting_chunk(tokens) <= FALLBACK * tokens
