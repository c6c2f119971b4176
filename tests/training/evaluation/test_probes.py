"""Probes of recall: exact lengths, answers that a model which copies gets right and a deaf one does not."""

import copy
import json
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.training.evaluation.probes import (
    TASKS,
    Material,
    by_length,
    counted_rows,
    draw,
    gain_text,
    plot_probes,
    run_probes,
)
from hf_memmix.training.evaluation.probes.counted import shares_text, wilson
from hf_memmix.training.evaluation.probes.grid import means
from hf_memmix.training.evaluation.probes.material import Answer
from hf_memmix.training.evaluation.probes.score import Scores, score
from hf_memmix.training.evaluation.probes.tasks import CUE, check_tasks
from tiny_teachers import CHAT, tiny_teacher, tiny_text, tiny_tokenizer

ANSWERED_BY_COPYING = ("niah", "niah_multi", "kv", "mqar", "copy", "fact", "facts", "pairs", "question")


@pytest.fixture(scope="module")
def bundled():
    tokenizer = AutoTokenizer.from_pretrained(asset_path("tiny_teacher"))
    return Material(tokenizer, asset_path("heldout.txt").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def small():
    return Material(tiny_tokenizer(), tiny_text(200))


class Copier(nn.Module):
    """Predicts what followed the longest earlier occurrence of the last tokens; `deaf`: always the same token."""

    def __init__(self, vocab_size, deaf=False):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size, max_position_embeddings=10**6)
        self.embedding, self.deaf = nn.Embedding(vocab_size, 1), deaf
        self.head = nn.Linear(vocab_size, vocab_size, bias=False)
        nn.init.eye_(self.head.weight)
        self.head.weight.data *= 20

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def base_model(self, input_ids, use_cache=False):
        hidden = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, ids in enumerate(input_ids.tolist()):
            for t in range(len(ids)):
                hidden[row, t, 0 if self.deaf else self.next_token(ids[: t + 1])] = 1
        return SimpleNamespace(last_hidden_state=hidden)

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.head(self.base_model(input_ids).last_hidden_state))

    @staticmethod
    def next_token(ids):
        best, length = 0, 0
        for s in range(len(ids) - 1):
            n = 0
            while n <= s and ids[s - n] == ids[len(ids) - 1 - n]:
                n += 1
            best, length = (ids[s + 1], n) if n and n >= length else (best, length)
        return best


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [97, 256])
def test_sequences_have_the_asked_length_and_hold_their_answers(bundled, task, length):
    samples = draw(task, bundled, length, 0.5, seed=3, count=4)
    assert samples == draw(task, bundled, length, 0.5, seed=3, count=4)
    assert samples != draw(task, bundled, length, 0.5, seed=4, count=4)
    for sample in samples:
        assert len(sample.ids) == len(sample.control) == length and sample.answers
        assert sample.ids != sample.control, "the control says the same"
        for answer in sample.answers:
            said = sample.ids[answer.start : answer.stop]
            assert said == sample.control[answer.start : answer.stop]
            assert any(sample.ids[i : i + len(said)] == said for i in range(answer.start - len(said) + 1))
            assert not answer.candidates or answer.candidates.count(said[0]) == 1
            assert answer.depth is None or 0 <= answer.depth <= 1


def test_depth_is_where_the_answer_stands(bundled):
    for task in ("niah", "kv", "copy", "fact", "facts", "pairs", "question"):
        for depth in (0.0, 0.5, 1.0):
            (sample,) = draw(task, bundled, 512, depth, seed=0, count=1)
            changed = [i for i, pair in enumerate(zip(sample.ids, sample.control, strict=True)) if pair[0] != pair[1]]
            assert changed[0] / 512 == pytest.approx(depth, abs=0.08)


def test_a_copying_model_recalls_and_a_constant_model_does_not(bundled):
    models = {"copier": Copier(4096), "deaf": Copier(4096, deaf=True)}
    results = run_probes(models, bundled, tasks=ANSWERED_BY_COPYING, lengths=(128,), depths=(0.0, 1.0), samples=2)
    for row in results["summary"]:
        assert row["copier"]["exact"] == 1.0 and row["copier"]["choice"] in (1.0, None)
        assert row["copier"]["gain"] > 1 and row["copier"]["nll"] < 0.1
        assert row["deaf"]["exact"] == 0 and row["deaf"]["gain"] == pytest.approx(0, abs=1e-6)


