"""What a mixer must know about the tokens of a forward, beside what it computes from them.

`MemMixModel.forward` makes one `TokenLayout` for all of its layers, and a mixer takes it as `memmix_layout`.

Shapes: B batch, T tokens of this forward, N packed sequences.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .padding import PaddedRows

if TYPE_CHECKING:
    from .mixers.ranks import Pieces


class TokenLayout(NamedTuple):
    """How the tokens of a forward lie. By default every row is one whole sequence, and there is no cache.

    Packed sequences have no padding, no cache and no other ranks; split sequences have no cache. It is a tuple, so
    that code which moves arguments between devices moves its tensors too.
    """

    rows: PaddedRows | None = None  # of the padding mask [B, T]; None: all tokens are real
    cu_seqlens: Tensor | None = None  # [N + 1], boundaries of sequences that are packed along the flattened batch
    ranks: "Pieces | None" = None  # how the sequences are split over several processes (context parallelism)
    cached: bool = False  # whether the model has a cache, which every layer must then receive
