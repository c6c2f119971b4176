"""Local text files -> one stream of tokens -> fixed blocks that every step reads whole.

Blocks are computed once and kept in memory, so a resumed run skips forward without reading anything again, and the
fingerprint of the tokens tells whether it is still the same data.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def read_text(path: str | Path) -> str:
    """One UTF-8 text file. Raises ValueError for a missing, empty or binary file, naming it."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder; give text files" if path.is_dir() else "does not exist"
        raise ValueError(f"text file {str(path)!r} {problem}")
    raw = path.read_bytes()
    if b"\0" in raw:
        raise ValueError(f"{str(path)!r} is binary (it holds NUL bytes); give plain UTF-8 text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 (byte {error.start}); convert it, e.g. with iconv") from None
    if not text.strip():
        raise ValueError(f"{str(path)!r} holds no text")
    return text


def text_record(path: str | Path) -> dict:
    """Which text was read: name, size and sha256 of the file, for the record of a measurement."""
    content = Path(path).read_bytes()
    return {"file": Path(path).name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def tokenize_files(files: str | Path | Iterable[str | Path], tokenizer) -> Tensor:
    """All tokens of the files in order, [N] int64; the tokenizer's end-of-sequence token, if any, closes each file."""
    files = [files] if isinstance(files, (str, Path)) else list(files)
    if not files:
        raise ValueError("no text files given")
    tokens: list[int] = []
    for file in files:
        # verbose=False: the length warning is about feeding all of it to a model at once
        tokens += tokenizer(read_text(file), add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
    return torch.tensor(tokens, dtype=torch.long)


class TokenBlocks(Dataset):
    """Consecutive blocks of a token stream [N]: item i is `{"input_ids": [block_size]}`; the rest is left out."""

    def __init__(self, tokens: Tensor, block_size: int):
        if block_size < 2:
            raise ValueError(f"block_size is {block_size}; it must be at least 2")
        if len(tokens) < block_size:
            raise ValueError(
                f"{len(tokens)} tokens do not fill one block of {block_size}; give more text or a smaller block"
            )
        count = len(tokens) // block_size
        self.blocks = tokens[: count * block_size].view(count, block_size)

    @classmethod
    def from_files(cls, files: str | Path | Iterable[str | Path], tokenizer, block_size: int) -> "TokenBlocks":
        """Blocks of local text files."""
        return cls(tokenize_files(files, tokenizer), block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index]}

    def fingerprint(self) -> str:
        """A hash of block size and tokens, the same on every machine."""
        data = self.blocks.numpy().astype("<i8").tobytes()
        return hashlib.sha256(data + str(self.blocks.shape[1]).encode()).hexdigest()[:16]
