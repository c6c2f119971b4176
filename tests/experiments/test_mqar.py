"""The recall task: its layout, its distributions, and that the answer can be found from what stands before it."""

import pytest
import torch

from hf_memmix.training.experiments.common.mqar import VOCAB, check_cell, draw_recall

BATCH, LENGTH, PAIRS = 64, 128, 16


def draw(seed=0, **options):
    return draw_recall(BATCH, LENGTH, PAIRS, torch.Generator().manual_seed(seed), **options)


def test_layout():
    recall = draw(random_non_queries=False)
    ids, positions, values = recall.ids, recall.positions, recall.values
    keys = ids[:, : 2 * PAIRS : 2]
    assert torch.equal(draw(3).ids, draw(3).ids) and not torch.equal(draw(3).ids, draw(4).ids)
    assert ids.shape == (BATCH, LENGTH) and positions.shape == values.shape == (BATCH, PAIRS)
    assert ((keys >= 1) & (keys < VOCAB // 2)).all()
    assert torch.equal(ids[:, 1 : 2 * PAIRS : 2], values) and ((values >= VOCAB // 2) & (values < VOCAB)).all()
    for row in (*keys, *values, *positions):
        assert len(row.unique()) == PAIRS
    # the query of pair i stands at 2 n + 2 slot_i and is the key of pair i
    assert ((positions >= 2 * PAIRS) & (positions < LENGTH) & (positions % 2 == 0)).all()
    assert torch.equal(ids.gather(1, positions), keys)
    rest = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    rest[:, : 2 * PAIRS] = False
    assert (ids[rest.scatter(1, positions, False)] == 0).all(), "no answer enters the input"


def test_slots_follow_the_power_law():
    """One pair: the frequency of slot s is a s^(a - 1) up to its sum."""
    generator = torch.Generator().manual_seed(0)
    positions = draw_recall(40_000, 34, 1, generator, vocab=64).positions
    seen = torch.bincount((positions.flatten() - 2) // 2, minlength=16) / 40_000
    expected = torch.arange(1, 17).double() ** (0.01 - 1)
    expected /= expected.sum()
    torch.testing.assert_close(seen.double(), expected, rtol=0, atol=4 * 0.5 / 200)


def test_first_pairs_are_drawn_first():
    """Without replacement, in the order of drawing: pair 0 gets the earliest slot more often than the last pair."""
    slots = torch.cat([draw(seed).positions for seed in range(20)])
    assert slots[:, 0].float().mean() < slots[:, -1].float().mean() - 5
    full = draw_recall(8, 64, 16, torch.Generator().manual_seed(0)).positions
    assert torch.equal(full.sort(-1).values, torch.arange(32, 64, 2).expand(8, -1))


@pytest.mark.parametrize(
    ("cell", "message"),
    [((63, 4), "even length"), ((64, 17), "at least 68"), ((64, 0), "0 pairs"), ((64, 5, 10), "over 10")],
)
def test_cells_without_room(cell, message):
    with pytest.raises(ValueError, match=message):
        check_cell(*cell)
