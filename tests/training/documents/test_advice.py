"""Advice and summaries in prose follow from the measurements: mixers, recall, mixtures, COFFEE's lengths, ENC."""

import statistics

import pytest

from hf_memmix.conversion.records import CHECKOUT
from hf_memmix.training.documents import kernel_tables
from hf_memmix.training.documents.measurements import read
from hf_memmix.training.documents.tables import demo_table
from hf_memmix.training.experiments.coffee.report import best_until
from hf_memmix.training.experiments.common.harness import matches
from hf_memmix.training.experiments.conversion.table_report import chosen
from hf_memmix.training.experiments.gka.predictions import Figures
from hf_memmix.training.experiments.gka.variants_report import with_recall_rows
from hf_memmix.training.experiments.recall_teacher.probing import mean_recall
from hf_memmix.training.experiments.recall_teacher.report import groups

MIXERS = ("gka", "lattice", "mamba2", "coffee", "ska")


def text_of(path):
    return " ".join((CHECKOUT / path).read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def students():
    """The students of the recall teacher, as in `groups`."""
    return groups(read("recall_grid"))


def share(rows, task, length):
    """The mean share of exact answers over seeds, in percent."""
    return 100 * statistics.fmean(mean_recall(row["recall"], task, length) for row in rows)


def kl(rows):
    return statistics.fmean(row["heldout_kl"] for row in rows)


def test_gka_has_the_lowest_kl_of_the_mixers_with_both_transformers(students):
    assert "it has the lowest KL of these mixers with the first bundled transformer" in text_of("README.md")
    assert "Of these mixers it has the lowest KL, with the first bundled transformer" in text_of(
        "training/convert_your_model.md"
    )
    table = read("conversion_table")
    first = {name: chosen(table, name, 0.0) for name in MIXERS}
    assert min(first, key=lambda name: kl(first[name]) if first[name] else 9) == "gka"
    for kept in (0, 1, 3, 6):
        found = {name: kl(students[kept, "uniform", name]) for name in MIXERS if (kept, "uniform", name) in students}
        assert min(found, key=found.get) == "gka" and {"lattice", "mamba2"} <= found.keys()


def test_lattice_recalls_nearly_as_much_as_gka_with_kept_layers_only(students):
    assert "as many needles and nearly as many pairs at 1,024 tokens as with `gka`; without" in text_of("README.md")
    assert "Then it keeps nearly as much recall as `gka`; without kept layers it keeps less" in text_of(
        "training/convert_your_model.md"
    )
    for keep, how, layout in list(students):
        if layout != "lattice":
            continue
        pair = [students[keep, how, name] for name in ("gka", "lattice")]
        needles, pairs = ([share(rows, task, 1024) for rows in pair] for task in ("niah", "mqar_32"))
        if keep:
            assert needles == [100, 100] and abs(pairs[0] - pairs[1]) < 2
        else:
            assert needles[0] > 4 * needles[1] and pairs[0] > 5 > pairs[1]


def test_what_the_readme_says_of_the_recall_teacher_and_its_longest_student(students):
    readme, gate = text_of("README.md"), read("recall_teacher")["gate"]["variables"]
    assert "it follows 77 % at 1,024 tokens, less than the 80 % that it was to reach" in readme
    assert (round(100 * gate["exact"]), gate["least"], gate["passed"]) == (77, 0.8, False)
    assert "with three layers 56 %, the transformer 72 % of the same chains" in readme
    teacher = [row for row in read("recall_grid")["rows"] if row["stage"] == "teacher"]
    assert int(share(students[3, "uniform", "gka"], "variables", 1024)) == 56
    assert int(share(teacher, "variables", 1024)) == 72
    assert "If the pairs fill all of these 1,024 tokens, it knows at most a quarter of them." in readme
    assert "At 2,048 tokens, or with words that no drill contained, it knows fewer of the 32" in readme
    longer = [[read(name)] for name in ("recall_raised", "recall_raised_long")]
    for rows in longer:
        known = share(rows, "mqar_32", 1024)
        assert share(rows, "niah", 1024) == 100 and known > 95 and share(rows, "mqar", 1024) <= 25
        assert max(share(rows, "mqar_32", 2048), share(rows, "mqar_32_unseen", 1024)) < known - 20
    advice = text_of("training/convert_your_model.md")
    assert "knows only 10 and 25 % of them, and of 32 pairs with words that no drill contained 38 and 53 %" in advice
    assert [round(share(rows, "mqar", 1024)) for rows in longer] == [10, 25]
    assert [round(share(rows, "mqar_32_unseen", 1024)) for rows in longer] == [38, 53]
    own = text_of("training/experiments/recall_teacher/README.md")
    assert '"MQAR, full" still rises with the training, at 512 tokens from 27 to 58 %' in own
    assert [round(share(rows, "mqar", 512)) for rows in longer] == [27, 58]


def test_what_the_advice_says_of_twice_as_many_pairs():
    advice = text_of("training/convert_your_model.md")
    assert (
        "rule answers 94 % at its best rate (one seed), GDN 71 or 96 % in two runs with one seed at one rate" in advice
    )
    rows = [row for row in read("recall")["rows"] if row["pairs"] == 64]
    rows += [row for row in read("gka_figure3a")["rows"] if row["hidden_size"] == 64]
    best = [max(100 * row.get("accuracy", 0) for row in rows if row["model"] == name) for name in ("delta", "gdn")]
    assert [round(value) for value in best] == [94, 96]
    runs = [100 * row["accuracy"] for row in rows if matches(row, {"model": "gdn", "lr": 7.5e-4, "seed": 0})]
    assert sorted(map(round, runs)) == [71, 96]
    assert "`gka` 65, 79 and 0 % with three seeds, and 98, 97 and 68 % without its decay" in advice
    of = Figures.from_rows(with_recall_rows(read("gka_variants_recall"), read("recall"))["rows"]).of
    found = [[round(100 * of[name][seed]["accuracy"]) for seed in (0, 1, 2)] for name in ("s = D", "no decay")]
    assert found == [[65, 79, 0], [98, 97, 68]]
    small = [row for row in rows if matches(row, {"model": "mamba2", "hidden_size": 64})]
    assert "twice that of prediction 3, recalls 8 % at the larger of two rates" in text_of(
        "training/experiments/baselines/README.md"
    )
    best = max(small, key=lambda row: row["accuracy"])
    assert round(100 * best["accuracy"]) == 8 and len(small) == 2 and best["lr"] == max(row["lr"] for row in small)


def test_what_the_mixtures_say(students):
    text = text_of("training/experiments/mixtures/README.md")
    of = {name: rows for (keep, _, name), rows in students.items() if keep == 0}
    small, large, window = of["select, bytes of lattice"], of["select, bytes of gka"], of["window-64"]

    def above(rows, others):
        return [100 * (kl(rows) / kl([other]) - 1) for other in others]

    assert "has a KL that is 8 % lower than that of Lattice" in text
    assert all(round(by) == -8 for by in above(small, of["lattice"]))
    assert "(60 %; Lattice 38 % with this seed and 20 % with another)" in text and small[0]["seed"] == 0
    needles = [share([row], "niah", 256) for row in sorted(of["lattice"], key=lambda row: row["seed"])]
    assert (share(small, "niah", 256), needles) == (60, [37.5, 20])
    assert "12 % fewer bytes, a KL that is 3 % higher than that of GKA" in text
    assert round(100 * (1 - large[0]["state_bytes"] / of["gka"][0]["state_bytes"])) == 12
    assert round(100 * (kl(large) / kl(of["gka"]) - 1)) == round(above(large, of["gka"][:1])[0]) == 3
    assert "(22 and 32 % at 1024 tokens)" in text and int(share(large, "niah", 1024)) == 22
    assert round(share(of["gka"], "niah", 1024)) == 32 and large[0]["types"].count("gka") == 9
    assert "(0.267; 0.326 and 0.286), with 5 % fewer bytes than the smaller one" in text
    assert [f"{kl(rows):.3f}" for rows in (window, small, large)] == ["0.267", "0.326", "0.286"]
    assert round(100 * (1 - window[0]["state_bytes"] / small[0]["state_bytes"])) == 5
    assert "20 % at every length, where the choices find 60 and 88 % at 256 tokens" in text
    assert {share(window, "niah", length) for length in (256, 512, 1024, 2048)} == {20}
    assert round(share(large, "niah", 256)) == 88
    assert "its KL is 9 % higher with the transformer that recalls, and more than twice as high with" in text
    assert round(above(of["echo"], of["mamba2"][:1])[0]) == round(100 * (kl(of["echo"]) / kl(of["mamba2"]) - 1)) == 9
    first = {row["layout"]: row for row in read("mixtures_h200")["rows"] if "heldout_kl" in row}
    assert first["echo"]["heldout_kl"] > 2 * first["mamba2"]["heldout_kl"]
    pair = [first[name] for name in ("select", "gka")]
    assert "(0.101 and 0.102)" in text and [f"{row['heldout_kl']:.3f}" for row in pair] == ["0.101", "0.102"]
    assert "| 0.295 (1 seed) |" in text and "(0.295 and 0.266 above the transformer's)" in text


def test_what_coffee_says_of_the_epochs_of_table_5():
    text = text_of("training/experiments/coffee/README.md")
    runs = {run["task"]["length"]: run for run in read("coffee_fixed8_gpu")["runs"].values() if run["table"] == 5}
    first = {run["task"]["length"]: run for run in read("coffee_table5")["runs"].values() if "curve" in run}
    early, late = [], []
    for length in (64, 128, 256):
        run, other = runs[length], first[length]
        both = {point["iteration"] for point in run["curve"]} & {point["iteration"] for point in other["curve"]}
        assert f"{max(both) / 10_000:.1f}" == "1.4" and f"{run['curve'][-1]['iteration'] / 10_000:.1f}" == "2.7"
        early.append(f"{statistics.median(best_until(run, max(both))):.3f}")
        late.append(f"{statistics.median(best_until(run, run['curve'][-1]['iteration'])):.3f}")
    assert "from 0.987, 0.899 and 0.776 after 1.4 epochs to 1.000, 0.989 and 0.970 after 2.7" in text
    assert (early, late) == (["0.987", "0.899", "0.776"], ["1.000", "0.989", "0.970"])
    assert "four of four seeds at 64 reach the paper's 0.99, and one at 128" in text
    assert [runs[length]["seeds_at_0.99"] for length in (64, 128)] == [4, 1]
    card = text_of("model_cards/coffee/README.md")
    assert "all seeds reach 0.99 at the length of 64, and one at that of 128, where the median is 0.989" in card


def test_what_lattice_says_of_enc_as_written():
    text = text_of("training/experiments/lattice/README.md")
    rows = read("enc_as_written")["rows"]
    assert "There every loss is finite" in text and all(row["finite"] for row in rows)
    said = {"enc-as-written": "7.00 at 0.016, 6.51 at 0.008 and 6.16 at 0.004", "enc": "5.96, 6.04 and 6.17"}
    for model, figures in said.items():
        found = [
            statistics.fmean(row["curve"][-1][1] for row in rows if matches(row, {"model": model, "lr": lr}))
            for lr in (0.016, 0.008, 0.004)
        ]
        assert figures in text and all(f"{loss:.2f}" in figures for loss in found)


def test_captions_say_how_many_answers_a_share_has_and_that_kernels_differ(monkeypatch):
    needles = [row["answers"] for row in read("demo")["recall"]["rows"] if row["task"] == "niah"]
    assert set(needles) == {10} and "needle 10 (up to 16 points)" in demo_table(CHECKOUT)
    named = "[Limits](#limits) has decode with the kernels of other commits: "
    assert named in kernel_tables.generate_table(CHECKOUT)
    rows = {"generate": read("generate"), "decode_turns": [{"commit": read("generate")[0]["commit"]}]}
    monkeypatch.setattr(kernel_tables, "read", lambda name, root: rows[name])
    assert named not in kernel_tables.generate_table(CHECKOUT)
