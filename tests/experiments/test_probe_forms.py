"""Forms of probes: rows of every form and way, the teacher's answers with intervals, and the table."""

from types import SimpleNamespace

import pytest

from hf_memmix.assets import asset_path
from hf_memmix.training.evaluation.probes.counted import wilson
from hf_memmix.training.experiments.smollm2 import probe_forms


def test_the_teacher_answers_in_every_form():
    teacher, text = asset_path("tiny_teacher"), asset_path("dev.txt")
    args = SimpleNamespace(
        teacher=teacher, text=text, lengths=[160], ways=["text", "question"], samples=1, deadline=float("inf")
    )
    rows = probe_forms.rows_to_run([], args)
    assert len(rows) == 2 * len(probe_forms.FORMS)
    found = [row | probe_forms.run(row, args) for row in rows[-2:]]
    for row in found:
        assert row["answers"] == 5 and row["choice_interval"] == pytest.approx(wilson(row["choice"], 5))
    results = {
        "rows": [found[0] | {"choice": 1.0}, found[1] | {"exact": 0.2}],
        "environment": {"hardware": "a", "commit": "b"},
    }
    results["settings"] = {"lengths": [160, 320], "samples": 1, "ways": ["text", "question"]}
    line = probe_forms.table(results).splitlines()[2]
    text, question = (f"{100 * row['choice']:.0f} / {100 * row['exact']:.0f}" for row in results["rows"])
    assert line == f"| six sentences | {text} | {question} |  |  |" and text.startswith("100") and "20" in question
