"""What teaches the bundled transformer to recall: rows of drills beside the text, and how its recall is measured.

The words of the probes are those of the text that is measured. Every fourth of them is unseen: it stands in no drill
of pairs, passwords or chains. The other ones may stand in drills, but the probes draw other pairs.
"""

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_memmix.training.drills import SHORTEST, DrillMaterial, drills_of, unseen_of
from hf_memmix.training.evaluation.probes import Material, by_length, run_probes
from hf_memmix.training.evaluation.probes.grid import LENGTHS
from hf_memmix.training.experiments.bundled.language_model import losses_of_drills

TASKS = ("niah", "mqar", "kv", "variables")
DEV_TASKS = ("niah", "mqar")
DEV_ROWS = 32  # rows of drills whose answers' loss is measured on development text


class DrilledWindows(Dataset):
    """Batches of windows of text with rows of drills beside them; it has no single items.

    windows: a data set with `length`, whose items are windows of text. The drills of a window depend on `seed`, on
    `epoch` and on its index, not on the number of workers. A batch of `B` windows is (text [B, length], drills
    [D, length], weights of answers [D, length]) with D = ceil(B / every).

    Raises:
        ValueError: the rows are too short for a drill.
    """

    def __init__(self, windows: Dataset, material: DrillMaterial, seed: int, every: int = 1):
        if windows.length < SHORTEST:
            raise ValueError(f"drills need rows of at least {SHORTEST} tokens, and the context has {windows.length}")
        self.windows, self.material, self.seed, self.every, self.epoch = windows, material, seed, every, 0

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        text = torch.stack([self.windows[index] for index in indices])
        drills, weights = zip(*(self.drills(index) for index in indices[:: self.every]), strict=True)
        return text, torch.stack(drills), torch.stack(weights)

    def drills(self, index: int) -> tuple[Tensor, Tensor]:
        length = self.windows.length
        draw = random.Random(f"{self.seed} {self.epoch} {length} {index}")
        return drills_of(self.material, length, draw)


class DevRecall:
    """Recall on the development text: the loss of answers in drills, and exact answers to a few probes."""

    def __init__(self, tokenizer, text: str, material: DrillMaterial, context: int, samples: int):
        draw = random.Random("dev")
        rows = [drills_of(material, context, draw) for _ in range(DEV_ROWS)]
        self.ids, self.weights = (torch.stack(part) for part in zip(*rows, strict=True))
        self.material, self.samples = Material(tokenizer, text), samples
        self.lengths = sorted({max(SHORTEST, context // 4), context})

    @torch.no_grad()
    def measure(self, model, probes: bool = True) -> dict:
        """`{"dev_answers": nats}`; with `probes` also `"dev_recall": {task: {length: share of exact answers}}`."""
        device, total = next(model.parameters()).device, 0.0
        model.eval()
        for ids, weights in zip(self.ids.split(8), self.weights.split(8), strict=True):
            ids, weights = ids.to(device), weights.to(device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            total += losses_of_drills(logits, ids, weights, 0)[1].item() * weights[:, 1:].sum().item()
        answers = {"dev_answers": round(total / self.weights[:, 1:].sum().item(), 4)}
        if not probes:
            return answers
        found = run_probes(
            {"model": model},
            self.material,
            tasks=DEV_TASKS,
            lengths=tuple(self.lengths),
            samples=self.samples,
            control=False,
        )
        recall = {task: {} for task in DEV_TASKS}
        for row in by_length(found):
            recall[row["task"]][str(row["length"])] = round(row["model"], 4)
        return answers | {"dev_recall": recall}


def measure_recall(models: dict, tokenizer, text: str, context: int, samples: int = 16) -> dict:
    """Exact answers of models by task and length, for all words of the probes about `text` and for the unseen ones.

    models: by name. Returns `{"words": rows, "unseen": rows}`; a row is `{"task", "length", "answers"}` and the share
    of every model by its name.
    """
    material, result = Material(tokenizer, text), {}
    lengths = tuple(length for length in LENGTHS if length <= context) or (context,)
    for name, words in (("words", material), ("unseen", unseen_of(material))):
        options = {"tasks": TASKS, "lengths": lengths, "samples": samples, "control": False}
        result[name] = by_length(run_probes(models, words, **options))
    return result
