"""Triton kernels on the CPU: import this before anything that defines a kernel, in a process of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_scalar_index(tensor, scope):
    """NumPy 2.4 no longer turns an array of one element into an int, which the interpreter does at each loop bound."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_scalar_index
