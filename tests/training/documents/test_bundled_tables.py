"""The page about the bundled models: what its prose says, from the results; shares of the tables."""

import json

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.documents import bundled_tables
from hf_memmix.training.documents.bundled_tables import share
from hf_memmix.training.documents.measurements import CARDS, read

PAGE = " ".join((CHECKOUT / "training/bundled/README.md").read_text(encoding="utf-8").split())


def cut_ratio(name):
    (row,) = [row for row in read(name)["rows"] if row["context"] == 64]
    return f"{100 * (row['ratio'] - 1):.0f} %"


def test_what_the_page_says_about_the_candidate():
    run, card = read("candidate_training"), (CHECKOUT / CARDS / "tiny_teacher/README.md").read_text(encoding="utf-8")
    dev = [row["dev_loss"] for row in run["epochs"]]
    mqar = [row["dev_recall"]["mqar"] for row in run["epochs"]]
    assert mqar[1]["256"] > 0.8 > mqar[1]["1024"] and mqar[2]["1024"] > 0.9
    assert f"64 instead of 512 tokens its perplexity rises by {cut_ratio('candidate_context')}" in PAGE
    assert f"that of the bundled one by {cut_ratio('context_use')}" in PAGE
    assert f"got {len(run['epochs'])} of the planned" in PAGE and f"candidate has {dev[-1]:.2f} at the end" in PAGE
    perplexity = {name: read(name)["heldout"]["perplexity"] for name in ("candidate_recall", "bundled_recall")}
    assert 1.9 < perplexity["candidate_recall"] / perplexity["bundled_recall"] < 2.1
    first, last = (row for row in run["steps"] if row["step"] in (800, 1200))
    assert f"A step took {(last['seconds'] - first['seconds']) / 400:.2f} s in this run" in PAGE
    recall_teacher = read("recall_teacher_first")
    assert f"took {recall_teacher['training_seconds'] / recall_teacher['steps']:.2f} s on an H200" in PAGE
    shares = [row["teacher"] for rows in read("bundled_recall")["recall"].values() for row in rows]
    assert f"at most {100 * max(shares):.1f} % at any" in card


def test_what_the_page_says_about_the_bundled_transformer():
    metrics = json.loads((CHECKOUT / CARDS / "tiny_teacher/metrics.json").read_text())
    epoch = metrics["epochs"][len(read("candidate_training")["epochs"]) - 1]
    assert f"had a loss of {epoch['dev_loss']:.2f} on" in PAGE
    assert f"28 passes, {metrics['epochs'][27]['step']:,} steps" in PAGE


def test_what_the_page_says_about_the_demo():
    results = read("demo_candidate")
    shares = {task: [row for row in results["recall"]["rows"] if row["task"] == task] for task in ("niah", "mqar")}
    needles = [row["student"] for row in shares["niah"]]
    assert needles == sorted(needles, reverse=True) and needles[0] > 0.9 > 0.5 > needles[-1]
    assert max(row["student"] for row in shares["mqar"][1:]) < 0.1  # hardly any of many pairs
    assert results["quality"]["ppl_ratio"] < 1.1
    assert results["teacher"]["sha256"] == read("candidate_recall")["teacher"]["sha256"]


def test_a_length_that_was_not_measured_has_no_share():
    rows = {"words": [{"task": "niah", "length": 128, "answers": 4, "teacher": 0.25, "student": None}]}
    assert share(rows, "words", "niah", 128) == 25
    assert share(rows, "words", "niah", 128, "student") is None
    assert share(rows, "words", "niah", 256) is None


def test_a_student_has_its_rows_once_it_is_measured(monkeypatch):
    def with_student(name, root=CHECKOUT):
        if name != bundled_tables.STUDENT:
            return read(name, root)
        recall = {
            words: [row | {"student": row["teacher"] / 4} for row in rows]
            for words, rows in read("candidate_recall")["recall"].items()
        }
        return {"recall": recall, "stages": [{"tokens": 2_000_000}], "keep": [5], "heldout": {"ppl_ratio": 1.02}}

    before = bundled_tables.bundled_recall_table(CHECKOUT), bundled_tables.bundled_predictions_table(CHECKOUT)
    assert "its GKA student" not in before[0] and "| open |" in before[1]
    monkeypatch.setattr(bundled_tables, "read", with_student)
    monkeypatch.setattr(bundled_tables, "MEASUREMENTS", {bundled_tables.STUDENT: ""})
    table, predictions = (
        bundled_tables.bundled_recall_table(CHECKOUT),
        bundled_tables.bundled_predictions_table(CHECKOUT),
    )
    assert "| needle | its GKA student | 25.0 |" in table and "layer 5, read 2.0M tokens" in table
    assert "needles at 256 that the student keeps | at least half | 25 % | missed" in predictions
    assert "needles at 1024 that the student keeps | less than half | 25 % | right" in predictions
