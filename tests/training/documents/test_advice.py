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
    assert "it has the lowest KL of these mixers with a transformer that recalls (below)" in text_of("README.md")
    assert "Of these mixers it has the lowest KL, with a transformer that recalls" in text_of(
        "training/convert_your_model.md"
    )
    table = read("conversion_table")
    first = {name: chosen(table, name, 0.0) for name in MIXERS}
    assert min(first, key=lambda name: kl(first[name]) if first[name] else 9) == "gka"
    for kept in (0, 1, 3, 6):
        found = {name: kl(students[kept, "uniform", name]) for name in MIXERS if (kept, "uniform", name) in students}
        assert min(found, key=found.get) == "gka" and {"lattice", "mamba2"} <= found.keys()


def test_lattice_recalls_as_much_as_gka_with_chosen_layers_only(students):
    assert "as many needles and pairs at 1,024 tokens as with `gka`; without kept layers" in text_of("README.md")
    assert "chosen by `memmix select` it keeps as much recall as `gka`; without kept layers it keeps less" in text_of(
        "training/convert_your_model.md"
    )
    for keep in (1, 3, 6):
        gka, lattice = (students[keep, "select", name] for name in ("gka", "lattice"))
        for task in ("niah", "mqar_32"):
            assert share(lattice, task, 1024) > share(gka, task, 1024) - 2
    gka, lattice = (students[0, "uniform", name] for name in ("gka", "lattice"))
    assert share(gka, "niah", 1024) > 4 * share(lattice, "niah", 1024)


def test_what_the_documents_say_of_kept_layers(students):
    own, readme = text_of("training/experiments/recall_teacher/README.md"), text_of("README.md")
    advice = text_of("training/convert_your_model.md")
    assert "Three of twelve, chosen by `memmix select`, are enough for needles and pairs up to 1,024 tokens" in readme
    for name in ("gka", "lattice", "gla", "mamba2"):
        three, one = (students[keep, "select", name] for keep in (3, 1))
        assert share(three, "niah", 1024) == 100 and share(three, "mqar_32", 1024) > 97
        assert share(one, "niah", 1024) > 97 and share(one, "mqar_32", 1024) > 96
        middle = students[1, "uniform", name]
        assert 50 <= share(middle, "niah", 2048) <= 64 and share(middle, "mqar_32", 2048) < 14
    assert "For `coffee` the choice of one layer was useless, and for `ska` that of one and of three" in advice
    assert (
        "`gka` has 1.19 times the perplexity of the one of 23M parameters with no attention layer, and 1.03" in advice
    )
    ratios = [
        [row["heldout_ppl_ratio"] for row in students[key]] for key in ((0, "uniform", "gka"), (3, "select", "gka"))
    ]
    assert [f"{statistics.fmean(found):.2f}" for found in ratios] == ["1.19", "1.03"]
    three = [students[3, "select", name] for name in ("gka", "lattice", "window-64")]
    assert "97 and 98 % of 32 pairs, the window of 64 tokens 87 % (needles: 85, 90 and 79 %)" in own
    assert (
        "`gka` answers 97 % of the pairs, the control 87 %" in readme
        and "97 and 98 % of the pairs, the control 87" in advice
    )
    assert [round(share(rows, "mqar_32", 2048)) for rows in three] == [97, 98, 87]
    assert [int(share(rows, "niah", 2048)) for rows in three] == [85, 90, 78]  # 78.75
    useless = [students[keep, "select", name] for keep, name in ((1, "coffee"), (1, "ska"), (3, "ska"))]
    assert {share(rows, task, 1024) for rows in useless for task in ("niah", "mqar_32")} == {0}
    assert "COFFEE chose layer 11 and SKA layer 4" in own
    kept = [
        {tuple(i for i, kind in enumerate(row["types"]) if kind == "attention") for row in rows} for rows in useless
    ]
    assert kept == [{(11,)}, {(4,)}, {(0, 4, 5)}]
    scores = {
        row["layout"]: row["ranking"]["layers"]
        for row in read("recall_grid")["rows"]
        if row.get("ranking") and not row["seed"]
    }
    assert "With every mixer but SKA, the answers need layers 9 and 6 most" in own
    for name in ("gka", "lattice", "gla", "mamba2", "coffee"):
        assert {layer["layer"] for layer in sorted(scores[name], key=lambda layer: -layer["nll"])[:2]} == {6, 9}
    assert "0.166 in layer 11, more than the loss of answers in layer 9 (0.103)" in own
    coffee = scores["coffee"]
    assert (f"{coffee[11]['kl']:.3f}", f"{coffee[9]['nll']:.3f}") == ("0.166", "0.103")
    weighted = sorted(coffee, key=lambda layer: -(layer["kl"] + 4 * layer["nll"]))
    assert "the choice would be layers 9, 6 and 11" in own and [layer["layer"] for layer in weighted[:3]] == [9, 6, 11]
    assert "in layers 4, 0 and 5 (losses of 2.6, 1.9 and 1.2 nats)" in own
    assert [f"{scores['ska'][layer]['nll']:.1f}" for layer in (4, 0, 5)] == ["2.6", "1.9", "1.2"]
    assert "The second seed of GKA chose layer 6" in own
    assert [row["types"].index("attention") for row in students[1, "select", "gka"]] == [9, 6]
    said = (
        "With the chosen layers its KL is 0.107, 0.048 and 0.015 with one, three and six (GKA: 0.128, 0.054 and 0.017)"
    )
    assert said in own
    found = [[f"{kl(students[n, 'select', name]):.3f}" for n in (1, 3, 6)] for name in ("window-64", "gka")]
    assert found == [["0.107", "0.048", "0.015"], ["0.128", "0.054", "0.017"]]
    assert "and the KL of GKA is lower by 14 to 54 %" in own
    by = [1 - kl(students[key]) / kl(students[key[:2] + ("gla",)]) for key in students if key[0] and key[2] == "gka"]
    assert [round(100 * share_of) for share_of in (min(by), max(by))] == [14, 54]


