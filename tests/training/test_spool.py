"""A spool notices every change of a finished file: `is_sound`."""

import pytest
import torch

from hf_memmix.training.streaming.spool import Spool

ROWS, SHAPE = 6, (3, 4)
HIDDEN = torch.randn(ROWS, *SHAPE, generator=torch.Generator().manual_seed(0))
HIDDEN[-1] = 0  # adds nothing to a checksum
ROW_BYTES = HIDDEN[0].nbytes


def exchanged(content, one, other):
    rows = [content[i * ROW_BYTES : (i + 1) * ROW_BYTES] for i in range(ROWS)]
    rows[one], rows[other] = rows[other], rows[one]
    return b"".join(rows)


DAMAGES = {
    "a bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "neighbours exchanged": lambda content: exchanged(content, 0, 1),
    "ends exchanged": lambda content: exchanged(content, 0, ROWS - 1),
    "a row twice": lambda content: content[:ROW_BYTES] + content[:ROW_BYTES] + content[2 * ROW_BYTES :],
    "the end is missing": lambda content: content[:-ROW_BYTES],
    "more": lambda content: content + content[:ROW_BYTES],
    "all zeros": lambda content: bytes(len(content)),
}


@pytest.fixture
def spool(tmp_path):
    spool = Spool(tmp_path, ROWS, SHAPE)
    spool.write(1, HIDDEN.split(4))
    assert spool.is_sound(1) and not spool.is_sound(0)
    with spool.read(1) as hidden:
        assert torch.equal(hidden.read(range(ROWS)), HIDDEN)
    return spool


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_file_is_not_sound(spool, damage):
    content = spool.file(1).read_bytes()
    spool.file(1).write_bytes(DAMAGES[damage](content))
    assert not spool.is_sound(1)
    spool.file(1).write_bytes(content)
    assert spool.is_sound(1)


@pytest.mark.parametrize(("rows", "shape"), [(ROWS - 1, SHAPE), (2 * ROWS, SHAPE), (ROWS, (3, 8)), (ROWS, (6, 4))])
def test_a_file_of_another_size_than_the_runs_is_not_sound(spool, rows, shape):
    """It is as its own record says, but the rows that are read would be others."""
    assert not Spool(spool.folder, rows, shape).is_sound(1)
