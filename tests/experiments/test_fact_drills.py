"""Drills of SmolLM2's training rows: nothing of them is in a probe, and every answer stands before its question."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch

from hf_memmix.assets import asset_path
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.evaluation.probes import nouns, tasks
from hf_memmix.training.experiments.smollm2 import drill_teacher, drill_words, fact_drills


@pytest.fixture(scope="module")
def facts_material(probes):
    tokens = tokenize_files(asset_path("dev.txt"), probes.tokenizer).numpy()
    return fact_drills.FactMaterial(probes.tokenizer, tokens, probes)


def test_drills_have_no_sentence_and_no_word_of_the_probes():
    forms = (tasks.PASSWORD, tasks.CODE, tasks.CHAIN, *tasks.THINGS, *tasks.SENTENCES)
    assert not {form.said for form in forms} & {form.said for form in drill_words.FORMS}
    assert not {form.question for form in forms} & {form.question for form in drill_words.FORMS}
    assert not any(form.said.endswith(" of{} is") for form in drill_words.FORMS)
    assert not {*nouns.NOUNS} & {*drill_words.THINGS} and not {*nouns.NAMES} & {*drill_words.NAMES}


def test_the_words_of_drills_begin_with_other_tokens_than_those_of_the_probes(facts_material, probes):
    pools = (probes.nouns, probes.people, probes.keys[: tasks.NAMES])
    taken = {ids[0] for pool in pools for _, ids in pool}
    ours = [ids[0] for _, ids in facts_material.names + facts_material.values]
    assert min(len(facts_material.names), len(facts_material.values)) > 20
    assert len({*ours}) == len(ours) and not {*ours} & taken


@pytest.mark.parametrize("length", [128, 1024])
def test_every_answer_of_a_row_stands_before_its_question(facts_material, length):
    values = {ids for _, ids in facts_material.values}
    for seed in range(12):
        ids, spans = fact_drills.facts(facts_material, length, random.Random(seed))
        assert len(ids) == length and ids[-1] == facts_material.end and spans
        for start, stop in spans:
            assert tuple(ids[start:stop]) in values
            assert 0 < drill_teacher.distance_of(ids, start, stop) < length


def test_a_share_of_the_rows_are_drills_whose_answers_weigh_as_much_as_a_row(facts_material):
    tokens, size = torch.arange(16 * 256) % 50, 256
    blocks = fact_drills.Drills(0.25, 2.0).blocks(tokens, size, facts_material)
    plain = fact_drills.Drills(0.25, 0.0).blocks(tokens, size, facts_material)
    drilled = [row for row in range(16) if not torch.equal(blocks.blocks[row], tokens.view(16, size)[row])]
    assert drilled == [3, 7, 11, 15] and blocks.loss == "answers"
    assert torch.equal(plain.blocks, blocks.blocks) and bool((plain.loss_mask == 1).all())
    weights = blocks.loss_mask.sum(1) / size
    assert torch.allclose(weights, torch.tensor([3.0 if row in drilled else 1.0 for row in range(16)]))


def test_a_probe_of_the_drills_is_asked_in_text_that_no_drill_has(facts_material, probes):
    sample = fact_drills.probe(facts_material, probes, 200, 0.25, random.Random(0))
    (answer,) = sample.answers
    assert len(sample.ids) == 200 and answer.stop == 200 and len(answer.candidates) == 8
    assert tuple(sample.ids[answer.start :]) in {ids for _, ids in facts_material.values}


def test_the_teacher_is_asked_and_the_table_counts_its_answers(tmp_path):
    teacher = asset_path("tiny_teacher")
    (tmp_path / "heldout.txt").write_text(asset_path("heldout.txt").read_text(encoding="utf-8"), encoding="utf-8")
    tokens = tokenize_files(asset_path("dev.txt"), drill_teacher.measuring.tokenizer_of(teacher))
    numpy.save(tmp_path / "train.npy", tokens.numpy().astype(numpy.uint16))
    args = SimpleNamespace(teacher=teacher, data=tmp_path, length=256, rows=2, deadline=float("inf"))
    rows = [row | drill_teacher.run(row, args) for row in drill_teacher.rows_to_run([], args)]
    answers = sum(len(row["exact"]) for row in rows)
    results = {"rows": rows, "settings": {"length": 256}, "environment": {"hardware": "a", "commit": "b"}}
    assert answers and f"| all | {answers} |" in drill_teacher.table(results)