def test_what_the_readme_says_of_the_recall_teacher_and_its_longest_student(students):
    readme, gate = text_of("README.md"), read("recall_teacher")["gate"]
    assert "Of chains of two steps it follows 91 % at 1,024 tokens" in readme
    assert (round(100 * gate["variables"]["exact"]), gate["passed"]) == (91, True)
    assert "(with three layers of `gka` 69 %, the transformer 90 % of the same chains)" in readme
    teacher = [row for row in read("recall_grid")["rows"] if row["stage"] == "teacher"]
    assert round(share(students[3, "select", "gka"], "variables", 1024)) == 69
    assert round(share(teacher, "variables", 1024)) == 90
    assert "If the pairs fill all of these 1,024 tokens, it knows at most a fifth of them." in readme
    assert "At 2,048 tokens, or with words that no drill contained, it knows fewer of the 32" in readme
    longer = [[read(name)] for name in ("recall_raised", "recall_raised_seed1", "recall_raised_long")]
    for rows in longer:
        known = share(rows, "mqar_32", 1024)
        assert share(rows, "niah", 1024) >= 95 and known > 90 and share(rows, "mqar", 1024) <= 20
        assert max(share(rows, "mqar_32", 2048), share(rows, "mqar_32_unseen", 1024)) < known - 20
    advice = text_of("training/convert_your_model.md")
    assert "knows only 13 and 7 % of them, and of 32 pairs with words that no drill contained 20 and 56 %" in advice
    assert [round(share(rows, "mqar", 1024)) for rows in longer[::2]] == [13, 7]
    assert [round(share(rows, "mqar_32_unseen", 1024)) for rows in longer[::2]] == [20, 56]
    assert "a perplexity ratio of 1.093 and finds no needle" in readme and "(1.093 instead of 1.280 times" in advice
    plain, full = (read(f"recall_{name}") for name in ("raised_plain", "raised"))
    assert [f"{run['heldout_ppl_ratio']:.3f}" for run in (plain, full)] == ["1.093", "1.280"]
    assert share([plain], "niah", 1024) == 0


