"""Keeps the states of rows that end early in generate(), which feeds them pads until the last row ends.

Attention can ignore these pads later, by a mask; a state cannot forget them. A compiled decode step treats all rows
equally. So the states of a row that ends are copied once, after its last token, and restored after sampling. The count
of tokens is the same for all rows and includes the pads. So the mask of the next turn must hide them, which
`check_hidden` verifies.
"""

from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache

from .layer import RecurrentLayer, RowsOfStates, memory_layers_of


class FinishedRows(StoppingCriteriaList):
    """The stopping criteria of a sampling loop, which also copy the states of a row that has ended.

    Args:
        criteria: the stopping criteria of generate().
        cache: the cache of the loop.
    """

    def __init__(self, criteria: StoppingCriteriaList, cache: Cache):
        super().__init__(criteria)
        self._layers = memory_layers_of(cache)
        self._ended: set[int] = set()
        self._last_token_is_next: list[int] = []
        self._kept: list[tuple[RecurrentLayer, RowsOfStates]] = []

    def __call__(self, input_ids, scores, **kwargs):
        """[B], True at the rows that end with the last token of `input_ids`; called before the model reads them."""
        done = super().__call__(input_ids, scores, **kwargs)
        if rows := self._last_token_is_next:  # the model has read it by now, and a pad follows
            self._kept += [(layer, layer.copy_rows(rows)) for layer in self._layers]
        self._last_token_is_next = [i for i, ended in enumerate(done.tolist()) if ended and i not in self._ended]
        self._ended.update(self._last_token_is_next)
        return done

    def put_back(self):
        """Restore the states of the rows that ended before the others."""
        for layer, rows in self._kept:
            layer.restore_rows(rows)
        self._kept = []


def feeds_pads(criteria: StoppingCriteriaList) -> bool:
    """Whether generate() feeds pads to a row that has ended. Without an end-of-sequence token no row ends early."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)
