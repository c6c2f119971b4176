"""Turns documents into rows of a fixed number of tokens.

All documents are joined to one stream, which is cut into rows, so there is no padding. Packed rows also have position
ids that start at 0 in every document; then no layer mixes tokens of two documents. If a document does not fit into a
row, its rest is treated as a new document in the next row.

Documents begin as the tokenizer begins a text, e.g. with BOS. `bos` says what a row begins with that is cut in the
middle of a document: "rows": with the same tokens, as every text does that the student will read; "documents": with
the next token of the document.

A text ends with the end-of-sequence token, unless the chat template ends a turn with it: then a model would learn to
end its turn with a document. A conversation is what the template makes of it. With `loss` "answers", the tokens of the
assistant alone count, and rows without any are left out.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hf_memmix.conversion.limits import check_vocabulary
from hf_memmix.conversion.text_rows import beginning_of, cut_marked_rows, encode
from hf_memmix.errors import UserError
from hf_memmix.training.chat_rows import answer_tokens, chat_tokens, ends_a_turn
from hf_memmix.training.recipe import check_choice
from hf_memmix.training.text_files import Conversation, documents, list_of

__all__ = ["StreamedBlocks", "TokenBlocks", "tokenize_files", "tokenizer_hash"]

Sources = str | Path | Iterable[str | Path]


def tokenize_documents(
    sources: Sources, tokenizer, field: str | None = None, loss: str = "all"
) -> Iterator[tuple[list[int], list[bool]]]:
    """For each document in order its tokens, and whether the loss counts the prediction that follows each of them.

    Raises:
        ValueError: a source cannot be read; or, with the loss of answers, a document has no answer.
    """
    beginning, eos = beginning_of(tokenizer), tokenizer.eos_token_id
    end = [] if eos is None or ends_a_turn(tokenizer) else [eos]
    for source in list_of(sources):
        for document in documents(source, field):
            if isinstance(document, Conversation) and loss == "answers":
                tokens, answers = answer_tokens(document, tokenizer)
                yield tokens, [*answers[1:], False]
                continue
            if loss == "answers":
                raise UserError(f"{str(source)!r} holds text without turns, but only answers count; give --loss all")
            if isinstance(document, Conversation):
                tokens = chat_tokens(document, tokenizer)
            else:
                tokens = beginning + encode(document, tokenizer) + end
            yield tokens, [True] * len(tokens)


def tokenize_files(files: Sources, tokenizer, field: str | None = None) -> Tensor:
    """All tokens of the files in order, [N] int64; see `tokenize_documents`."""
    return torch.tensor([token for tokens, _ in tokenize_documents(files, tokenizer, field) for token in tokens])


def tokenizer_hash(tokenizer) -> str:
    """A hash of the vocabulary and of the tokens that begin a text, the same on every machine."""
    known = repr(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    if beginning := beginning_of(tokenizer):
        known += repr(beginning)
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _rows(
    sources: Sources, tokenizer, block_size: int, pack: bool, bos: str, field: str | None, loss: str
) -> Iterator[dict[str, Tensor]]:
    """All full rows: `input_ids`, `position_ids` if packed, `loss_mask` if only answers count; [block_size] each."""
    check_choice("bos", bos)
    check_choice("loss", loss)
    beginning = beginning_of(tokenizer) if bos == "rows" else []
    parts = tokenize_documents(sources, tokenizer, field, loss)
    for tokens, positions, counted in cut_marked_rows(parts, block_size, beginning):
        if len(tokens) < block_size or not any(counted):
            continue
        row = {"input_ids": torch.tensor(tokens)}
        if pack:
            row["position_ids"] = torch.tensor(positions)
        if loss == "answers":
            row["loss_mask"] = torch.tensor(counted, dtype=torch.bool)
        yield row


class TokenBlocks(Dataset):
    """Rows of a token stream [N]: item i is `{"input_ids": [block_size]}`. Tokens that fill no row are left out.

    With `positions` [rows, block_size] (packed documents) an item also has `"position_ids"`, and with
    `loss_mask` [rows, block_size], which is true where the prediction of the next token counts or says how much it
    weighs, `"loss_mask"`. `drills` is the share of the rows that `fact_drills.with_drills` has made.
    """

    def __init__(
        self,
        tokens: Tensor,
        block_size: int,
        positions: Tensor | None = None,
        tokenizer: str = "",
        loss_mask: Tensor | None = None,
        drills: float = 0.0,
    ):
        _check_block_size(block_size)
        if len(tokens) < block_size:
            raise UserError(
                f"{len(tokens)} tokens do not fill one block of {block_size}; give more text or a smaller block"
            )
        count = len(tokens) // block_size
        self.blocks = tokens[: count * block_size].view(count, block_size)
        self.positions, self.tokenizer, self.loss_mask, self.drills = positions, tokenizer, loss_mask, drills

    @classmethod
    def from_files(
        cls,
        files: Sources,
        tokenizer,
        block_size: int,
        pack: bool = False,
        bos: str = "rows",
        field: str | None = None,
        loss: str = "all",
    ) -> "TokenBlocks":
        """Rows of the sources that `text_files.documents` reads.

        Args:
            pack: rows also have position ids that start at 0 in every document.
            bos: what begins as the tokenizer begins a text: all "rows", or only "documents".
            field: name of the field of a row that holds its text or its messages; None: `text` or `messages`.
            loss: what counts: "all" tokens, or only those of "answers".

        Raises:
            ValueError: the files fill no row, or cannot be read; see also `tokenize_documents`.
        """
        _check_block_size(block_size)
        rows = list(_rows(files, tokenizer, block_size, pack, bos, field, loss))
        if not rows and loss == "answers":
            raise UserError(f"no block of {block_size} tokens has an answer; give more text or a smaller block")
        if not rows:
            return cls(tokenize_files(files, tokenizer, field), block_size)  # raises
        columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        positions, mask = columns.get("position_ids"), columns.get("loss_mask")
        return cls(columns["input_ids"].flatten(), block_size, positions, tokenizer_hash(tokenizer), mask)

    @property
    def loss(self) -> str:
        """What counts: "all" tokens, or those of "answers"."""
        return "all" if self.loss_mask is None or self.drills else "answers"

    @property
    def block_size(self) -> int:
        return self.blocks.shape[1]

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError if a token is outside a vocabulary of this size."""
        check_vocabulary(self.blocks, size)

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
        row = {"input_ids": self.blocks, "position_ids": self.positions, "loss_mask": self.loss_mask}
        return {name: column[index] for name, column in row.items() if column is not None}

    def fingerprint(self) -> str:
        """A hash of block size, tokens, boundaries and counted tokens, the same on every machine."""
        data = self.blocks.numpy().astype("<i8").tobytes()
        if self.positions is not None:
            data += self.positions.numpy().astype("<i8").tobytes()
        if self.loss_mask is not None:
            data += self.loss_mask.numpy().tobytes()
        return hashlib.sha256(data + str(self.block_size).encode()).hexdigest()[:16]