def test_what_is_said_of_the_earlier_recall_teacher():
    own = text_of("training/experiments/recall_teacher/even.md")
    longer = [[read(name)] for name in ("recall_even_raised", "recall_even_raised_long")]
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
    assert "has a KL that is 8 % lower than that of Lattice" in text and len(small) == len(large) == 2
    assert round(100 * (kl(small) / kl(of["lattice"]) - 1)) == -8
    assert "(65 and 31 % at 256 tokens, 18 and 2 % at 1024)" in text
    found = [int(share(rows, "niah", length)) for length in (256, 1024) for rows in (small, of["lattice"])]
    assert found == [65, 31, 17, 2]  # 17.5
    assert "it takes GKA in all twelve layers" in text
    assert {kind for row in large for kind in row["types"]} == {"gka"}
    assert "(0.238 and 0.252), with 6 % fewer bytes" in text
    assert [f"{kl(rows):.3f}" for rows in (window, small)] == ["0.238", "0.252"]
    assert round(100 * (1 - window[0]["state_bytes"] / small[0]["state_bytes"])) == 6
    assert {share(window, "niah", length) for length in (256, 512, 1024, 2048)} == {20}
    assert "its KL is 7 % higher with the transformer that recalls, and more than twice as high with" in text
    assert round(100 * (kl(of["echo"]) / kl(of["mamba2"]) - 1)) == 7
    assert (
        "the KL was 8 % lower, too; at the bytes of GKA it took GKA in nine layers, and its KL was 3 % higher" in text
    )
    before = {name: rows for (keep, _, name), rows in groups(read("recall_even_grid")).items() if keep == 0}
    assert round(100 * (kl(before["select, bytes of lattice"]) / kl(before["lattice"]) - 1)) == -8
    chosen_before = before["select, bytes of gka"]
    assert chosen_before[0]["types"].count("gka") == 9
    assert round(100 * (kl(chosen_before) / kl(before["gka"]) - 1)) == 3
    first = {row["layout"]: row for row in read("mixtures_h200")["rows"] if "heldout_kl" in row}
    assert first["echo"]["heldout_kl"] > 2 * first["mamba2"]["heldout_kl"]
    pair = [first[name] for name in ("select", "gka")]
    assert "(0.101 and 0.102)" in text and [f"{row['heldout_kl']:.3f}" for row in pair] == ["0.101", "0.102"]
    assert "| 0.295 (1 seed) |" in text and "(0.295 and 0.266 above the transformer's)" in text


def test_what_coffee_says_of_symbol_8_and_of_further_seeds():
    text, card = (text_of(path) for path in ("training/experiments/coffee/README.md", "model_cards/coffee/README.md"))
    runs = read("coffee_fixed8")["runs"]
    lengths = {run["task"]["length"]: run for run in runs.values() if run["table"] == 5}
    assert (
        "by all eight seeds at every length of Table 5" in text
        and "All eight seeds reach 0.99 at every length" in card
    )
    assert {(run["seeds"], run["seeds_at_0.99"]) for run in lengths.values()} == {(8, 8)} and len(lengths) == 4
    (target,) = (run for run in runs.values() if run["task"] == {"target": 2})
    one, two = (run for run in runs.values() if run["table"] == 3)
    assert "by six of eight with a target of two symbols, and by three of eight with one symbol of noise" in text
    assert [run["seeds_at_0.99"] for run in (target, one)] == [6, 3] and "(best 0.853;" in card
    assert f"{two['best_accuracy']['max']:.3f}" == "0.853" and "after 62 of the paper's 100 epochs" in text
    assert round(two["iterations"] / 10_000) == 62
    before = list(read("coffee_table3")["runs"].values())
    medians = [[statistics.median(best_until(run, 10_000)) for run in pair] for pair in ((one, two), before)]
    assert "higher by 8 and 5 points after one epoch" in text
    assert [round(100 * (ours - theirs)) for ours, theirs in zip(*medians, strict=True)] == [8, 5]
    early, five = (best_until(lengths[256], iterations) for iterations in (16_000, 50_000))
    assert f"{statistics.median(early):.3f}" == "0.720" and "after 1.5 (0.720)" in text
    assert f"{statistics.median(five):.3f}" == "0.990" and min(five) > 0.96
    assert sum(accuracy >= 0.99 for accuracy in best_until(lengths[128], 50_000)) == 8
    further, first = read("coffee_table2_seeds")["runs"], read("coffee_table2")["runs"]
    assert "(11 and 9 of 32 after 22 epochs, 12 after 66)" in text and "(13 and 17; 19 after 65)" in text
    for dim, said in ((4, [11, 9, 12]), (8, [13, 17, 19])):
        run, other = (next(run for run in of.values() if run["dim"] == dim) for of in (further, first))
        end = max({p["iteration"] for p in run["curve"]} & {p["iteration"] for p in other["curve"]})
        found = [best_until(other, end), best_until(run, end), run["best_accuracy_of_seeds"]]
        assert [sum(accuracy >= 0.99 for accuracy in best) for best in found] == said and round(end / 10_000) == 22


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
