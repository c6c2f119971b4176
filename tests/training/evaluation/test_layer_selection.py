"""Layers are ranked by what a swap costs: exact for a swap of nothing, and a planted bad mixer comes first."""

import pytest
import torch

from hf_memmix.conversion import convert_model, report
from hf_memmix.conversion.families import attention_module
from hf_memmix.training.evaluation.layer_selection import choose, cost_of_swaps, lost_answers, rank_layers, swapped
from hf_memmix.training.evaluation.probes import Material, draw
from tiny_teachers import tiny_teacher, tiny_text, tiny_tokenizer


@pytest.fixture(scope="module")
def pair():
    teacher = tiny_teacher(layers=3)
    return teacher, convert_model(teacher, "gka")


@pytest.fixture(scope="module")
def blocks():
    return torch.randint(3, 24, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def samples():
    material = Material(tiny_tokenizer(), tiny_text(200))
    return {"niah": draw("niah", material, 48, 0.5, 0, 3), "mqar": draw("mqar", material, 48, None, 0, 1)}


def test_swapped_layers_equal_a_student_with_these_mixers(pair, blocks):
    teacher, student = pair
    hybrid = convert_model(teacher, "gka", [0, 2])
    attention_module(hybrid, 1).load_state_dict(attention_module(student, 1).state_dict())
    with torch.no_grad(), swapped(teacher, student, [1]):
        ours = teacher(blocks).logits
    torch.testing.assert_close(ours, hybrid(blocks).logits, rtol=1e-4, atol=1e-4)
    base, (cost,) = cost_of_swaps(teacher, student, [[1]], blocks, {}, batch_size=2)
    compared = report(hybrid, teacher, blocks, block_size=20)
    assert cost["kl"] == pytest.approx(compared["kl"], rel=1e-3)
    assert cost["loss"] == pytest.approx(torch.tensor(compared["student_ppl"]).log().item(), rel=1e-4)
    assert base["loss"] == pytest.approx(torch.tensor(compared["teacher_ppl"]).log().item(), rel=1e-4)


def test_no_swap_has_no_cost_and_hooks_are_removed(pair, blocks, samples):
    teacher, student = pair
    before = teacher(blocks).logits
    seen = []
    base, (nothing, everything) = cost_of_swaps(
        teacher, student, [[], [0, 1, 2]], blocks, samples, progress=lambda *at: seen.append(at)
    )
    assert nothing["kl"] == 0 and nothing["loss"] == base["loss"] and nothing["answers"] == base["answers"]
    assert everything["kl"] > 0 and everything["answers"] != base["answers"]
    assert seen[-1] == (9, 9)
    assert torch.equal(teacher(blocks).logits, before)


def test_the_layer_with_the_highest_score_stays_attention(blocks, samples):
    teacher = tiny_teacher(layers=3)
    silent = convert_model(teacher, "gka")  # its mixers give zero, so a swap costs what the attention did
    with torch.no_grad():
        for layer in (0, 1, 2):
            attention_module(silent, layer).o_proj.weight.zero_()
            attention_module(teacher, layer).o_proj.weight.mul_(1.0 if layer == 1 else 1e-2)
    ranking = rank_layers(teacher, silent, blocks, samples, weight=0.0)
    assert choose(ranking, 1, 3) == [1] and ranking["layers"][1]["rank"] == 1
    for row in rank_layers(teacher, silent, blocks, samples, weight=0.5)["layers"]:
        rises = [row["answers"][task] - ranking["teacher"]["answers"][task] for task in samples]
        assert row["score"] == pytest.approx(row["kl"] + 0.5 * sum(rises) / 2)


def test_how_many_layers_stay():
    ranking = {"layers": [{"layer": layer, "rank": rank} for layer, rank in ((0, 3), (1, 1), (3, 2), (5, 4))]}
    assert choose(ranking, 2, 6) == [1, 3] and choose(ranking, 0.5, 6) == [0, 1, 3] and choose(ranking, 0.1, 6) == [1]
    for keep in (0, 4, 1.5, 0.0, -1):
        with pytest.raises(ValueError, match="keep is"):
            choose(ranking, keep, 6)


def test_a_layer_that_answers_need_is_named_if_the_kl_hides_it():
    """COFFEE's scores with the recall teacher: the KL of layer 11 is higher than the loss of answers in layer 9."""
    scores = {6: (0.098, 0.061), 9: (0.056, 0.104), 10: (0.070, 0.001), 11: (0.166, 0.014)}

    def ranked(weight, scores=scores):
        rows = [{"layer": i, "kl": kl, "nll": nll, "score": kl + weight * nll} for i, (kl, nll) in scores.items()]
        order = sorted(rows, key=lambda row: -row["score"])
        return {"layers": [row | {"rank": order.index(row) + 1} for row in rows]}

    assert choose(ranked(1.0), 1, 4) == [11] and choose(ranked(1.0), 2, 4) == [9, 11]
    layer, weight = lost_answers(ranked(1.0), [11])
    assert layer == 9 and weight == pytest.approx((0.166 - 0.056) / (0.104 - 0.014))
    assert choose(ranked(weight - 0.01), 1, 4) == [11] and choose(ranked(weight + 0.01), 1, 4) == [9]
    assert lost_answers(ranked(1.0), [9, 11]) is None
    assert lost_answers(ranked(1.0, {layer: (kl, 0.0) for layer, (kl, _) in scores.items()}), [11]) is None
    layer, weight = lost_answers(ranked(0.1), [6, 11])
    assert layer == 9 and 9 in choose(ranked(weight + 0.01), 2, 4) and 9 not in choose(ranked(weight - 0.01), 2, 4)


def test_mistakes(pair, blocks):
    teacher, student = pair
    with pytest.raises(ValueError, match="have no mixer; its memory layers are"):
        cost_of_swaps(teacher, student, [[7]], blocks, {})
    with pytest.raises(ValueError, match="weight"):
        rank_layers(teacher, student, blocks, {}, weight=-1.0)
    broken = convert_model(teacher, "gka")
    with torch.no_grad():
        attention_module(broken, 1).o_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="score of layer 1 is not finite"):
        rank_layers(teacher, broken, blocks, {})


def test_models_keep_their_mode(pair, blocks, samples):
    for training in (True, False):
        models = [model.train(training) for model in pair]
        cost_of_swaps(*models, [[1]], blocks, samples)
        assert all(module.training == training for model in models for module in model.modules())
