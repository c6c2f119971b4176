"""The page about the bundled models: what its prose says, from the results; shares of the tables."""

import math

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.bundled import versions
from hf_memmix.training.documents import bundled_tables
from hf_memmix.training.documents.bundled_tables import share
from hf_memmix.training.documents.measurements import CARDS, read
from hf_memmix.training.evaluation.probes import tasks

PAGE = " ".join((CHECKOUT / "training/bundled/README.md").read_text(encoding="utf-8").split())


def cut_ratio(name):
    (row,) = [row for row in read(name)["rows"] if row["context"] == 64]
    return f"{100 * (row['ratio'] - 1):.0f} %"


def test_what_the_page_says_about_the_candidate():
    run = read("candidate_training")
    dev = [row["dev_loss"] for row in run["epochs"]]
    mqar = [row["dev_recall"]["mqar"] for row in run["epochs"]]
    assert mqar[1]["256"] > 0.8 > mqar[1]["1024"] and mqar[2]["1024"] > 0.9
    assert f"64 instead of 512 tokens its perplexity rises by {cut_ratio('candidate_context')}" in PAGE
    assert f"that of the first bundled one by {cut_ratio('context_use_first')}" in PAGE
    assert (
        f"and the candidate has {dev[-1]:.2f} at the end" in PAGE
        and f"{len(run['epochs'])} instead of 28 passes" in PAGE
    )
    perplexity = {name: read(name)["heldout"]["perplexity"] for name in ("candidate_recall", "first_recall")}
    assert 1.9 < perplexity["candidate_recall"] / perplexity["first_recall"] < 2.1


def test_what_the_page_says_about_the_first_bundled_transformer():
    metrics = read("first_training")
    epoch = metrics["epochs"][len(read("candidate_training")["epochs"]) - 1]
    assert f"had a loss of {epoch['dev_loss']:.2f} on" in PAGE
    assert len(metrics["epochs"]) == 28 and read("bundled_run_muon")["arguments"]["epochs"] == 29


def card_of(name):
    return " ".join((CHECKOUT / CARDS / name / "README.md").read_text(encoding="utf-8").split())


def test_what_page_and_cards_say_about_the_bundled_transformer():
    first, bundled, card = read("first_recall"), read("bundled_recall"), card_of("tiny_teacher")
    best = max(row["teacher"] for rows in first["recall"].values() for row in rows)
    assert f"answers at most {100 * best:.1f} % of the probes" in PAGE
    assert f"at most {100 * best:.1f} % of these" in card

    def at(task, length=1024, words="words"):
        return f"{share(bundled['recall'], words, task, length):.1f} %"

    assert share(bundled["recall"], "words", "niah", 1024) == 100
    assert f"{at('mqar')} of the pairs of MQAR at 1024 tokens, and {at('mqar', words='unseen')} with words" in PAGE
    assert f"{at('mqar')} of as many pairs" in card and f"{at('mqar', words='unseen')} with words" in card
    assert f"({at('kv', 128)} at 128 tokens, {at('kv')} at 1024)" in PAGE and f"in {at('kv')}" in card
    hops = sorted(row["teacher"] for row in bundled["recall"]["words"] if row["task"] == "variables")
    assert f"reaches {100 * hops[0]:.1f} to {100 * hops[-1]:.1f} %" in PAGE
    assert f"no chain of two hops: {at('variables')}" in card and f"right in {100 / tasks.CHAINS:.0f} %" in PAGE
    perplexity = [run["heldout"]["perplexity"] for run in (bundled, first)]
    worse = f"{100 * (perplexity[0] / perplexity[1] - 1):.1f} %"
    said = "Held-out perplexity is {} higher than that of the first one ({:.2f} and {:.2f})"
    assert said.format(worse, *perplexity) in PAGE
    assert f"costs {worse} of perplexity" in card and f"perplexity {perplexity[1]:.2f})" in card
    (row,) = (row for row in read("context_use")["rows"] if row["context"] == 64)
    assert f"{cut_ratio('context_use')} higher, with a standard error of {100 * row['error']:.0f} %" in PAGE


def test_what_the_pages_say_about_the_students():
    (kept, pure), teacher = bundled_tables.students(CHECKOUT).values(), read("bundled_recall")["recall"]
    assert kept["keep"] == [5] and "the attention of layer 5 kept" in PAGE and pure["keep"] == "none"
    pairs = [
        f"{share(run['recall'], words, 'mqar', 1024, 'student'):.1f} %"
        for run in (kept, pure)
        for words in ("words", "unseen")
    ]
    assert f"{pairs[0]} of the pairs at 1024 tokens, {pairs[1]} with unseen words" in PAGE
    worse = f"{100 * (pure['heldout']['ppl_ratio'] - 1):.1f} %"
    assert f"perplexity is {worse} above that of its teacher" in PAGE

    def of_pure(task, length):
        return f"{share(pure['recall'], 'words', task, length, 'student'):.1f}"

    assert of_pure("niah", 256) == "100.0" and f"{of_pure('niah', 1024)} % at 1024" in PAGE
    assert f"{of_pure('mqar', 128)} % are right at 128 tokens, {pairs[2]} at 1024" in PAGE
    advice = " ".join((CHECKOUT / "training/convert_your_model.md").read_text(encoding="utf-8").split())
    whole = f"{share(teacher, 'words', 'mqar', 1024):.1f} %"
    assert f"is {worse} above that of the transformer" in advice and f"within {worse}" in advice
    assert f"answers {pairs[2].removesuffix(' %')} instead of {whole}" in advice
    assert f"layers kept it answers {pairs[0]}" in advice
    readme = " ".join((CHECKOUT / "README.md").read_text(encoding="utf-8").split())
    assert f"its perplexity is only {worse} higher" in readme


