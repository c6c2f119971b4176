"""Make Triton 3.6's interpreter run under NumPy >= 2.4.

`range(start, stop)` in a kernel converts one-element arrays with `int()`, which NumPy 2.4 refuses; `.item()` is the
same conversion, still allowed.
"""

import os


def enable() -> None:
    """Call before the first kernel launch; does nothing unless TRITON_INTERPRET=1."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor
