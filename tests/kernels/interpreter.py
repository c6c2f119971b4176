"""Repair and speed up Triton's interpreter, 3.6 to 3.9, for all versions of NumPy; the tests should not wait for it.

- `range(start, stop)` in a kernel converts one-element arrays with `int()`, which NumPy 2.4 refuses; `.item()` is the
  same conversion, still allowed.
- A comparison of scalars that is broadcast, as in `mask & (k < left)`, turns into numbers of 32 bits. Triton 3.9
  refuses them as a mask ("mask has unsupported dtype"); here masks become booleans again, as for the compiler.
- For every call of a device function, the interpreter replaces the functions of `triton.language` again and searches
  all their names for this. Here it searches once per process, and replaces once per launch and function.
- Every operation describes the types and shapes of its result anew; here equal ones are described once.
- A reduction by a function of its own calls this function for each element; here it takes a slice at a time.
- Every sum, difference and product of integers is computed once more with 64 bits. An overflow is only told if the
  options have `debug`, which those of the interpreter have not; here it is not computed.
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
    _describe_once(interpreter)
    _reduce_slices(interpreter)
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *operation: None


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


def _describe_once(interpreter) -> None:
    core = interpreter.tl.core
    find_dtype, describe_tuple = interpreter._get_np_dtype, core._type_for_tuple_values
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = interpreter.TritonSemantic.broadcast_impl_value
    dtypes, tuples, types, shapes = {}, {}, {}, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(dtype)
        return dtypes[name]

    def type_for_tuple_values(values, fields=None):
        numbers = tuple(core._unwrap_if_constexpr(x) for x in values)
        if fields is not None or not all(type(x) is int for x in numbers):
            return describe_tuple(values, fields)
        if numbers not in tuples:
            tuples[numbers] = describe_tuple(values)
        return tuples[numbers]

    def init_type(self, element_ty, shape):
        known = element_ty.name, *shape
        if known not in types:
            make_type(self, element_ty, shape)
            types[known] = self.__dict__.copy()
        self.__dict__.update(types[known], element_ty=element_ty)

    def init_tensor(self, handle, type):
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(shapes[type.name], handle=handle, type=type, dtype=type.scalar)

    def broadcast_if_unlike(self, x, y):
        like = x.type.is_block() and y.type.is_block() and x.type.shape.values == y.type.shape.values
        return (x, y) if like else broadcast(self, x, y)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast_if_unlike
    interpreter._get_np_dtype, core._type_for_tuple_values = np_dtype, type_for_tuple_values
    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor


def _reduce_slices(interpreter) -> None:
    def generic_reduce(self, inputs):
        arrays, axis = [x.handle.data for x in inputs], self.axis
        if axis is None:
            arrays, axis = [x.reshape(-1) for x in arrays], 0

        def tensors(data):
            return tuple(self.to_tensor(x, t.dtype) for x, t in zip(data, inputs, strict=True))

        total = tensors(x.take(0, axis) for x in arrays)
        for i in range(1, arrays[0].shape[axis]):
            found = self.combine_fn.fn(*total, *tensors(x.take(i, axis) for x in arrays))
            total = found if isinstance(found, tuple) else (found,)
        shape = list(inputs[0].handle.data.shape)
        if self.axis is None:
            shape = [1] * len(shape) if self.keep_dims else []
        elif self.keep_dims:
            shape[axis] = 1
        else:
            del shape[axis]
        data = [x.handle.data.reshape(shape) if shape else x.handle.data.item() for x in total]
        return list(tensors(data))

    interpreter.ReduceOps.generic_reduce = generic_reduce
