"""The rows of the training data that a run reads, and the places of their hidden states in the spool.

Each layer is trained by a Trainer of its own, which reads the rows in the order in which a run in memory reads them.
Only rows that are read lie in the spool.
"""

from collections.abc import Iterator
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hf_memmix.errors import UserError
from hf_memmix.training.data import StreamedBlocks, TokenBlocks
from hf_memmix.training.recipe import Recipe

Row = dict[str, Tensor]


class Rows:
    """The different rows that a run reads.

    `tokens`: one item of the data per row of the spool. `passes`: how often a run reads each of them, on average.
    """

    def __init__(self, data: TokenBlocks | StreamedBlocks, recipe: Recipe, order: list[int]):
        """order: numbers of the rows of `data` in the order of the run; empty for data that are read as a stream."""
        reads = recipe.steps * recipe.batch_size * recipe.gradient_accumulation
        self._length = None if isinstance(data, StreamedBlocks) else len(data)
        if self._length is None:
            self.tokens = list(islice(data.one_pass(), reads))
            self._place = {}
            if not self.tokens:
                raise UserError(f"all sources together do not fill one block of {data.block_size}; give more text")
        else:
            used = sorted(set(order))
            self.tokens = [data[row] for row in used]
            self._place = {row: place for place, row in enumerate(used)}
        self.passes = reads / len(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def with_places(self) -> "Dataset | IterableDataset":
        """The data to train a layer on: items have the number `place` of their row in the spool too."""
        if self._length is None:
            return _Stream(self.tokens)
        return _Blocks(self.tokens, self._place, self._length)

    def batches(self, size: int, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """All rows in order, `size` at a time: their places, `input_ids` [B, T] and `position_ids` [B, T] or None."""
        for start in range(0, len(self), size):
            items = self.tokens[start : start + size]
            ids, positions = (
                torch.stack([item[name] for item in items]).to(device) if name in items[0] else None
                for name in ("input_ids", "position_ids")
            )
            yield slice(start, start + len(items)), ids, positions


class _Blocks(Dataset):
    """As many items as the data have, because the Trainer draws its order from their number."""

    def __init__(self, tokens: list[Row], place: dict[int, int], length: int):
        self._tokens, self._place, self._length = tokens, place, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Row:
        place = self._place.get(row)
        if place is not None:
            return _placed(self._tokens, place)
        # the loader fetches rows ahead that the run does not reach; no step can read this place
        return _placed(self._tokens, 0) | {"place": torch.tensor(len(self._tokens))}


class _Stream(IterableDataset):
    """The rows in order. After the last one it starts again with the first."""

    def __init__(self, tokens: list[Row]):
        self._tokens = tokens

    def __iter__(self) -> Iterator[Row]:
        for place in cycle(range(len(self._tokens))):
            yield _placed(self._tokens, place)


def _placed(tokens: list[Row], place: int) -> Row:
    return {**tokens[place], "place": torch.tensor(place)}


class RowNumbers(Dataset):
    """`length` items `{"row": its number}`."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> Row:
        return {"row": torch.tensor(row)}
