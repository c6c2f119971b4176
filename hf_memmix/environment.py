"""The environment variables of hf_memmix itself. Every other module asks here.

| variable | values | meaning |
|---|---|---|
| HF_MEMMIX_ANY_VERSION | 1 | every version of torch and transformers is allowed; for developers |
| HF_MEMMIX_COMMIT | a hash | the commit that records name, for a copy of the checkout without its `.git` |

The kernels are a package of their own with a table of their own, `hf_memmix_kernels/_environment.py`. `launch` has the
variables of a launcher.
"""

import os

ANY_VERSION = "HF_MEMMIX_ANY_VERSION"


def allows_any_version() -> bool:
    return os.environ.get(ANY_VERSION) == "1"


def known_commit() -> str:
    """The commit of this copy as the user names it, or ""."""
    return os.environ.get("HF_MEMMIX_COMMIT", "")
