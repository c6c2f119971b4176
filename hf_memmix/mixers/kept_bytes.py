"""What a mixer keeps in memory for the backward pass. `memmix plan` computes the memory of a training from it."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class KeptBytes:
    """Bytes per token beyond the copies of the layer's input, as multiples of widths.

    Args:
        inputs: linear layers that read the layer's input; each one keeps it.
        hidden, queries, keys, heads: bytes per channel of the residual stream, per channel of the query heads, per
            channel of the key/value heads, and per head.
    """

    inputs: int
    hidden: float = 0
    queries: float = 0
    keys: float = 0
    heads: float = 0

    def __add__(self, other: "KeptBytes") -> "KeptBytes":
        return KeptBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def per_token(self, hidden: int, queries: int, keys: int, heads: int) -> float:
        """The bytes for a layer of these widths."""
        return self.hidden * hidden + self.queries * queries + self.keys * keys + self.heads * heads
