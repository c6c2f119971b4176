"""The induction head task of the COFFEE paper (Appendix E): repeat the symbols that followed the first trigger.

    noise | trigger | gap | target | noise | trigger | zeros

Symbols are 1 to 7, the trigger 1 (or 1 2). It occurs exactly twice; its place, the target and the noise are uniform. A
target of several symbols is said over as many positions, the further ones being the padding symbol 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SYMBOLS = 9  # the sizes of the paper's tables are those of nine embeddings: 0 to 7 and one that never occurs
LAST_SYMBOL = 7
PADDING = 0
TRIGGER = 1
UNUSED = 8  # the one that never occurs
DRAWS = 12  # of sequences with a trigger of two symbols, of which 25 % hold a third one: one in 10^7 is left


@dataclass(frozen=True)
class InductionHead:
    """The task's sizes.

    Args:
        length: of the sequence, without padding.
        trigger: symbols of the trigger, 1 or 2.
        target: symbols of the target.
        gap: noise between trigger and target (Table 3).
    """

    length: int = 16
    trigger: int = 1
    target: int = 1
    gap: int = 0

    def __post_init__(self):
        if self.trigger not in (1, 2):
            raise ValueError(f"trigger={self.trigger} must be 1 or 2 symbols")
        if self.places < 1:
            raise ValueError(f"length={self.length} is too short: it must be at least {self.length + 1 - self.places}")

    @property
    def places(self) -> int:
        """How many positions the first trigger can have."""
        return self.length - 2 * self.trigger - self.gap - self.target + 1

    def draw(self, copies: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens [copies, batch, length + target - 1] and the target [copies, batch, target]."""
        if self.trigger == 2:
            ids, target = self._draw_until_it_fits(copies, batch, generator)
        else:
            ids, target = self._draw(copies, batch, generator)
        return torch.nn.functional.pad(ids, (0, self.target - 1)), target

    def triggers(self, ids: Tensor) -> Tensor:
        """How often the trigger occurs in each sequence."""
        found = ids == TRIGGER
        if self.trigger == 2:
            found = found[..., :-1] & (ids[..., 1:] == TRIGGER + 1)
        return found.sum(-1)

    def _draw_until_it_fits(self, copies, batch, generator):
        """The first of `DRAWS` draws that holds the trigger twice, for each sequence.

        All are drawn at once: a CUDA graph has no loop that ends early, and each operator of it costs time.
        """
        ids, target = (t.unflatten(0, (DRAWS, copies)) for t in self._draw(DRAWS * copies, batch, generator))
        earliest_is_largest = torch.arange(DRAWS, 0, -1, device=ids.device)[:, None, None]
        first = ((self.triggers(ids) == 2) * earliest_is_largest).argmax(0)[None, ..., None]
        return (t.take_along_dim(first, 0)[0] for t in (ids, target))

    def _draw(self, copies, batch, generator):
        device = generator.device
        first = TRIGGER if self.trigger == 2 else TRIGGER + 1
        shape = (copies, batch, self.length)
        ids = torch.randint(first, LAST_SYMBOL + 1, shape, device=device, generator=generator)
        start = torch.randint(0, self.places, (copies, batch, 1), device=device, generator=generator)
        positions = torch.arange(self.length, device=device)
        for i in range(self.trigger):
            here = (positions == start + i) | (positions == self.length - self.trigger + i)
            ids = ids.masked_fill(here, TRIGGER + i)
        offsets = self.trigger + self.gap + torch.arange(self.target, device=device)
        return ids, ids.gather(2, start + offsets)
