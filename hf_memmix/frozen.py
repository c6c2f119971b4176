"""A dict and a list that can be read and not changed: the fields of a configuration that a model was built from.

They still are a dict and a list, so that they serialise as plain JSON; copies and pickles are read-only too, `plain`
gives ones that can be changed.
"""


class FrozenError(ValueError):
    """A change of a field that has been built into a model."""


def _refuse(self, *args, **kwargs):
    raise FrozenError(
        "a model was built from this configuration and would not follow the change: call"
        " model.set_mixer_options(...) for options that can be changed at inference, or build a model from"
        " memmix_config(config, mixer_types=[...], mixers={...})"
    )


class FrozenDict(dict):
    """A dict whose items are fixed when it is made."""

    __setitem__ = __delitem__ = __ior__ = clear = popitem = setdefault = update = _refuse

    def pop(self, key, *default):
        # transformers takes fields of its own out of every nested dict before it saves one: they are not there
        return default[0] if default and key not in self else _refuse(self)

    def __reduce__(self):  # of copy.deepcopy and pickle, which would fill an empty one
        return FrozenDict, (dict(self),)


class FrozenList(list):
    """A list whose items are fixed when it is made."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self):
        return FrozenList, (list(self),)


def frozen(value):
    """A read-only copy of JSON values."""
    if isinstance(value, dict):
        return FrozenDict({key: frozen(item) for key, item in value.items()})
    return FrozenList(frozen(item) for item in value) if isinstance(value, list) else value


def plain(value):
    """A copy of JSON values that can be changed."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value
