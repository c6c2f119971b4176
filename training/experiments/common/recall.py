"""Trains a small model on multi-query associative recall (`mqar.py`) and measures its accuracy."""

import functools
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from hf_memmix.training.experiments.common.fit import autocast, build, fit, query_logits, recall_loss
from hf_memmix.training.experiments.common.harness import device
from hf_memmix.training.experiments.common.mqar import DEV_SEED, TEST_SEED, VOCAB, draw_recall

TEST_BATCHES = 8
SOLVED = 0.01  # training ends early below this loss


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


@torch.no_grad()
def measure(model, batch: int, length: int, pairs: int, seed: int) -> tuple[float, float]:
    """Loss and accuracy on sequences that the seed draws; training uses other seeds."""
    draws, found = generator(seed), []
    with autocast():
        for _ in range(TEST_BATCHES):
            recall = draw_recall(batch, length, pairs, draws)
            logits = query_logits(model, recall.ids, recall.positions)
            loss = F.cross_entropy(logits.flatten(0, 1), recall.values.flatten())
            found.append(torch.stack([loss, (logits.argmax(-1) == recall.values).float().mean()]))
    loss, accuracy = torch.stack(found).mean(0).tolist()
    return loss, accuracy


def train_recall(
    args: SimpleNamespace,
    mixer: str | list[str],
    options: dict,
    length: int,
    pairs: int,
    lr: float,
    seed: int,
) -> dict:
    """Train a model for `args.tokens` tokens and measure it.

    Args:
        length, pairs: tokens and key-value pairs of a sequence.

    Returns:
        the result of `fit`, the number of parameters and of trained sequences, the loss on development sequences, and
        the accuracy on test sequences.
    """
    model = build(args, mixer, options, vocab=VOCAB, context=length, seed=seed)
    batch = max(1, args.batch_tokens // length)
    steps = max(1, args.tokens // (batch * length))
    stream = generator(seed)

    def batch_of(step):
        recall = draw_recall(batch, length, pairs, stream)
        return recall.ids, recall.positions, recall.values

    loss_of = functools.partial(recall_loss, model)
    result = fit(model, loss_of, steps, lr, args, batch_of, stop_below_loss=SOLVED)
    result |= {"parameters": model.num_parameters(), "sequences": result["steps"] * batch}
    if not result["finite"]:
        return result
    model.eval()
    dev, test = (measure(model, batch, length, pairs, start + seed) for start in (DEV_SEED, TEST_SEED))
    return result | {"dev_loss": dev[0], "accuracy": test[1]}
