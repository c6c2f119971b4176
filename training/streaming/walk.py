"""Which layers are trained, which inputs must be computed, and by which process.

Every process walks over the layers. The owner of a layer computes the inputs of the next one first and trains then, so
that the next owner can begin: the processes follow each other through the teacher. At most one file per process and
one more are on the disk.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Walk:
    """What one start of a run does, layer by layer.

    train: layers whose mixers are trained.
    produce: layers whose inputs are computed: from the inputs of the layer before, or from the embeddings for layer 0.
    """

    train: list[int]
    produce: list[int]

    @classmethod
    def plan(cls, train: Collection[int], ready: Collection[int]) -> "Walk":
        """The walk that trains the layers `train` if the inputs of the layers `ready` are there."""
        produce: list[int] = []
        for layer in range(max(train, default=-1), -1, -1):
            if layer not in ready and (layer in train or layer + 1 in produce):
                produce.append(layer)
        return cls(sorted(train), sorted(produce))

    def steps(self) -> list[int]:
        """The layers that need weights, in order."""
        return sorted({*self.train, *(layer - 1 for layer in self.produce if layer)})

    def owner(self, layer: int, processes: int) -> int:
        """The process that has a layer: its trained layers go around, and each one takes the layers before its own."""
        return sum(other < layer for other in self.train) % processes

    def buffers(self, processes: int) -> int:
        """Largest number of files with the inputs of a layer that exist at a time."""
        return min(processes, len(self.train)) + any(self.produce)  # layer 0 alone is produced from the embeddings

    def record(self) -> dict:
        """The walk as JSON values."""
        return asdict(self)
