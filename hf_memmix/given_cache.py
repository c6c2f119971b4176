"""The cache that a forward gets. Its argument has another name in some families and releases of transformers."""

from transformers.cache_utils import Cache

from .versions import moved

# `past_key_values` up to transformers 5.23, `cache` since 5.24; some families hand it to their layers as `layer_past`
CACHE_NAMES = ("past_key_values", "cache", "layer_past")


def cache_among(arguments: dict, names: tuple[str, ...] = CACHE_NAMES) -> Cache | None:
    """The cache among the keyword arguments of a forward or of generate(), or None.

    Raises:
        ValueError: two names hold one.
        RuntimeError: it has a name that is not in `names`, under which nobody would read it.
    """
    found = [name for name, value in arguments.items() if isinstance(value, Cache)]
    if unknown := [name for name in found if name not in names]:
        raise moved(f"a cache arrives under the name {unknown[0]!r} and not as {names[0]!r}")
    if len(found) > 1:
        raise ValueError(f"{found[0]} and {found[1]} are two names of one argument: give the cache once")
    return arguments[found[0]] if found else None
