"""The processes of one launch (`accelerate launch`, `torchrun`), as its environment variables tell them."""

import os


def is_first() -> bool:
    """Whether this process writes and prints for all: the first one, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def processes() -> int:
    """The number of processes of the launch; 1 without a launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_launched() -> bool:
    """Whether a launcher has started this process, also as the only one."""
    return "WORLD_SIZE" in os.environ
