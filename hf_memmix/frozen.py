"""A read-only dict and list, for the fields of a configuration from which a model was built.

They are subclasses of dict and list, so they serialise as plain JSON. Copies and pickles are read-only too; `plain`
returns copies that can be changed.
"""


class FrozenError(ValueError):
    """Raised by a change of a field from which a model was built."""


def _refuse(self, *args, **kwargs):
    raise FrozenError(
        "a model was built from this configuration, and a change here would not reach it: call"
        " model.set_mixer_options(...) for options that can be changed at inference, or build a model from"
        " memmix_config(config, mixer_types=[...], mixers={...})"
    )


class FrozenDict(dict):
    """A dict whose items are fixed when it is made."""

    __setitem__ = __delitem__ = __ior__ = clear = popitem = setdefault = update = _refuse

    def pop(self, key, *default):
        # before saving, transformers pops its own fields from every nested dict; they are not in this one
        return default[0] if default and key not in self else _refuse(self)

    def __reduce__(self):  # used by copy.deepcopy and pickle, which would otherwise fill an empty dict
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
