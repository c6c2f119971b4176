"""The tables of goals mark what does not reach its goal, and nothing else."""

import pytest

from hf_memmix.training.experiments.results import read
from hf_memmix.training.experiments.tables import kernels


@pytest.fixture
def changed(monkeypatch):
    """A function that gives the tables other figures than those of the results."""
    return lambda change: monkeypatch.setattr(kernels, "read", lambda name: [change(dict(row)) for row in read(name)])


def line(table: str, start: str) -> list[str]:
    """The cells of the line whose first cell starts so."""
    (found,) = (row for row in table.splitlines() if row.startswith(f"| {start}"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_whole_models(changed):
    figures = {"attention": 100.0, "gka": 101.0, "ska": 100.0}

    def change(row):
        return row | {"ms": figures.get(row["mixer"], 99.0), "tokens_s": 1000, "peak_mib": 1024}

    changed(change)
    table = kernels.model_goals()
    assert line(table, "decode, B = 1 ") == [
        "decode, B = 1", "<= 1 x 100.0", "101.0 missed", "99.0", "99.0", "100.0", "99.0", "<= 2.37 missed",
    ]  # fmt: skip
    assert line(table, "prefill of 2k |")[1:4] == ["<= 1.1 x 100.0", "101.0", "99.0"]
    assert line(table, "training of 2 x 8k")[1:] == [">= 1 x 1.0k", *["1.0k"] * 5, ">= 1.2k missed"]


def test_ops(changed):
    changed(lambda row: row | {"ms": 1.0, "kernel_ms": 0.5})
    table = kernels.op_goals()
    assert line(table, "GKA | 4 x 8192 x 8")[2:] == ["1.05 / 3.1", "1 / 1", "0.5 / 0.5", "yes"]
    assert line(table, "COFFEE")[2:] == ["0.31 / 1", "1 / 1", "0.5 / 0.5", "no / yes"]
    assert line(table, "gla")[2:] == ["1 / 1", "1 / 1", "0.5 / 0.5", "yes"]


def test_a_cpu(changed):
    def change(row):
        return row | {"cpu_ms": 1.0 if row["mixer"] == "attention" else 1.2}

    changed(change)
    table = kernels.cpu_goals()
    assert line(table, "a token after 1k, tiny model, 2")[2:] == ["1.20 missed"] * 5
    assert line(table, "a prompt of 2k, tiny model, 2")[2:] == ["1.20"] * 5