def test_a_chat_holds_text_and_question_in_one_message(bundled):
    tokenizer = copy.deepcopy(bundled.tokenizer)
    tokenizer.chat_template = CHAT
    plain, chat = bundled, Material(tokenizer, asset_path("heldout.txt").read_text(encoding="utf-8"), chat=True)
    assert check_tasks("all", chat=True) == tuple(task for task in TASKS if TASKS[task].asks)
    for task in check_tasks("all", chat=True):
        (sample,), (other,) = (draw(task, material, 192, 0.5, seed=0, count=1) for material in (chat, plain))
        (answer,) = sample.answers
        assert len(sample.ids) == 192 and answer.asked < answer.start and sample.ids != sample.control
        message = tokenizer.decode(sample.ids[len(chat.start) : answer.asked - len(chat.turn)])
        messages = [{"role": "user", "content": message}]
        whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(sample.ids[: answer.asked]) == whole
        asked_in_words = task == "question"
        assert (other.answers[0].asked < other.answers[0].start) == asked_in_words
    with pytest.raises(ValueError, match="'mqar' asks nothing"):
        draw("mqar", chat, 192, None, seed=0, count=1)
    with pytest.raises(ValueError, match="no chat template"):
        Material(tiny_tokenizer(), tiny_text(200), chat=True)


def test_a_copied_passage_occurs_once_before(bundled, small):
    for sample in draw("copy", bundled, 512, 0.5, seed=0, count=4):
        (answer,) = sample.answers
        passage = sample.ids[answer.start - CUE : answer.stop]
        assert sum(sample.ids[i : i + len(passage)] == passage for i in range(512)) == 2
        assert sum(sample.control[i : i + len(passage)] == passage for i in range(512)) == 1
    with pytest.raises(ValueError, match="no passage that occurs once"):
        draw("copy", small, 500, 0.5, seed=0, count=1)


def test_answers_of_a_long_sequence_have_other_values_in_the_control(bundled):
    """It has more pairs than there are values, so none is free for the control."""
    (sample,) = draw("mqar", bundled, 8192, None, seed=0, count=1)
    end = min(answer.start for answer in sample.answers)
    assert len(sample.answers) > 2 * len(bundled.values)
    changed = sum(ours != theirs for ours, theirs in zip(sample.ids[:end], sample.control[:end], strict=True))
    assert changed > 0.9 * len(sample.answers) and sum(a.replaced for a in sample.answers) > 0.9 * len(sample.answers)


def test_answers_that_the_control_repeats_do_not_count_as_no_gain(bundled):
    """No other value has as many tokens, so the control of a needle is the sample itself."""
    samples = draw("niah", bundled, 128, 0.5, seed=0, count=300)
    same = [sample for sample in samples if sample.ids == sample.control]
    assert same and all(sample.answers[0].replaced == (sample not in same) for sample in samples)
    chosen = [*same[:2], *[sample for sample in samples if sample not in same][:2]]
    scores = score(Copier(4096), chosen)
    assert [one.gain is None for one in scores] == [True, True, False, False]
    assert means(scores)["gain"] == pytest.approx((scores[2].gain + scores[3].gain) / 2)
    assert means(scores)["gain_error"] == pytest.approx(abs(scores[2].gain - scores[3].gain) / 2)
    assert gain_text(means(scores[:2])) == "" and means(scores[:2])["gain"] is None


def test_answers_of_one_sequence_do_not_count_as_independent():
    """The same answer several times in its sequence tells no more about the gain than once."""
    answer = Answer(1, 2, None)
    once = [Scores(answer, 1.0, True, None, gain, sequence) for sequence, gain in enumerate((0.5, 1.0, 3.0))]
    error = statistics.stdev(one.gain for one in once) / 3**0.5
    assert means(once)["gain_error"] == pytest.approx(error)
    assert means([one for one in once for _ in range(9)])["gain_error"] == pytest.approx(error)
    # two lengths have sequences of the same numbers, which are others
    both = means([*once, *once], [(length, one.sequence) for length in (0, 1) for one in once])
    assert both["gain_error"] == pytest.approx(statistics.stdev([0.5, 1.0, 3.0] * 2) / 6**0.5)
    alone = means([one for one in once[:1] for _ in range(9)])
    assert alone["gain_error"] is None and gain_text(alone) == "0.50"


