"""Files of the package with which every command runs offline: a teacher, a converted student, and texts."""

from pathlib import Path

from hf_memmix.errors import UserError

_FOLDER = Path(__file__).parent


def asset_path(name: str) -> Path:
    """The path of a shipped file or folder: "tiny_teacher", "tiny_gka", "train.txt", "dev.txt" or "heldout.txt".

    Raises:
        ValueError: there is no such asset.
    """
    path = _FOLDER / name
    if not path.exists():
        known = sorted(p.name for p in _FOLDER.iterdir() if not p.name.startswith("_"))
        raise UserError(f"no asset {name!r}; there are: {known}")
    return path
