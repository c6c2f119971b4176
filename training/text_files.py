"""Reads documents from local text, JSON lines and Parquet files, or streams them from the Hub.

A text file is one document. A JSON line (.jsonl, .ndjson, .json), an item of a JSON array (.json) or a Parquet row is
one document, in its field `text`. `hub:NAME` and `hub:NAME:SPLIT` stream a data set through the package `datasets`.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_memmix.errors import UserError

FIELD = "text"
TABLES = (".csv", ".tsv", ".xls", ".xlsx")


def read_text(path: str | Path) -> str:
    """The content of a UTF-8 text file. Raises ValueError with its name if it is missing, empty or binary."""
    raw = _existing(path).read_bytes()
    if b"\0" in raw:
        raise UserError(f"{str(path)!r} is binary (it holds NUL bytes); give plain UTF-8 text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 (byte {error.start}); convert it, e.g. with iconv") from None
    if not text.strip():
        raise UserError(f"{str(path)!r} holds no text")
    return text


def text_record(path: str | Path) -> dict:
    """Name, size and sha256 of a text file, for the record of a measurement."""
    content = Path(path).read_bytes()
    return {"file": Path(path).name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def list_of(sources: str | Path | Iterable[str | Path]) -> list[str | Path]:
    """The sources as a list. Raises ValueError if there is none."""
    sources = [sources] if isinstance(sources, (str, Path)) else list(sources)
    if not sources:
        raise UserError("no text files given")
    return sources


def check_source(source: str | Path) -> None:
    """Raise ValueError for a file that does not exist, or a table. Nothing is read, and the Hub is not asked."""
    name = str(source)
    if name.startswith("hub:"):
        return
    if Path(name).suffix.lower() in TABLES:
        raise UserError(
            f'{name!r} is a table; write its text as .jsonl, one {{"text": ...}} per line, or as .parquet with'
            f" a column {FIELD!r}"
        )
    _existing(source)


def documents(source: str | Path) -> Iterator[str]:
    """The documents of one source, in order. Only the current document is kept in memory.

    Raises ValueError, naming the place, for a missing, empty or binary file, a broken line and a row without text.
    """
    name, found = str(source), False
    check_source(source)
    reader = _hub if name.startswith("hub:") else _READERS.get(Path(name).suffix.lower())
    if reader is None:
        yield read_text(source)
        return
    for place, text in reader(source):
        if not isinstance(text, str):
            raise UserError(f"{place} of {name!r} has no text in its field {FIELD!r}; rename the field that holds it")
        if text.strip():
            _check_characters(text, place, name)
            found = True
            yield text
    if not found:
        raise UserError(f"{name!r} holds no text")


def _check_characters(text: str, place: str, name: str) -> None:
    """Raise ValueError for text that is not valid Unicode. JSON can hold such text, but tokenizers refuse it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place} of {name!r} has half a surrogate pair at character {error.start} "
            f"(\\u{ord(text[error.start]):04x}), which is not valid text; correct the row, or remove it"
        ) from None


def _json_lines(path: str | Path) -> Iterator[tuple[str, object]]:
    with _existing(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                raise UserError(
                    f"line {number} of {str(path)!r} is not JSON ({error}); give one object a line"
                ) from None
            yield f"line {number}", row.get(FIELD) if isinstance(row, dict) else None


def _json(path: str | Path) -> Iterator[tuple[str, object]]:
    """An array, one object on many lines, or JSON lines."""
    whole = _json_value(path)
    if whole is None:
        yield from _json_lines(path)
        return
    for number, row in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield f"item {number}", row.get(FIELD) if isinstance(row, dict) else row


def _json_value(path: str | Path) -> object:
    """The value that a whole file holds; None if its first line is an object, or the file is no JSON."""
    with _existing(path).open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(first), dict):
                return None
        file.seek(0)
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(file.read())
    return None


def _parquet(path: str | Path) -> Iterator[tuple[str, object]]:
    from pyarrow import ArrowInvalid, parquet

    try:
        file = parquet.ParquetFile(_existing(path))
    except ArrowInvalid as error:
        raise UserError(f"{str(path)!r} is not a Parquet file ({error}); copy it again") from None
    if FIELD not in file.schema_arrow.names:
        raise UserError(
            f"{str(path)!r} has no column {FIELD!r}, only {', '.join(file.schema_arrow.names)}; rename one"
        )
    number = 0
    for batch in file.iter_batches(batch_size=256, columns=[FIELD]):
        for text in batch.column(0).to_pylist():
            number += 1
            yield f"row {number}", text


def _hub(source: str | Path) -> Iterator[tuple[str, object]]:
    from datasets import load_dataset

    _, name, *split = str(source).split(":")
    for number, row in enumerate(load_dataset(name, split=split[0] if split else "train", streaming=True), 1):
        yield f"row {number}", row.get(FIELD)


_READERS = {".jsonl": _json_lines, ".json": _json, ".ndjson": _json_lines, ".parquet": _parquet}


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        problem = "is a folder; give text files" if path.is_dir() else "does not exist"
        if path.is_symlink():
            problem = "is a symbolic link that leads to no file; correct it"
        raise UserError(f"text file {str(path)!r} {problem}")
    return path
