"""The Echo tasks: the answer follows from the facts that the action mask marks, and nothing else gives it away."""

from collections import Counter

import pytest
import torch

from hf_memmix.training.experiments.echo.tasks import (
    COLON,
    END,
    EQUALS,
    NOISE,
    QUESTION,
    TASKS,
    VALUES,
    VOCAB,
    check_task,
    draw_examples,
    mixture,
)

BATCH = 32


def draw(task, length=96, pairs=4, seed=0):
    pairs = 1 if task == "niah" else pairs
    return draw_examples(task, BATCH, length, pairs, torch.Generator().manual_seed(seed))


def facts_of(ids, mask):
    """The facts (4 tokens each) that the mask marks, in order."""
    tokens = ids[mask].tolist()
    assert len(tokens) % 4 == 0
    return [tuple(tokens[i : i + 4]) for i in range(0, len(tokens), 4)]


def question_before(ids, position):
    """What stands between the last `?` and the `=` at `position`."""
    assert ids[position] == EQUALS
    tokens = ids[:position].tolist()
    return tokens[len(tokens) - 1 - tokens[::-1].index(QUESTION) + 1 :]


def solve(task, facts, question):
    """The answer by reading the facts."""
    if task == "tool_trace":
        caller, colon, tool = question
        assert colon == COLON and all(fact[1] == COLON for fact in facts)
        (found,) = [result for c, _, t, result in facts if (c, t) == (caller, tool)]
        return found
    (key,) = question
    assert all(fact[1] == EQUALS and fact[3] == END for fact in facts)
    values = [fact[2] for fact in facts if fact[0] == key]
    if task == "common_word":
        (word, most), (_, next_most) = Counter(values).most_common(2)
        assert most == next_most + 2
        return word
    (found,) = values
    if task == "multi_hop":
        (found,) = [fact[2] for fact in facts if fact[0] == found]
    return found


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_facts(task):
    examples = draw(task)
    assert torch.equal(examples.ids, draw(task).ids) and not torch.equal(examples.ids, draw(task, seed=1).ids)
    for ids, positions, values, mask in zip(
        examples.ids, examples.positions, examples.values, examples.action_mask, strict=True
    ):
        facts = facts_of(ids, mask)
        for position, value in zip(positions.tolist(), values.tolist(), strict=True):
            assert value == solve(task, facts, question_before(ids, position)) and value in VALUES
            assert position + 1 == len(ids) or ids[position + 1] != value, "no answer enters the input"


@pytest.mark.parametrize("task", TASKS)
def test_the_rest_is_noise(task):
    """Outside of facts and questions there is noise only, and none of it inside."""
    examples = draw(task, length=128)
    count, width = examples.positions.shape[1], 5 if task == "tool_trace" else 3
    asked = torch.zeros_like(examples.action_mask)
    for i in range(width):
        asked.scatter_(1, examples.positions - i, True)
    assert not (asked & examples.action_mask).any()
    assert torch.equal((asked | examples.action_mask), examples.ids < NOISE.start)
    assert (asked.sum(1) == count * width).all() and examples.ids.max() < VOCAB


def test_lengths():
    for task, (_, room) in TASKS.items():
        pairs = 1 if task == "niah" else 4
        full = draw(task, length=room(pairs))
        assert (full.ids < NOISE.start).all(), "the smallest length has no noise"
        with pytest.raises(ValueError, match=f"at least {room(pairs)}"):
            check_task(task, room(pairs) - 1, pairs)
    assert (draw("system_prompt", length=256).action_mask.nonzero()[:, 1] < 16).all(), "the system prompt comes first"


def test_facts_stand_anywhere():
    """Over many draws the one fact of a haystack starts at every depth about equally often."""
    generator = torch.Generator().manual_seed(0)
    starts = draw_examples("niah", 20_000, 64, 1, generator).action_mask.int().argmax(1)
    seen = torch.bincount(starts, minlength=58).double() / 20_000
    torch.testing.assert_close(seen, torch.full((58,), 1 / 58).double(), rtol=0, atol=5 * (1 / 58 / 20_000) ** 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("haystack", 64, 1), "unknown task 'haystack'"),
        (("mqar", 4096, 65), "1 to 64 pairs, not 65"),
        (("niah", 64, 2), "1 to 1 pairs, not 2"),
        (("mqar", 20, 4), "length of at least 28, not 20"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_task(*arguments)


def test_mixture_has_equal_parts():
    batches = mixture(["system_prompt", "tool_trace"], 8, 64, [2, 4, 8], torch.Generator().manual_seed(0), 90)
    assert len(batches) == 90 and all(batch.ids.shape == (8, 64) for batch in batches)
    sizes = Counter(
        (int(mask.sum()) // 4, bool((ids == COLON).any()))
        for b in batches
        for ids, mask in zip(b.ids, b.action_mask, strict=True)
    )
    assert set(sizes.values()) == {120} and len(sizes) == 6
    assert len({b.ids.sum().item() for b in batches}) > 60
    with pytest.raises(ValueError, match="different numbers of questions"):
        mixture(["system_prompt", "niah"], 8, 64, [1], torch.Generator().manual_seed(0), 1)
