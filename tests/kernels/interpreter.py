"""Repair and speed up Triton 3.6's interpreter: it must run under NumPy >= 2.4, and the tests should not wait for it.

- `range(start, stop)` in a kernel converts one-element arrays with `int()`, which NumPy 2.4 refuses; `.item()` is the
  same conversion, still allowed.
- For every call of a device function, the interpreter replaces the functions of `triton.language` again and searches
  all their names for this. Here it searches once per process, and replaces once per launch and function.
"""

import functools
import inspect
import os


def enable() -> None:
    """Call before the first kernel launch; does nothing unless TRITON_INTERPRET=1."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    _convert_ranges(interpreter)
    _replace_once(interpreter)


def _convert_ranges(interpreter) -> None:
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _replace_once(interpreter) -> None:
    patch, replaced_for = interpreter._patch_lang, set()  # the functions of the launch that runs

    @functools.cache
    def builtins_of(namespace):
        members = inspect.getmembers(namespace)
        return [(name, member) for name, member in members if interpreter.tl.core.is_builtin(member)]

    def patch_builtin(namespace, builder, scope):
        for name, member in builtins_of(namespace):
            interpreter._patch_attr(namespace, name, member, builder, scope)

    class Scope(interpreter._LangPatchScope):
        def restore(self):  # at the end of a launch
            super().restore()
            replaced_for.clear()

    def patch_lang(fn):
        if fn in replaced_for:
            return Scope()
        replaced_for.add(fn)
        return patch(fn)

    interpreter._LangPatchScope = Scope
    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang
