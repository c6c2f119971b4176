"""The figures of the students of `grid.py`, with which predictions are compared.

All shares are of exact answers in percent, as means over seeds, at 1024 tokens if no length is given.
"""

import statistics

from hf_memmix.training.experiments.recall_teacher.probing import GATE_LENGTH, mean_recall
from hf_memmix.training.experiments.recall_teacher.report import groups

MIXERS = ("gka", "lattice", "gla", "mamba2", "coffee", "ska")
WINDOWS = ("window-64", "window-256")
THREE_PROBES = ("niah", "variables", "mqar_32")


class Students:
    """The figures of the students in the results of the grid. A figure that was not measured is None."""

    def __init__(self, results: dict):
        self.rows = groups(results)
        own = results["environment"]["commit"]  # of the first runs; later rows, on CUDA streams, have another one
        self.first = [r for r in results["rows"] if r["stage"] != "teacher" and r.get("commit", own) == own]
        self.own = [row for row in results["rows"] if row["stage"] == "teacher" and "recall" in row]

    def of(self, layout: str, keep: int = 0, how: str = "uniform") -> list[dict]:
        return self.rows.get((keep, how, layout), [])

    def share(self, task: str, *student, length: int = GATE_LENGTH) -> float | None:
        """The share of exact answers of a student, in percent; of the teacher without a student."""
        return percent([row["recall"] for row in (self.of(*student) if student else self.own)], task, length)

    def mean(self, key: str, *student) -> float | None:
        rows = self.of(*student)
        return statistics.fmean(row[key] for row in rows) if rows else None


def percent(recalls: list[list[dict]], task: str, length: int = GATE_LENGTH) -> float | None:
    shares = [share for rows in recalls if (share := mean_recall(rows, task, length)) is not None]
    return 100 * statistics.fmean(shares) if shares else None


def mean_of_probes(students: Students, *student) -> float | None:
    """The mean of a student's shares of needle, two hops and MQAR with 32 pairs; None if one was not measured."""
    shares = [students.share(task, *student) for task in THREE_PROBES]
    return None if None in shares else statistics.fmean(shares)
