"""The file that marks a folder as written by this tool. Only such a folder is ever replaced, and only if it is as it
was written: a file that somebody has put there is never removed.
"""

import json
import os
import re
from pathlib import Path

from hf_memmix.errors import UserError

MARKER = ".memmix.json"  # lists the files of the folder, by their paths in it


def mark_folder(folder: Path) -> None:
    """Write the marker: all files that are in the folder now are ours."""
    (folder / MARKER).write_text(json.dumps({"files": sorted(_files(folder))}, indent=1) + "\n", encoding="utf-8")


def add_to_marker(file: Path) -> None:
    """Record that we have written one more file into a folder; nothing is recorded in a folder that is not ours."""
    ours = _ours(file.parent)
    if ours is not None:
        names = {"files": sorted({*ours, file.name})}
        (file.parent / MARKER).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def check_file(file: Path, overwrite: bool, content: str, kind: str) -> None:
    """Raise UserError if a file exists, unless `overwrite` is set and it holds what this tool writes there.

    content: a regular expression that is found in every file of this `kind`, e.g. "a card".
    """
    if not os.path.lexists(file):
        return
    if not overwrite:
        raise UserError(f"{str(file)!r} exists; keep it and choose another name, or replace it (--overwrite)")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if not re.search(content, text):
        raise UserError(
            f"{str(file)!r} is not {kind} of memmix, so it is not replaced; remove it yourself, or choose another name"
        )


def check_replaceable(folder: Path) -> None:
    """Raise UserError unless we have written a folder and every file in it."""
    ours = _ours(folder)
    if ours is None:
        raise UserError(
            f"{str(folder)!r} was not written by memmix (it has no {MARKER}), so it is not replaced; remove it"
            " yourself, or give another folder"
        )
    if foreign := sorted(_files(folder) - ours):
        more = " ..." if len(foreign) > 3 else ""
        raise UserError(
            f"{str(folder)!r} holds {len(foreign)} files that memmix has not written: {', '.join(foreign[:3])}{more}."
            " They would be lost; move them, or give another folder"
        )


def _files(folder: Path) -> set[str]:
    """The paths of all files in a folder, except the marker. A link counts as a file."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in found} - {MARKER}


def _ours(folder: Path) -> set[str] | None:
    """The files that the marker lists; None without a valid marker."""
    try:
        return set(json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
