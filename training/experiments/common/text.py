"""The texts of the language models: a long training text, and the bundled development and held-out texts.

    python -m hf_memmix.training.experiments.bundled.fetch_text --out .scratch/teacher
    python training/experiments/common/text.py --text .scratch/teacher/train.txt --out text.npy

The second command tokenises the training text with the bundled tokenizer and writes a uint16 array. A machine that has
the array does not need the text. Learning rates are chosen by the development loss; the held-out loss is reported.
"""

import functools
import hashlib
from pathlib import Path
from typing import Annotated

import numpy
import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer

from hf_memmix.assets import asset_path
from hf_memmix.training.data import tokenize_files

VOCAB = 4096


def tokenizer():
    return AutoTokenizer.from_pretrained(asset_path("tiny_teacher"))


@functools.cache
def train_tokens(path: Path) -> Tensor:
    """The training tokens [N] int32, from a text file or from the array that this module's command writes."""
    if path.suffix != ".npy":
        return tokenize_files(path, tokenizer()).int()
    return torch.from_numpy(numpy.load(path, allow_pickle=False).astype(numpy.int32))


@functools.cache
def measured_tokens(name: str) -> Tensor:
    """The tokens [N] int64 of the bundled text "dev" or "heldout"."""
    return tokenize_files(asset_path(f"{name}.txt"), tokenizer())


def describe_training_text(path: Path) -> dict:
    """The description of the training text that a result file records.

    "text": the number of the training tokens and their sha256. "chance_loss": the loss on the development text of a
    model that predicts every token by its frequency alone; a model with a higher loss has learnt nothing.
    """
    tokens = train_tokens(path)
    counts = torch.bincount(tokens.long(), minlength=VOCAB) + 1
    digest = hashlib.sha256(tokens.numpy().astype("<u2").tobytes()).hexdigest()
    chance = -(counts / counts.sum()).log()[measured_tokens("dev")].mean().item()
    return {"text": {"tokens": len(tokens), "sha256": digest}, "chance_loss": chance}


class Windows:
    """Batches of windows of one sequence of tokens. Each epoch cuts it at a new offset and shuffles the windows again.

    `windows(step)` returns [batch, length] int64 on the device of the tokens. It depends only on step, seed, length
    and batch, so all models read the same text in the same order.
    """

    def __init__(self, tokens: Tensor, length: int, batch: int, seed: int):
        self.per_epoch = (len(tokens) // length - 1) // batch
        if self.per_epoch < 1:
            raise ValueError(
                f"{len(tokens)} tokens are less than one batch of {batch} windows of {length}; give more text"
            )
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.epoch, self.starts = -1, None

    def __call__(self, step: int) -> Tensor:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
            offset = int(torch.randint(self.length, (1,), generator=generator))
            order = torch.randperm(len(self.tokens) // self.length - 1, generator=generator)
            self.epoch, self.starts = epoch, (offset + order * self.length).to(self.tokens.device)
        starts = self.starts[index * self.batch : (index + 1) * self.batch]
        return self.tokens[starts[:, None] + torch.arange(self.length, device=starts.device)].long()


def main(
    text: Annotated[Path, typer.Option(help="the text file")],
    out: Annotated[Path, typer.Option(help="the .npy file to write")],
) -> None:
    """Tokenise a text."""
    tokens = train_tokens(text)
    out.parent.mkdir(parents=True, exist_ok=True)
    numpy.save(out, tokens.numpy().astype(numpy.uint16))
    print(f"{len(tokens)} tokens in {out}")


if __name__ == "__main__":
    typer.run(main)
