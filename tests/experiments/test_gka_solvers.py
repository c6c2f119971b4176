"""The solvers of Figure 1: they solve, their gradients become those of the exact solver, and the table names them."""

import argparse
import math

import pytest
import torch

from hf_memmix.training.experiments.gka import solvers
from hf_memmix.training.experiments.gka.solvers import COMPARED, SOLVERS, WAYS, after, problems, ridge_regression
from hf_memmix.training.experiments.gka.solvers_report import TITLES, name_of, plot, section
from hf_memmix_kernels import naive_gka
from hf_memmix_kernels.gka.naive import naive_chebyshev

SETTINGS = {"problems": 24, "length": 12, "heads": 2, "head_dim": 8, "layers": 2, "iterations": [2, 60]}


def drawn():
    generator = torch.Generator().manual_seed(0)
    return [solvers.random_unit(generator, 1, 9, 2, 8) for _ in range(3)]


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_converges(solver):
    q, k, _ = drawn()
    A, low, high = problems(k, 0.05)
    exact = torch.linalg.solve(A, q)
    few, many = (after(solver, count, A, q, low, high) - exact for count in (3, 400))
    assert many.norm() < 1e-6 * few.norm()


def test_chebyshev_is_the_iteration_of_the_op():
    q, k, _ = drawn()
    A, low, high = problems(k, 0.02)
    expected = naive_chebyshev(A, q, 2 / (low + high), 12, 0.02)
    torch.testing.assert_close(after("CH", 13, A, q, low, high), expected)


def test_the_layer_is_gka_without_gates():
    q, k, v = drawn()
    expected, _ = naive_gka(q, k, v, torch.zeros(1, 9, 2), refinement=(60, 60), ridge=solvers.RIDGE, scale=1.0)
    torch.testing.assert_close(ridge_regression(q, k, v, "exact", "", 0), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("solver", COMPARED)
@pytest.mark.parametrize("panel", solvers.GRADIENTS)
def test_gradients_become_the_exact_ones(panel, solver, way):
    row = {"panel": panel, "solver": solver, "way": way}
    few, many = solvers.run(row, argparse.Namespace(**SETTINGS))["differences"]
    assert many < 1e-4 < few


def test_a_constant_ridge_has_no_constant_condition_number():
    k = drawn()[1]
    for constant in (False, True):
        _, low, high = problems(k, 0.02, constant)
        condition = high / low
        assert bool((condition.diff(dim=1).abs() > 1).any()) == constant


def test_table_and_plot_show_every_row(tmp_path):
    args = argparse.Namespace(**SETTINGS, deadline=math.inf)
    rows = [row | solvers.run(row, args) for row in solvers.rows_to_run([], args)]
    assert {row["panel"] for row in rows} == TITLES.keys()
    results = {"settings": SETTINGS, "environment": {"hardware": "h", "commit": "c"}, "rows": rows}
    table = section(results)
    for row in rows:
        assert f"| {TITLES[row['panel']]} | {name_of(row)} |" in table
    plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