def test_what_the_page_says_about_the_fifth_run():
    run, low = read("bundled_run_on"), read("bundled_run_low")
    text = [row["dev_loss"] for row in (low["epochs"][-1], *run["epochs"])]
    assert text == sorted(text, reverse=True) and f"in every pass, from {text[0]:.2f} to {text[-1]:.2f}" in PAGE
    answers = [f"{row['epochs'][-1]['dev_answers']:.2f}".removeprefix("0") for row in (low, run)]
    assert f"of answers from {answers[0]} to {answers[1]}" in PAGE
    assert f"a step takes {bundled_tables.step_seconds(run):.3f} s".replace("0.", ".") in PAGE
    limit, seconds = run["arguments"]["seconds"], [row["seconds"] for row in run["epochs"]]
    assert f"Its {len(seconds)} passes took {seconds[-1]:.0f} s of the {limit:.0f} s" in PAGE
    assert f"about {seconds[0] - (seconds[-1] - seconds[0]) / (len(seconds) - 1):.0f} s of the first pass" in PAGE
    ahead = [s / limit > (i + 1) / len(seconds) for i, s in enumerate(seconds)]
    assert "in the first ten passes" in PAGE and sum(ahead) in (9, 10, 11)
    gap = text[-1] - bundled_tables.best_pass(read("first_training"))["dev_loss"]
    assert f"still {gap:.2f} above".replace("0.", ".") in PAGE


def test_the_bundled_run_meets_the_conditions_and_no_other_candidate_does():
    assert "held-out perplexity below 34, and needles and MQAR of at least 95 % at 1024 tokens" in PAGE
    assert read("bundled_recall")["heldout"]["perplexity"] < 34
    recall = read("bundled_recall")["recall"]
    assert all(share(recall, "words", task, 1024) >= 95 for task in ("niah", "mqar"))
    assert min(read(name)["heldout"]["perplexity"] for name in bundled_tables.CANDIDATES.values()) > 34


def rate_after(run, passes):
    """The learning rate after some passes, as a share of the highest one."""
    total = run["arguments"]["epochs"] * run["epochs"][0]["step"]
    warmup = min(run["arguments"]["warmup"], total // 10)
    return (1 + math.cos(math.pi * (run["epochs"][passes - 1]["step"] - warmup) / (total - warmup))) / 2


def test_predictions_of_a_run_of_another_recipe_are_marked():
    table = bundled_tables.bundled_predictions_table(CHECKOUT)
    assert "| 10 | seconds of a step with three candidates | at most 0.04 | 0.039 with two | open |" in table
    assert "8 and 9 were written for a second run that was not made" in PAGE
    assert bundled_tables.bundled_runs_table(CHECKOUT).endswith("Commit d1966e5, 8b7d224, e4e5f7e.")


def test_what_the_page_says_about_the_third_and_the_fourth_run():
    bundled = read("first_training")
    muon, adam, mild, low = (read(f"bundled_run_{name}") for name in ("muon", "adam", "mild", "low"))
    text = [bundled_tables.best_pass(run)["dev_loss"] for run in (muon, adam, bundled)]
    assert "{:.2f} with Muon and {:.2f} with AdamW (first bundled one: {:.2f})".format(*text) in PAGE
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


def test_what_the_readme_says_about_the_demo():
    results = read("demo")
    shares = {task: [row for row in results["recall"]["rows"] if row["task"] == task] for task in ("niah", "mqar")}
    needles = [row["student"] for row in shares["niah"]]
    assert needles == sorted(needles, reverse=True) and needles[0] > 0.9 > 0.5 > needles[-1]
    assert max(row["student"] for row in shares["mqar"]) < 0.2
    readme = " ".join((CHECKOUT / "README.md").read_text(encoding="utf-8").split())
    assert f"is {100 * (results['quality']['ppl_ratio'] - 1):.0f} % worse in perplexity" in readme
    assert results["teacher"]["sha256"] == versions.bundled_teacher()["sha256"]


def test_a_length_that_was_not_measured_has_no_share():
    rows = {"words": [{"task": "niah", "length": 128, "answers": 4, "teacher": 0.25, "student": None}]}
    assert share(rows, "words", "niah", 128) == 25
    assert share(rows, "words", "niah", 128, "student") is None
    assert share(rows, "words", "niah", 256) is None


def test_a_line_of_the_runs_has_the_recall_of_the_pass_that_was_kept():
    run = read("bundled_run_muon")
    kept, last = (row["dev_recall"]["mqar"]["1024"] for row in (bundled_tables.best_pass(run), run["epochs"][-1]))
    assert run["best_epoch"] < len(run["epochs"]) and kept != last
    assert bundled_tables.dev_share(run, "mqar") == f"{100 * kept:.1f}"
