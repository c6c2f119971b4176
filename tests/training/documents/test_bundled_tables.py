"""The page about the bundled models: what its prose says, from the results; shares of the tables."""

import json
import math

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
    assert (
        f"and the candidate has {dev[-1]:.2f} at the end" in PAGE
        and f"{len(run['epochs'])} instead of 28 passes" in PAGE
    )
    perplexity = {name: read(name)["heldout"]["perplexity"] for name in ("candidate_recall", "bundled_recall")}
    assert 1.9 < perplexity["candidate_recall"] / perplexity["bundled_recall"] < 2.1
    shares = [row["teacher"] for rows in read("bundled_recall")["recall"].values() for row in rows]
    assert f"at most {100 * max(shares):.1f} % at any" in card


def test_what_the_page_says_about_the_bundled_transformer():
    metrics = json.loads((CHECKOUT / CARDS / "tiny_teacher/metrics.json").read_text())
    epoch = metrics["epochs"][len(read("candidate_training")["epochs"]) - 1]
    assert f"had a loss of {epoch['dev_loss']:.2f} on" in PAGE
    assert len(metrics["epochs"]) == 28 and read("bundled_run_muon")["arguments"]["epochs"] == 29


def rate_after(run, passes):
    """The learning rate after some passes, as a share of the highest one."""
    total = run["arguments"]["epochs"] * run["epochs"][0]["step"]
    warmup = min(run["arguments"]["warmup"], total // 10)
    return (1 + math.cos(math.pi * (run["epochs"][passes - 1]["step"] - warmup) / (total - warmup))) / 2


def test_predictions_of_a_run_of_another_recipe_are_marked():
    table = bundled_tables.bundled_predictions_table(CHECKOUT)
    assert "| 10 | seconds of a step with three candidates | at most 0.04 | 0.039 with two | open |" in table
    assert "8 and 9 were written for a second run that was not made" in PAGE
    assert bundled_tables.bundled_runs_table(CHECKOUT).endswith("Commit d1966e5, 8b7d224.")


def test_what_the_page_says_about_the_third_and_the_fourth_run():
    bundled = json.loads((CHECKOUT / CARDS / "tiny_teacher/metrics.json").read_text())
    muon, adam, mild, low = (read(f"bundled_run_{name}") for name in ("muon", "adam", "mild", "low"))
    text = [bundled_tables.best_pass(run)["dev_loss"] for run in (muon, adam, bundled)]
    assert "{:.2f} with Muon and {:.2f} with AdamW (bundled: {:.2f})".format(*text) in PAGE
    assert f"training loss {muon['epochs'][-1]['train_loss']:.2f}" in PAGE
    plateau = [row["dev_loss"] for row in muon["epochs"][3:10]]
    assert "stays near 4.5 with Muon" in PAGE and min(plateau) > 4.4 and max(plateau) < 4.6
    fall = [adam["epochs"][i]["dev_loss"] for i in (3, 9)]
    assert "falls from {:.2f} to {:.2f} with AdamW (two of these passes are short)".format(*fall) in PAGE
    assert "AdamW had 5 short passes, Muon 3" in PAGE
    assert [run["arguments"]["short_epochs"] for run in (adam, muon)] == [5, 3]
    rates = [(muon, 4), (muon, 10), (mild, 3), (low, 4)]
    assert [round(100 * rate_after(run, passes)) for run, passes in rates] == [97, 76, 71, 46]
    assert "with 97 to 76 % of the highest rates" in PAGE and "71 % and, with half rates, 46 % of their" in PAGE
    before = [row["dev_loss"] for row in bundled["epochs"][3:10]]
    assert "had 3.7 to 3.9" in PAGE and (f"{min(before):.1f}", f"{max(before):.1f}") == ("3.7", "3.9")
    assert [len(run["epochs"]) for run in (mild, low)] == [3, 4] and "stopped after 3 and 4 of its 7 passes" in PAGE
    assert f"from nothing: {low['epochs'][-1]['dev_loss']:.2f}" in PAGE and low["epochs"][-1]["dev_loss"] < text[0]
    assert all(low["epochs"][2][key] < mild["epochs"][2][key] for key in ("dev_loss", "dev_answers"))
    assert f"after 4 passes and {low['tokens_seen'] / 1e6:.0f}M tokens" in PAGE
    assert f"A step took {bundled_tables.step_seconds(muon):.3f}".replace("0.", ".") in PAGE
    measured = [read(name)["heldout"]["perplexity"] for name in bundled_tables.CANDIDATES.values()]
    assert "none has a held-out perplexity below 34" in PAGE and min(measured) > 34


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
