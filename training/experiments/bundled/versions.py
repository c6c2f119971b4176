"""Which bundled transformer a result is of: its weights may be trained again, and older results stay true of the older
ones. `git log -- hf_memmix/assets/tiny_teacher` has all of them.
"""

import json
from pathlib import Path

from hf_memmix.assets import asset_path
from hf_memmix.conversion.hashes import file_hash

# the sha256 of the weights of the first bundled transformer; results that name no weights were measured with it
FIRST = "48a5c14aa1d59ce9648917e3a8f67b57e568cd74c4ff324944ec41b2ac87e31f"


def bundled_teacher() -> dict[str, str]:
    """The sha256 of the bundled transformer's weights, for the record of a result."""
    return {"sha256": file_hash(asset_path("tiny_teacher") / "model.safetensors")}


def teacher_of(results: dict) -> str:
    """The sha256 of the bundled transformer with which the results were measured."""
    return results.get("teacher", {}).get("sha256", FIRST)


def earlier_teacher(results: dict) -> str:
    """Words for a caption if the results are of another transformer than the one that is bundled now, else ""."""
    sha256 = teacher_of(results)
    return "" if sha256 == bundled_teacher()["sha256"] else f"an earlier bundled transformer, sha256 {sha256[:12]}"


def as_sentence(results: dict) -> str:
    """The words of `earlier_teacher` as a sentence after others, or ""."""
    words = earlier_teacher(results)
    return f" Measured with {words}." if words else ""


def check_teacher(path: Path, about: dict) -> None:
    """Results in the file `path` must be of the transformer that `about` names, because more rows are added to them.

    Raises:
        ValueError: they are of another one.
    """
    if "teacher" in about and path.exists():
        found = teacher_of(json.loads(path.read_text(encoding="utf-8")))
        if found != about["teacher"]["sha256"]:
            raise ValueError(
                f"{path} was measured with the transformer of sha256 {found[:12]}, and the bundled one has "
                f"{about['teacher']['sha256'][:12]}; choose another --out"
            )
