"""Drills of recall as batches of a training from nothing, and their loss."""

import random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hf_memmix.training.drills import DrillMaterial, row_of

DRILL_TEXT = 0.25  # weight of those tokens of a drill that are no answers


def losses_of_drills(logits: Tensor, ids: Tensor, weights: Tensor, text: int) -> tuple[Tensor, Tensor]:
    """The mean losses of text and of answers, in nats.

    logits [B, T - 1, V] of the tokens after the first one, ids [B, T], weights of answers [B, T]. The first `text`
    rows are real text; tokens of the other rows that are no answers have the weight `DRILL_TEXT` in the first loss.
    """
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    answers = weights[:, 1:]
    plain = (answers == 0).float()
    plain = torch.cat([plain[:text], DRILL_TEXT * plain[text:]])
    return (loss * plain).sum() / plain.sum(), (loss * answers).sum() / answers.sum().clamp_min(1)


class Rows(IterableDataset):
    """Batches of `rows` rows of `length` tokens: half of them real text, half drills, in this order.

    An item is (ids [rows, length] int32, weights [rows, length] fp32); weights are 0 in real text. Every worker of a
    loader draws its own batches, from `seed` and its number.
    """

    def __init__(self, material: DrillMaterial, rows: int, length: int, seed: int):
        self.material, self.rows, self.length, self.seed = material, rows, length, seed

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        draw = random.Random(f"{self.seed} {self.length} {0 if worker is None else worker.id}")
        while True:
            yield self.batch(draw)

    def batch(self, draw: random.Random) -> tuple[Tensor, Tensor]:
        text = self.rows // 2
        rows = [(self.material.window(self.length, draw), [0.0] * self.length) for _ in range(text)]
        rows += [row_of(self.material, self.length, draw) for _ in range(self.rows - text)]
        ids, weights = zip(*rows, strict=True)
        return torch.tensor(ids, dtype=torch.int32), torch.tensor(weights)


def batches_of(material: DrillMaterial, length: int, args: SimpleNamespace):
    """An iterator of batches of `args.batch_tokens` in rows of `length`. Its workers are forked before CUDA starts."""
    rows = Rows(material, args.batch_tokens // length, length, args.seed)
    options = {"prefetch_factor": 4, "persistent_workers": True} if args.workers else {}
    pin = torch.cuda.is_available()
    return iter(DataLoader(rows, batch_size=None, num_workers=args.workers, pin_memory=pin, **options))
