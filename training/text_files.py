"""Reads documents from local files of text, JSON, CSV and Parquet, or streams them from the Hub.

A text file is one document. A JSON line (.jsonl, .ndjson, .json), an item of a JSON array (.json), a row of a table
with named columns (.csv, .tsv) and a Parquet row are one document each; .gz may follow each ending. `hub:NAME`,
`hub:NAME:SPLIT` and `hub:NAME:CONFIG:SPLIT` stream a data set through the package `datasets`.

The document of a row is the text in its field `text`, or the conversation in its field `messages`: a list of
`{"role": ..., "content": ...}`, as chat templates read it, perhaps with the functions of the field `tools`.
"""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_memmix.errors import UserError

FIELDS = ("text", "messages")
TOOLS = "tools"
SHEETS = (".xls", ".xlsx")


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, its tools (None without them), and where it was read, for errors."""

    messages: list[dict]
    tools: list | None
    place: str


def read_text(path: str | Path) -> str:
    """The content of a UTF-8 text file. Raises ValueError with its name if it is missing, empty or binary."""
    with _opened(path) as file:
        raw = file.read()
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


def check_source(source: str | Path, field: str | None = None) -> None:
    """Raise ValueError for a file that does not exist, a spreadsheet, or a text file, which has no `field`.

    Nothing is read, and the Hub is not asked.
    """
    name = str(source)
    if name.startswith("hub:"):
        return
    if _ending(name) in SHEETS:
        raise UserError(f"{name!r} is a spreadsheet; save it as .csv, with the names of the columns in the first line")
    _existing(source)
    if field is not None and _ending(name) not in _READERS:
        raise UserError(f"{name!r} is a text file without fields, but --text-field is {field!r}; leave it out")


def documents(source: str | Path, field: str | None = None) -> Iterator[str | Conversation]:
    """The documents of one source, in order. Only the current document is kept in memory, but a JSON array as a whole.

    Args:
        field: name of the field that holds the text or the messages; None: that one of `FIELDS` that a row has.

    Raises:
        ValueError: a missing, empty or binary file, a broken line, or a row without text; the message names the place.
    """
    name, found = str(source), False
    check_source(source, field)
    reader = _hub if name.startswith("hub:") else _READERS.get(_ending(name))
    if reader is None:
        yield read_text(source)
        return
    for place, row in reader(source, {*FIELDS, TOOLS, field}):
        document = _document(row, field, f"{place} of {name!r}")
        if isinstance(document, Conversation) or document.strip():
            found = True
            yield document
    if not found:
        raise UserError(f"{name!r} holds no text")


def _document(row: object, field: str | None, place: str) -> str | Conversation:
    """Return the document of a row. Raises ValueError if the row has no document, or more than one."""
    if isinstance(row, str) and field is None:  # an item of a JSON array
        value = row
    elif isinstance(row, dict):
        name = field or _only_field(row, place)
        value = row.get(name)
        if isinstance(value, list) and value:
            return _conversation(value, row.get(TOOLS), place)
        if not isinstance(value, str) or (field is None and name != "text"):
            kinds = "a text, nor a list of messages"
            raise UserError(f"{place} has in its field {name!r} neither {kinds}; correct the row, or remove it")
    else:
        raise UserError(f"{place} is no object with named fields; write {{{FIELDS[0]!r}: ...}}")
    _check_characters(value, place)
    return value


def _only_field(row: dict, place: str) -> str:
    """The one of `FIELDS` that a row has."""
    present = [name for name in FIELDS if row.get(name) is not None]
    if len(present) == 1:
        return present[0]
    has = f"both {' and '.join(present)}" if present else f"neither {' nor '.join(FIELDS)}"
    raise UserError(f"{place} has {has}; name the field to read by --text-field (fields: {', '.join(map(str, row))})")


def _conversation(messages: list, tools: object, place: str) -> Conversation:
    """A conversation without the empty fields that tables give to every message."""
    filled = []
    for message in messages:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            keys = f" with {', '.join(map(str, message))}" if isinstance(message, dict) else ""
            raise UserError(f"{place} has a message{keys} that has no 'role'; write {{'role': ..., 'content': ...}}")
        if message.get("content") is not None:
            message = message | {"content": _joined(message["content"], place)}
            _check_characters(message["content"], place)
        filled.append({key: value for key, value in message.items() if value is not None})
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{place} has tools that are no list of functions; correct the row, or remove its {TOOLS!r}")
    return Conversation(filled, tools or None, place)


def _joined(content: object, place: str) -> str:
    """The text of a message, which may be a list of parts: many templates would write such a list as Python does."""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UserError(
                f"{place} has a message whose content is of the type {kind!r}; write a text, or a list of parts"
                " {'type': 'text', 'text': ...}"
            )
        texts.append(text)
    return "".join(texts)


def _check_characters(text: str, place: str) -> None:
    """Raise ValueError for text that is not valid Unicode. JSON can hold such text, but tokenizers refuse it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place} has half a surrogate pair at character {error.start} "
            f"(\\u{ord(text[error.start]):04x}), which is not valid text; correct the row, or remove it"
        ) from None


