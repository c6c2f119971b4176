"""Rows of facts that are asked for again: nothing is in a probe, and every answer stands before its question."""

import random

import pytest
import torch

from hf_memmix.assets import asset_path
from hf_memmix.conversion import convert_model, load_model
from hf_memmix.training.data import TokenBlocks, tokenize_files
from hf_memmix.training.evaluation.probes import nouns, tasks
from hf_memmix.training.fact_drills import FactMaterial, facts, with_drills
from hf_memmix.training.fact_words import FORMS, NAMES, THINGS
from hf_memmix.training.train import distill

SIZE = 256  # tokens of a row


@pytest.fixture(scope="module")
def text(probes):
    """Rows of text without drills."""
    tokens = tokenize_files(asset_path("dev.txt"), probes.tokenizer)
    return TokenBlocks(tokens[: 16 * SIZE], SIZE)


@pytest.fixture(scope="module", params=["probes of a text", "any probes"])
def facts_material(probes, text, request):
    avoid = probes if request.param == "probes of a text" else None
    return FactMaterial(probes.tokenizer, text.blocks.flatten().numpy(), avoid)


def test_drills_have_no_sentence_and_no_word_of_the_probes():
    forms = (tasks.PASSWORD, tasks.CODE, tasks.CHAIN, *tasks.THINGS, *tasks.SENTENCES)
    assert not {form.said for form in forms} & {form.said for form in FORMS}
    assert not {form.question for form in forms} & {form.question for form in FORMS}
    assert not any(form.said.endswith(" of{} is") for form in FORMS)
    assert not {*nouns.NOUNS} & {*THINGS} and not {*nouns.NAMES} & {*NAMES}


def test_the_words_of_drills_begin_with_other_tokens_than_those_of_the_probes(facts_material, probes):
    taken = {ids[0] for pool in (probes.nouns, probes.people) for _, ids in pool}
    ours = [ids[0] for _, ids in facts_material.names + facts_material.values]
    assert min(len(facts_material.names), len(facts_material.values)) > 20
    assert len({*ours}) == len(ours) and not {*ours} & taken


@pytest.mark.parametrize("length", [128, 1024])
def test_every_answer_of_a_row_stands_before_its_question(facts_material, length):
    values = {ids for _, ids in facts_material.values}
    for seed in range(12):
        ids, spans = facts(facts_material, length, random.Random(seed))
        assert len(ids) == length and ids[-1] == facts_material.end and spans
        for start, stop in spans:
            assert tuple(ids[start:stop]) in values
            assert any(ids[at : at + stop - start] == ids[start:stop] for at in range(start))


def test_the_article_is_that_of_the_thing(text, probes):
    forms = tuple(form for form in FORMS if form.said.endswith(" a"))
    material = FactMaterial(probes.tokenizer, text.blocks.flatten().numpy(), probes, forms)
    articles = set()
    for seed in range(24):
        ids, spans = facts(material, SIZE, random.Random(seed))
        for start, stop in spans:
            article, thing = probes.tokenizer.decode(ids[:start]).split()[-1], probes.tokenizer.decode(ids[start:stop])
            assert article == ("an" if thing.strip()[0] in "aeiou" else "a")
            articles.add(article)
    assert articles == {"a", "an"}


def test_a_share_of_the_rows_are_drills_whose_answers_weigh_as_much_as_a_row(text, probes):
    data, plain = (with_drills(text, probes.tokenizer, 0.25, answers=weight) for weight in (2.0, 0.0))
    drilled = [row for row in range(16) if not torch.equal(data.blocks[row], text.blocks[row])]
    assert drilled == [3, 7, 11, 15] and (data.loss, data.drills) == ("all", 0.25)
    assert torch.equal(plain.blocks, data.blocks) and bool((plain.loss_mask == 1).all())
    weights = data.loss_mask.sum(1) / SIZE
    assert torch.allclose(weights, torch.tensor([3.0 if row in drilled else 1.0 for row in range(16)]))
    assert data.fingerprint() not in (plain.fingerprint(), text.fingerprint())


