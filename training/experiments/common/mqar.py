"""Multi-query associative recall: a sequence lists key-value pairs, then repeats the keys, each as a query for its
value.

The data follow the `multiquery_ar` generator of zoology (Arora et al., "Zoology: Measuring and Improving Recall in
Efficient Language Models", arXiv:2312.04927) and are drawn on the device. A sequence is k_1 v_1 ... k_n v_n, then the
query of pair i stands at position 2 n + 2 slot_i. Slots are drawn without replacement with p_s ~ a s^(a - 1), so most
queries stand soon after the pairs. The input does not contain the answers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB = 8192
POWER = 0.01
TEST_SEED, DEV_SEED = 10**6, 10**6 // 2  # training seeds are smaller


@dataclass(frozen=True)
class Recall:
    """A batch: token ids [B, L], the positions [B, n] of the n queries, and the values [B, n] that answer them."""

    ids: Tensor
    positions: Tensor
    values: Tensor


def check_cell(length: int, pairs: int, vocab: int = VOCAB) -> None:
    """Raise ValueError unless sequences of `length` have room for `pairs` pairs and their queries."""
    if length % 2 or not 1 <= pairs <= length // 4:
        raise ValueError(f"{pairs} pairs need an even length of at least {4 * pairs}, it is {length}")
    if pairs >= vocab // 2:
        raise ValueError(f"{pairs} different keys need a vocabulary over {2 * pairs}, it is {vocab}")


def draw_recall(
    batch: int,
    length: int,
    pairs: int,
    generator: torch.Generator,
    *,
    vocab: int = VOCAB,
    power: float = POWER,
    random_non_queries: bool = True,
) -> Recall:
    """One batch on the generator's device.

    Args:
        pairs: n, with 4 n <= length.
        power: a of the slots' distribution.
        random_non_queries: fill the positions outside pairs and queries with random tokens instead of zeros.

    Raises:
        ValueError: see `check_cell`.
    """
    check_cell(length, pairs, vocab)
    place = {"generator": generator, "device": generator.device}
    half = vocab // 2
    # the n largest of independent random numbers are a sample without replacement, in random order
    keys = torch.rand(batch, half - 1, **place).topk(pairs).indices + 1
    values = torch.rand(batch, vocab - half, **place).topk(pairs).indices + half
    space = (length - 2 * pairs) // 2
    slot = torch.arange(1, space + 1, device=generator.device)
    weight = (power * slot.double() ** (power - 1)).log()
    # with Gumbel noise the n largest are a sample without replacement with these weights, in the order of drawing
    noise = (
        -torch.empty(batch, space, dtype=torch.double, device=generator.device).exponential_(generator=generator).log()
    )
    positions = 2 * pairs + 2 * (weight + noise).topk(pairs).indices
    if random_non_queries:
        ids = torch.randint(vocab, (batch, length), **place)
    else:
        ids = torch.zeros(batch, length, dtype=torch.long, device=generator.device)
    ids[:, : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
    ids.scatter_(1, positions, keys)
    return Recall(ids, positions, values)
