"""The lab's use of drills: a probe with their words, and the teacher's answers to them."""

import random
from types import SimpleNamespace

import numpy

from hf_memmix.assets import asset_path
from hf_memmix.training.data import tokenize_files
from hf_memmix.training.evaluation.probes import tasks
from hf_memmix.training.experiments.smollm2 import drill_teacher, measuring
from hf_memmix.training.experiments.smollm2.more_forms import MORE_FORMS
from hf_memmix.training.fact_drills import FactMaterial, facts
from hf_memmix.training.fact_words import FORMS


def test_a_probe_of_the_drills_is_asked_in_text_that_no_drill_has(probes):
    tokens = tokenize_files(asset_path("dev.txt"), probes.tokenizer).numpy()
    facts_material = FactMaterial(probes.tokenizer, tokens, probes)
    sample = measuring.drilled(facts_material, probes, 200, 0.25, random.Random(0))
    (answer,) = sample.answers
    assert len(sample.ids) == 200 and answer.stop == 200 and len(answer.candidates) == 8
    assert tuple(sample.ids[answer.start :]) in {ids for _, ids in facts_material.values}


def test_more_sentences_are_others_than_those_of_drills_and_probes(probes):
    known = (tasks.PASSWORD, tasks.CODE, tasks.CHAIN, *tasks.THINGS, *tasks.SENTENCES, *FORMS)
    said = [form.said for form in MORE_FORMS]
    assert len({*said}) == len(said) > 500 and not {*said} & {form.said for form in known}
    assert all(form.question.count("{}") == form.said.count("{}") == 1 for form in MORE_FORMS)
    verbs = {word for form in tasks.SENTENCES for word in form.said.split()} - {"{}", "has", "is", "the", "a", "of"}
    assert not verbs & {word for text in said for word in text.split()}
    tokens = tokenize_files(asset_path("dev.txt"), probes.tokenizer).numpy()
    material = FactMaterial(probes.tokenizer, tokens, probes, MORE_FORMS[:40])
    ids, spans = facts(material, 512, random.Random(0))
    assert len(ids) == 512 and spans


def test_the_teacher_is_asked_and_the_table_counts_its_answers(tmp_path):
    teacher = asset_path("tiny_teacher")
    (tmp_path / "heldout.txt").write_text(asset_path("heldout.txt").read_text(encoding="utf-8"), encoding="utf-8")
    tokens = tokenize_files(asset_path("dev.txt"), measuring.tokenizer_of(teacher))
    numpy.save(tmp_path / "train.npy", tokens.numpy().astype(numpy.uint16))
    args = SimpleNamespace(teacher=teacher, data=tmp_path, length=256, rows=2, deadline=float("inf"))
    rows = [row | drill_teacher.run(row, args) for row in drill_teacher.rows_to_run([], args)]
    answers = sum(len(row["exact"]) for row in rows)
    results = {"rows": rows, "settings": {"length": 256}, "environment": {"hardware": "a", "commit": "b"}}
    assert answers and f"| all | {answers} |" in drill_teacher.table(results)
