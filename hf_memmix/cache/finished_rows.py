"""Rows that end early in generate(): they are fed pads until the last row ends, which must not reach their states.

Attention forgets pads as soon as the next turn masks them; a state cannot. A compiled decode step treats all rows
alike, so a row that ends is copied once, after its last token, and put back when sampling is over. The common count of
tokens goes on: the next turn masks the pads, and `check_hidden` holds it to that.
"""

from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache

from .layer import RecurrentLayer, RowsOfStates


class FinishedRows(StoppingCriteriaList):
    """The stopping criteria of a sampling loop, which tell after every token which rows have ended.

    Args:
        criteria: the criteria themselves.
        cache: the cache of the loop, whose recurrent layers are looked after.
    """

    def __init__(self, criteria: StoppingCriteriaList, cache: Cache):
        super().__init__(criteria)
        self._layers = [layer for layer in cache.layers if isinstance(layer, RecurrentLayer)]
        self._ended: set[int] = set()
        self._last_token_is_next: list[int] = []
        self._kept: list[tuple[RecurrentLayer, RowsOfStates]] = []

    def __call__(self, input_ids, scores, **kwargs):
        """[B], True at the rows that end with the last token of `input_ids`; called once a token, before it is fed."""
        done = super().__call__(input_ids, scores, **kwargs)
        if rows := self._last_token_is_next:  # it is fed by now, and a pad follows
            self._kept += [(layer, layer.copy_rows(rows)) for layer in self._layers]
        self._last_token_is_next = [i for i, ended in enumerate(done.tolist()) if ended and i not in self._ended]
        self._ended.update(self._last_token_is_next)
        return done

    def put_back(self):
        """Give the rows that ended before the others their states of that time."""
        for layer, rows in self._kept:
            layer.restore_rows(rows)
        self._kept = []


def feeds_pads(criteria: StoppingCriteriaList) -> bool:
    """Whether generate() feeds pads to a row that has ended; without an end-of-sequence token it goes on sampling."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)