# ---- readers: each yields a place and a row, which needs to have the fields `wanted` only


def _json_lines(path: str | Path, wanted: set[str]) -> Iterator[tuple[str, object]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                raise UserError(
                    f"line {number} of {str(path)!r} is not JSON ({error}); give one object a line"
                ) from None


def _json(path: str | Path, wanted: set[str]) -> Iterator[tuple[str, object]]:
    """An array, one object on many lines, or JSON lines."""
    whole = _json_value(path)
    if whole is None:
        yield from _json_lines(path, wanted)
        return
    for number, row in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield f"item {number}", row


def _json_value(path: str | Path) -> object:
    """The value that a whole file holds; None if it holds JSON lines, because its first line is a whole object.

    Raises ValueError with the line of the fault if the file begins as an array or an object on many lines does.
    """
    with _opened(path) as file:
        first = next((line.strip() for line in file if line.strip()), b"")
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(first), dict):
                return None
        file.seek(0)
        try:
            return json.loads(content := file.read())
        except (ValueError, RecursionError) as error:
            if not (first.startswith(b"[") or first == b"{"):
                return None
            line = getattr(error, "lineno", 1)
            if isinstance(error, UnicodeDecodeError):
                line = content.count(b"\n", 0, error.start) + 1
            raise UserError(f"line {line} of {str(path)!r} is not JSON ({error}); correct it") from None


def _table(path: str | Path, wanted: set[str]) -> Iterator[tuple[str, object]]:
    csv.field_size_limit(sys.maxsize)  # the default refuses texts of more than 128 KiB
    with _opened(path) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        rows = csv.DictReader(lines, dialect="excel-tab" if _ending(path) == ".tsv" else "excel", strict=True)
        try:
            for row in rows:
                if None in row:  # DictReader puts what is too much under this name
                    raise UserError(
                        f"line {rows.line_num} of {str(path)!r} has {len(row) - 1 + len(row[None])} fields, but the"
                        f" first line names {len(rows.fieldnames)}; put a field that contains the separator in quotes"
                    )
                yield f"line {rows.line_num}", row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"line {rows.line_num} of {str(path)!r} is no line of a table ({error})") from None


def _parquet(path: str | Path, wanted: set[str]) -> Iterator[tuple[str, object]]:
    from pyarrow import ArrowInvalid, parquet

    with _opened(path) as raw:
        try:
            file = parquet.ParquetFile(raw)
        except ArrowInvalid as error:
            raise UserError(f"{str(path)!r} is not a Parquet file ({error}); copy it again") from None
        number, columns = 0, [name for name in file.schema_arrow.names if name in wanted]
        for batch in file.iter_batches(batch_size=256, columns=columns or None):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


def _hub(source: str | Path, wanted: set[str]) -> Iterator[tuple[str, object]]:
    from datasets import load_dataset

    _, name, *rest = str(source).split(":")
    if len(rest) > 2:
        raise UserError(f"{str(source)!r} has too many parts; write hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    split = rest.pop() if rest else "train"
    for number, row in enumerate(load_dataset(name, *rest, split=split, streaming=True), 1):
        yield f"row {number}", row


_READERS = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
    ".csv": _table,
    ".tsv": _table,
}


def _ending(path: str | Path) -> str:
    """The ending that names the kind of a file, without .gz."""
    name = str(path).lower().removesuffix(".gz")
    return Path(name).suffix


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[io.BufferedIOBase]:
    """A file to read bytes from, unpacked if its name ends in .gz."""
    path = _existing(path)
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        try:
            yield file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{str(path)!r} is no complete gzip file ({error}); copy it again") from None


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        problem = "is a folder; give text files" if path.is_dir() else "does not exist"
        if path.is_symlink():
            problem = "is a symbolic link that leads to no file; correct it"
        raise UserError(f"text file {str(path)!r} {problem}")
    return path
