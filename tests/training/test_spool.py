"""A spool gives back what was written, and notices every change of a finished file: `is_sound`."""

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
    return spool


def test_rows_are_read_as_they_were_written(spool):
    for dtype in (torch.bfloat16, torch.float32):
        spool.write(1, HIDDEN.to(dtype).split(4))
        assert spool.is_ready(1) and spool.is_sound(1) and not spool.is_sound(0)
        with spool.read(1) as hidden:
            assert torch.equal(hidden.read([3, 0, 5, 3]), HIDDEN.to(dtype)[[3, 0, 5, 3]])
            with pytest.raises(ValueError, match=r"layer-1.hidden' ends before row 6"):
                hidden.read([0, 6])
    with pytest.raises(RuntimeError, match="6 rows"):
        spool.write(3, HIDDEN[:4].split(2))
    assert sorted(path.name for path in spool.folder.iterdir()) == ["layer-1.hidden", "layer-1.json"]


def test_a_changed_file_is_not_sound(spool):
    content = spool.file(1).read_bytes()
    for damage in DAMAGES.values():
        spool.file(1).write_bytes(damage(content))
        assert not spool.is_sound(1)
        spool.file(1).write_bytes(content)
        assert spool.is_sound(1)


def test_a_file_of_another_size_than_the_runs_is_not_sound(spool):
    """It is as its own record says, but the rows that are read would be others."""
    for rows, shape in ((ROWS - 1, SHAPE), (2 * ROWS, SHAPE), (ROWS, (3, 8)), (ROWS, (6, 4))):
        assert not Spool(spool.folder, rows, shape).is_sound(1)