def test_the_gain_of_a_task_has_the_error_of_its_sequences(small):
    """Each of two sequences of associative recall has many answers."""
    model, arguments = {"model": tiny_teacher(layers=1)}, {"tasks": ("mqar",), "lengths": (64, 128), "samples": 2}
    results = run_probes(model, small, **arguments)
    sums, gains = [], []
    for length in arguments["lengths"]:
        for sample in draw("mqar", small, length, None, 0, 2):
            found = [one.gain for one in score(model["model"], [sample]) if one.gain is not None]
            gains += found
            sums.append(found)
    mean = statistics.fmean(gains)
    error = (4 / 3 * sum(sum(g - mean for g in one) ** 2 for one in sums)) ** 0.5 / len(gains)
    (row,) = results["summary"]
    assert len(gains) > 4 and row["model"]["gain_error"] == pytest.approx(error, rel=1e-3)
    assert results["settings"]["gain_error_over"] == "sequences"


def test_chains_and_counting_are_more_than_copying(small):
    results = run_probes({"copier": Copier(32)}, small, tasks=("variables", "common_words"), lengths=(96,), samples=8)
    assert all(row["copier"]["exact"] < 0.7 for row in results["summary"])


def test_every_model_reads_the_same_and_a_short_one_is_left_out(small, tmp_path):
    models = {"teacher": tiny_teacher(layers=2, max_position_embeddings=64), "student": tiny_teacher(layers=1)}
    arguments = {"tasks": ("niah", "mqar", "common_words"), "lengths": (64, 96), "depths": (0.0, 1.0), "samples": 2}
    seen = []
    results = run_probes(models, small, **arguments, progress=lambda *at: seen.append(at))
    assert json.loads(json.dumps(results)) == results and seen[-1] == (12, 12)
    assert {c["length"] for c in results["cells"] if c["teacher"] is None} == {96}
    assert all(c["student"] is not None for c in results["cells"])
    assert [row["depth"] for row in results["cells"] if row["task"] == "common_words"] == [None, None]
    again = run_probes(models, small, **arguments, batch_size=1)
    for ours, theirs in zip(results["cells"], again["cells"], strict=True):
        assert ours["student"]["nll"] == pytest.approx(theirs["student"]["nll"], rel=1e-5)
    for measure in ("choice", "gain"):
        plot_probes(results, tmp_path / "plot.png", measure)
        assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_shares_by_length_are_those_of_all_answers_of_all_depths(small):
    models = {"teacher": tiny_teacher(layers=2, max_position_embeddings=64), "student": Copier(64)}
    arguments = {"tasks": ("niah", "mqar"), "lengths": (64, 96), "depths": (0.0, 1.0), "samples": 3}
    results = run_probes(models, small, **arguments)
    rows = by_length(results)
    assert [(row["task"], row["length"]) for row in rows] == [("niah", 64), ("niah", 96), ("mqar", 64), ("mqar", 96)]
    assert [row["teacher"] is None for row in rows] == [False, True, False, True]
    for row in rows:
        length = row["length"]
        depths = arguments["depths"] if row["task"] == "niah" else (None,)
        samples = [s for depth in depths for s in draw(row["task"], small, length, depth, 0, 3)]
        found = score(models["student"], samples)
        assert row["answers"] == len(found)
        assert row["student"] == pytest.approx(sum(s.exact for s in found) / len(found))


