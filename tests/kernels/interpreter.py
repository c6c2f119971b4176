"""Repair and speed up Triton's interpreter, 3.6 to 3.9, for all versions of NumPy; the tests should not wait for it.

- `range(start, stop)` in a kernel converts one-element arrays with `int()`, which NumPy 2.4 refuses; `.item()` is the
  same conversion, still allowed.
- A comparison of scalars that is broadcast, as in `mask & (k < left)`, turns into numbers of 32 bits. Triton 3.9
  refuses them as a mask ("mask has unsupported dtype"); here masks become booleans again, as for the compiler.
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
    _convert_masks(interpreter)
    _replace_once(interpreter)


def _convert_ranges(interpreter) -> None:
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _convert_masks(interpreter) -> None:
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def truth(mask):
        return interpreter.TensorHandle(mask.data.astype(bool, copy=False), mask.dtype)

    def masked_load(self, ptrs, mask, *arguments, **options):
        return load(self, ptrs, truth(mask), *arguments, **options)

    def masked_store(self, ptrs, value, mask, *arguments, **options):
        return store(self, ptrs, value, truth(mask), *arguments, **options)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


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
