"""Drills of recall: every answer can be found in the row, and no drill gives away a probe's answer."""

import random

import pytest

from hf_memmix.training import drills


def test_drills_and_probes_have_no_first_token_of_a_key_or_value_in_common(material, probes):
    taken = {tokens[0] for _, tokens in probes.keys + probes.values}
    for ours in (material.keys, material.values, material.names):
        assert len(ours) > 100
        assert not {tokens[0] for _, tokens in ours} & taken


@pytest.mark.parametrize("name", drills.DRILLS)
@pytest.mark.parametrize("length", [drills.SHORTEST, 200, 700])
def test_every_answer_of_a_drill_stands_in_its_context(material, name, length):
    make, answered = drills.DRILLS[name][0], 0
    for seed in range(8):
        ids, spans = make(material, length, random.Random(seed))
        assert len(ids) == length
        assert ids[-1] == material.end
        answered += len(spans)
        for start, stop in spans:
            value = ids[start:stop]
            if name not in ("pairs", "pieces"):
                assert any(tuple(value) == tokens for _, tokens in material.values)
            before = [ids[i : i + len(value)] for i in range(start - len(value) + 1)]
            assert value in before
    assert answered >= 8


def test_pairs_of_any_tokens_leave_out_unseen_words_and_pieces_leave_out_nothing(material, probes):
    unseen = drills.unseen_of(probes)
    assert set(unseen.keys) < set(probes.keys)
    shut, seen = drills.first_tokens(unseen), {}
    assert not set(material.tokens) & shut
    assert set(material.tokens) & drills.first_tokens(probes)
    for make in (drills.pairs_again, drills.pieces_again):
        drawn = [make(material, 400, random.Random(seed)) for seed in range(60)]
        seen[make] = {token for ids, spans in drawn for start, stop in spans for token in ids[start:stop]}
    assert len(seen[drills.pairs_again]) > 500
    assert not seen[drills.pairs_again] & shut
    assert seen[drills.pieces_again] & shut


def test_a_piece_that_comes_again_is_known_from_its_last_token(material):
    for seed in range(12):
        ids, spans = drills.pieces_again(material, 300, random.Random(seed))
        for start, stop in spans:
            pairs = [ids[i : i + 2] for i in range(start - 1)]
            assert stop == start + 1
            assert ids[start - 1 : stop] in pairs


def test_a_row_is_packed_and_its_answers_are_weighted(material):
    drawn = [drills.row_of(material, 1000, random.Random(seed)) for seed in range(12)]
    for ids, weights in drawn:
        assert len(ids) == len(weights) == 1000
        assert 0 < sum(weight > 0 for weight in weights) < 500
        assert max(weights) <= 1
    ends = [ids.count(material.end) for ids, _ in drawn]
    assert min(ends) >= 1
    assert max(ends) >= 3