def test_a_cell_counts_if_the_teacher_knows_the_answer(small):
    """And choice stands beside exact, over all depths, with its interval."""
    models = {"teacher": Copier(64), "student": tiny_teacher(layers=1, max_position_embeddings=64)}
    arguments = {"tasks": ("niah",), "lengths": (64, 96), "depths": (0.0, 1.0), "samples": 3}
    results = run_probes(models, small, **arguments)
    for cell, exact in zip(results["cells"], (1.0, 0.5, 1.0, 1.0), strict=True):
        cell["teacher"] |= {"choice": 1.0, "exact": exact}
    short, long = counted_rows(results)
    assert short["answers"] == 6 and short["teacher"]["exact"] == 0.75 and short["teacher"]["choice"] == 1
    unknown = {"generated": None}
    assert short["counts"] == {"choice": True, "exact": False} | unknown
    assert long["counts"] == {"choice": True, "exact": True} | unknown
    assert shares_text(short, "teacher") == "100 / 75*"
    assert shares_text(short, "teacher", intervals=True) == "100 (61-100) / 75* (36-94)"
    generated = {"generated": 1.0, "generated_interval": [0.61, 1]}
    without_candidates = short | {"teacher": short["teacher"] | {"choice": None} | generated}
    assert shares_text(without_candidates, "teacher") == "- / 75* / 100"
    assert long["student"] is None and shares_text(long, "student") == "-"
    assert short["teacher"]["exact_interval"] == pytest.approx(wilson(0.75, 6))


def test_intervals_are_those_of_wilson():
    """Figures of Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I."""
    for right, count, expected in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0, 0.1611))):
        assert wilson(right / count, count) == pytest.approx(expected, abs=1e-4)


def test_without_controls_everything_but_the_gain_is_the_same(small):
    model, arguments = {"model": tiny_teacher(layers=1)}, {"tasks": ("mqar",), "lengths": (64,), "samples": 2}
    cells = [run_probes(model, small, control=control, **arguments)["cells"] for control in (True, False)]
    for with_control, without in zip(*cells, strict=True):
        known = {name: value for name, value in with_control["model"].items() if not name.startswith("gain")}
        assert without["model"] == known | {"gain": None, "gain_error": None}


def test_mistakes(small, bundled):
    model = {"model": Copier(64)}
    model["model"].config.max_position_embeddings = math.inf
    for arguments, message in (
        ({"tasks": ("nosuch",)}, "'nosuch' is unknown"),
        ({"lengths": (8,)}, "give a longer"),
        ({"depths": (1.5,)}, "outside 0 to 1"),
        ({"tasks": ("niah", "niah")}, "'niah' is named twice"),
        ({"lengths": (64, 64)}, "64 is named twice"),
        ({"depths": (0.5, 0, 0.0)}, "0 is named twice"),
        ({"samples": 0}, "at least one"),
        ({"lengths": (64, 99_999_999)}, "99999999 needs 7999999920 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            run_probes(model, small, **({"lengths": (64,), "tasks": ("niah",)} | arguments))
    with pytest.raises(ValueError, match="own tokenizer"):
        score(model["model"], draw("niah", bundled, 128, 0.5, 0, 1))
    with pytest.raises(ValueError, match="give a longer text"):
        Material(tiny_tokenizer(), "the cat sat")


def test_a_length_that_does_not_fit_every_draw_is_refused_before_a_model_runs(small, monkeypatch):
    make, drawn = TASKS["mqar"].make, []

    def sometimes_too_long(*args):
        drawn.append(args)
        if len(drawn) == 3:
            raise ValueError("give a longer length")
        return make(*args)

    monkeypatch.setitem(TASKS, "mqar", replace(TASKS["mqar"], make=sometimes_too_long))
    loaded = []
    with pytest.raises(ValueError, match="give a longer length"):
        run_probes({"model": lambda: loaded.append(1)}, small, tasks=("mqar",), lengths=(64,), samples=4)
    assert len(drawn) == 3 and not loaded


def test_lengths_that_no_model_can_read_are_not_drawn(small):
    """They do not count towards the limit of tokens."""
    model = {"model": tiny_teacher(layers=1, max_position_embeddings=64)}
    arguments = {"tasks": ("niah",), "depths": (0.5,), "samples": 2}
    long, short = (run_probes(model, small, lengths=at, **arguments) for at in ((64, 999_999_999), (64,)))
    assert long["cells"] == short["cells"] and long["summary"] == short["summary"]


@pytest.mark.product  # one training per kind of mixer stays
def test_the_bundled_teacher_recalls(bundled):
    from hf_memmix.conversion import load_model

    model = {"teacher": load_model(asset_path("tiny_teacher"), torch.float32)}
    found = run_probes(model, bundled, tasks=("niah", "mqar"), lengths=(128, 512), depths=(0.0, 1.0), samples=8)
    for row in found["summary"]:
        assert row["teacher"]["exact"] > 0.9 and row["teacher"]["gain"] > 3 * row["teacher"]["gain_error"] > 0
