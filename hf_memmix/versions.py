"""The releases of torch and transformers with which this package is tested. Any other is refused on import.

pip keeps to the same ranges when it installs hf_memmix, but not when another package is upgraded beside it.
"""

import inspect
import re
from importlib.metadata import PackageNotFoundError, version

from .environment import ANY_VERSION, allows_any_version

# The first release that works and the first one that is refused, as (major, minor); a test compares them with
# pyproject.toml. transformers has an upper end, because hf_memmix overrides private methods of it: a release that
# moves one of them may generate wrong text without an error. torch has no upper end: nothing private of it is
# overridden, so what a release takes away raises an error where it is used. CI runs the torch of constraints.txt.
RANGES: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "torch": ((2, 11), None),
    "transformers": ((5, 17), (5, 25)),
}


class UntestedVersionError(ImportError):
    """A library is missing, or its version is outside the tested range."""


def requirement(package: str) -> str:
    """The range of a package as pip writes it, e.g. "torch>=2.11"."""
    oldest, too_new = (None if end is None else ".".join(map(str, end)) for end in RANGES[package])
    return f"{package}>={oldest}" + ("" if too_new is None else f",<{too_new}")


def check_versions():
    """Raise UntestedVersionError unless the installed torch and transformers are in their ranges.

    Reads the metadata of the packages and imports none of them. Local and pre-release versions such as "2.11.0+cu130"
    count as the release that they name, so "5.24.0.dev0" is not below 5.24.
    """
    if allows_any_version():
        return
    for package, (oldest, too_new) in RANGES.items():
        remedy = f"run: pip install '{requirement(package)}'"
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise UntestedVersionError(f"hf_memmix needs {package}, which is not installed; {remedy}") from None
        found = re.match(r"(\d+)\.(\d+)", installed)
        release = tuple(map(int, found.groups())) if found else None
        if release is None or release < oldest or (too_new is not None and release >= too_new):
            raise UntestedVersionError(
                f"hf_memmix is not tested with {package} {installed} and could give wrong results without an error;"
                f" {remedy} ({ANY_VERSION}=1 allows every version, for developers)"
            )


def check_methods(owner: type, relied_on: dict[str, str], whose: str):
    """Raise RuntimeError if a class of the library has no method of a name, or one with other parameters.

    relied_on: methods, and the first parameters of each in their order, without `self` and `cls`.
    """
    for name, wanted in relied_on.items():
        method = getattr(owner, name, None)
        found = [] if method is None else [*inspect.signature(method).parameters]
        found = [parameter for parameter in found if parameter not in ("self", "cls")]
        wanted = wanted.split()
        if method is None or found[: len(wanted)] != wanted:
            raise moved(f"{whose} has no method {name}({', '.join(wanted)}, ...)")


def moved(what: str) -> RuntimeError:
    """The error for a part of the library that is not where it was."""
    return RuntimeError(
        f"{what}: transformers {version('transformers')} has moved a part that hf_memmix needs, and its results would"
        f" be wrong; run: pip install '{requirement('transformers')}', or report it if this version is among them"
    )