def test_a_weight_stands_where_the_answer_is_predicted(text, probes):
    data = with_drills(text, probes.tokenizer, 1.0)
    values = FactMaterial(probes.tokenizer, text.blocks.flatten().numpy()).values
    known = {token for _, ids in values for token in ids}
    for row, weights in zip(data.blocks, data.loss_mask, strict=True):
        predicted = row[1:][weights[:-1] > 1]
        assert len(predicted) and {*predicted.tolist()} <= known


def test_a_drill_begins_as_the_tokenizer_begins_a_text_and_is_one_document(text, probes, monkeypatch):
    monkeypatch.setattr("hf_memmix.training.fact_drills.beginning_of", lambda tokenizer: [7])
    packed = TokenBlocks(text.blocks.flatten(), SIZE, torch.arange(SIZE).repeat(16, 1) % 50)
    begun, cut = (with_drills(packed, probes.tokenizer, 0.5, bos) for bos in ("rows", "documents"))
    assert begun.blocks[1::2, 0].tolist() == [7] * 8 and 7 not in cut.blocks[1::2, 0]
    assert torch.equal(begun.positions[1], torch.arange(SIZE))
    assert torch.equal(begun.positions[0], packed.positions[0])


def test_rows_that_take_no_drills_are_refused(text, probes):
    answers = TokenBlocks(text.blocks.flatten(), SIZE, loss_mask=torch.ones(16, SIZE))
    with pytest.raises(ValueError, match="drills are 0.5, but the data count answers alone"):
        with_drills(answers, probes.tokenizer, 0.5)
    with pytest.raises(ValueError, match="rows of at least 128 tokens, and these have 64"):
        with_drills(TokenBlocks(text.blocks.flatten(), 64), probes.tokenizer, 0.5)


@pytest.mark.parametrize("share", [0.0, 2.0, -0.5, float("nan")])
def test_a_share_outside_of_its_bounds_is_refused(text, probes, share):
    with pytest.raises(ValueError, match=f"share of drills is {share:g}; it must be above 0 and at most 1"):
        with_drills(text, probes.tokenizer, share)


def test_a_share_that_makes_no_drill_or_drills_of_drills_is_refused(text, probes):
    with pytest.raises(ValueError, match="drills are 0.05 of the rows, and the data are 16 rows, so none is a drill"):
        with_drills(text, probes.tokenizer, 0.05)
    with pytest.raises(ValueError, match="0.5 of the rows are drills already"):
        with_drills(with_drills(text, probes.tokenizer, 0.5), probes.tokenizer, 0.5)


def test_a_tokenizer_that_does_not_write_the_words_is_refused(text, probes, monkeypatch):
    monkeypatch.setattr("hf_memmix.training.fact_drills.THINGS", THINGS[:9])
    with pytest.raises(ValueError, match="writes . names or things of the drills"):
        with_drills(text, probes.tokenizer, 0.5)


def test_a_run_has_the_drills_of_its_recipe_or_does_not_begin(text, probes, tmp_path):
    teacher = load_model(asset_path("tiny_teacher"))
    student = convert_model(teacher, "window", window=64)
    options = {"steps": 2, "batch_size": 2, "block_size": SIZE, "save_every": 0, "bf16": False}
    data = with_drills(text, probes.tokenizer, 0.5)
    with pytest.raises(ValueError, match="recipe says that 0 of the rows are drills, and in the data 0.5 are"):
        distill(student, teacher, data, tmp_path, **options)
    with pytest.raises(ValueError, match="recipe says that 0.5 of the rows are drills, and in the data 0 are"):
        distill(student, teacher, text, tmp_path, drills=0.5, **options)
    result = distill(student, teacher, data, tmp_path, drills=0.5, **options)
    assert result["steps"] == 2 and 0 < result["last_loss"] < float("inf")
