"""Turns documents into rows of a fixed number of tokens.

All documents are joined to one stream, which is cut into rows, so there is no padding. Packed rows also have position
ids that start at 0 in every document; then no layer mixes tokens of two documents. If a document does not fit into a
row, its rest is treated as a new document in the next row.

Documents begin as the tokenizer begins a text, e.g. with BOS. `bos` says what a row begins with that is cut in the
middle of a document: "rows": with the same tokens, as every text does that the student will read; "documents": with
the next token of the document.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hf_memmix.conversion.text_rows import beginning_of, cut_rows, encode
from hf_memmix.errors import UserError
from hf_memmix.training.recipe import check_bos
from hf_memmix.training.text_files import documents, list_of

__all__ = ["StreamedBlocks", "TokenBlocks", "tokenize_files", "tokenizer_hash"]

Sources = str | Path | Iterable[str | Path]


def tokenize_documents(sources: Sources, tokenizer) -> Iterator[list[int]]:
    """The tokens of each document in order, as the tokenizer begins a text, with the end-of-sequence token if any."""
    beginning, end = beginning_of(tokenizer), [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for source in list_of(sources):
        for text in documents(source):
            yield beginning + encode(text, tokenizer) + end


def tokenize_files(files: Sources, tokenizer) -> Tensor:
    """All tokens of the files in order, [N] int64; see `tokenize_documents`."""
    return torch.tensor([token for tokens in tokenize_documents(files, tokenizer) for token in tokens])


def tokenizer_hash(tokenizer) -> str:
    """A hash of the vocabulary and of the tokens that begin a text, the same on every machine."""
    known = repr(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    if beginning := beginning_of(tokenizer):
        known += repr(beginning)
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _rows(sources: Sources, tokenizer, block_size: int, bos: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens and positions [block_size] of all full rows."""
    check_bos(bos)
    beginning = beginning_of(tokenizer) if bos == "rows" else []
    for tokens, positions in cut_rows(tokenize_documents(sources, tokenizer), block_size, beginning):
        if len(tokens) == block_size:
            yield torch.tensor(tokens), torch.tensor(positions)


class TokenBlocks(Dataset):
    """Rows of a token stream [N]: item i is `{"input_ids": [block_size]}`. Tokens that fill no row are left out.

    With `positions` [rows, block_size] (packed documents) an item also has `"position_ids"`.
    """

    def __init__(self, tokens: Tensor, block_size: int, positions: Tensor | None = None, tokenizer: str = ""):
        _check_block_size(block_size)
        if len(tokens) < block_size:
            raise UserError(
                f"{len(tokens)} tokens do not fill one block of {block_size}; give more text or a smaller block"
            )
        count = len(tokens) // block_size
        self.blocks = tokens[: count * block_size].view(count, block_size)
        self.positions, self.tokenizer = positions, tokenizer

    @classmethod
    def from_files(
        cls, files: Sources, tokenizer, block_size: int, pack: bool = False, bos: str = "rows"
    ) -> "TokenBlocks":
        """Rows of local files.

        Args:
            pack: rows also have position ids that start at 0 in every document.
            bos: what begins as the tokenizer begins a text: all "rows", or only "documents".

        Raises:
            ValueError: the files fill no row, or cannot be read.
        """
        _check_block_size(block_size)
        rows = list(_rows(files, tokenizer, block_size, bos))
        if not rows:
            return cls(tokenize_files(files, tokenizer), block_size)  # raises
        tokens, positions = (torch.stack(column) for column in zip(*rows, strict=True))
        return cls(tokens.flatten(), block_size, positions if pack else None, tokenizer_hash(tokenizer))

    @property
    def block_size(self) -> int:
        return self.blocks.shape[1]

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError if a token is outside a vocabulary of this size."""
        _check_vocabulary(self.blocks, size)

    def document_lengths(self) -> Tensor:
        """Number of tokens [N] of each packed document, or part of one in a row; of each row if nothing is packed."""
        if self.positions is None:
            return torch.full((len(self.blocks),), self.block_size)
        first = self.positions == 0
        first[:, 0] = True
        starts = first.flatten().nonzero()[:, 0]
        return torch.diff(starts, append=torch.tensor([self.positions.numel()]))

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {"input_ids": self.blocks[index]}
        return row if self.positions is None else row | {"position_ids": self.positions[index]}

    def fingerprint(self) -> str:
        """A hash of block size, tokens and boundaries, the same on every machine."""
        data = self.blocks.numpy().astype("<i8").tobytes()
        if self.positions is not None:
            data += self.positions.numpy().astype("<i8").tobytes()
        return hashlib.sha256(data + str(self.block_size).encode()).hexdigest()[:16]


class StreamedBlocks(IterableDataset):
    """The same rows, but read, tokenized and cut during training. After the last row it starts again with the first.

    A resumed run reads the rows that it has used before again, and skips them. Rows are not shuffled: shuffle the
    files before.
    """

    def __init__(self, sources: Sources, tokenizer, block_size: int, pack: bool = False, bos: str = "rows"):
        _check_block_size(block_size)
        check_bos(bos)
        self.sources, self._tokenizer, self.pack, self.bos = list_of(sources), tokenizer, pack, bos
        self.block_size, self.tokenizer, self.vocabulary = block_size, tokenizer_hash(tokenizer), None

    def check_vocabulary(self, size: int) -> None:
        """Check every row when it is read, and raise ValueError if a token is outside a vocabulary of this size."""
        self.vocabulary = size

    def document_lengths(self) -> Tensor:
        """As `TokenBlocks.document_lengths`, of the first documents only."""
        if not self.pack:
            return torch.tensor([self.block_size])
        return torch.tensor([min(len(part), self.block_size) for part in self._first_documents()])

    def _first_documents(self) -> list[list[int]]:
        return list(islice(tokenize_documents(self.sources, self._tokenizer), 64))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            count = 0
            for row in self.one_pass():
                count += 1
                yield row
            if not count:
                raise UserError(f"all sources together do not fill one block of {self.block_size}; give more text")

    def one_pass(self) -> Iterator[dict[str, Tensor]]:
        """All rows once."""
        for tokens, positions in _rows(self.sources, self._tokenizer, self.block_size, self.bos):
            if self.vocabulary is not None:
                _check_vocabulary(tokens, self.vocabulary)
            yield {"input_ids": tokens} | ({"position_ids": positions} if self.pack else {})

    def fingerprint(self) -> str:
        """A hash of block size, `bos`, tokenizer, names and sizes of the sources and their first 64 documents."""
        sizes = [(str(s), Path(s).stat().st_size if Path(s).is_file() else None) for s in self.sources]
        content = repr((self.block_size, self.pack, self.bos, self.tokenizer, sizes, self._first_documents()))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _check_block_size(block_size: int) -> None:
    if block_size < 2:
        raise UserError(f"block_size is {block_size}; it must be at least 2")


def _check_vocabulary(tokens: Tensor, size: int) -> None:
    if int(tokens.max()) >= size:
        raise UserError(
            f"token {int(tokens.max())} is outside the vocabulary of {size}; use the teacher's own tokenizer"
        )