class StreamedBlocks(IterableDataset):
    """The same rows, but read, tokenized and cut during training. After the last row it starts again with the first.

    A resumed run reads the rows that it has used before again, and skips them. Rows are not shuffled: shuffle the
    files before.
    """

    drills = 0.0  # a stream of text has no drills

    def __init__(
        self,
        sources: Sources,
        tokenizer,
        block_size: int,
        pack: bool = False,
        bos: str = "rows",
        field: str | None = None,
        loss: str = "all",
    ):
        _check_block_size(block_size)
        check_choice("bos", bos)
        check_choice("loss", loss)
        self.sources, self._tokenizer, self.pack, self.bos = list_of(sources), tokenizer, pack, bos
        self.field, self.loss = field, loss
        self.block_size, self.tokenizer, self.vocabulary = block_size, tokenizer_hash(tokenizer), None

    def check_vocabulary(self, size: int) -> None:
        """Check every row when it is read, and raise ValueError if a token is outside a vocabulary of this size."""
        self.vocabulary = size

    def document_lengths(self) -> Tensor:
        """As `TokenBlocks.document_lengths`, of the first documents only."""
        if not self.pack:
            return torch.tensor([self.block_size])
        return torch.tensor([min(len(tokens), self.block_size) for tokens, _ in self._first_documents()])

    def _first_documents(self) -> list[tuple[list[int], list[bool]]]:
        return list(islice(tokenize_documents(self.sources, self._tokenizer, self.field, self.loss), 64))

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
        options = (self.pack, self.bos, self.field, self.loss)
        for row in _rows(self.sources, self._tokenizer, self.block_size, *options):
            if self.vocabulary is not None:
                check_vocabulary(row["input_ids"], self.vocabulary)
            yield row

    def fingerprint(self) -> str:
        """A hash of the options, tokenizer and its chat template, names and sizes of the sources and their first 64
        documents.
        """
        sizes = [(str(s), Path(s).stat().st_size if Path(s).is_file() else None) for s in self.sources]
        how = (self.block_size, self.pack, self.bos, self.field, self.loss)
        content = repr((how, self.tokenizer, self._tokenizer.chat_template, sizes, self._first_documents()))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _check_block_size(block_size: int) -> None:
    if block_size < 2:
        raise UserError(f"block_size is {block_size}; it must be at least 2")
