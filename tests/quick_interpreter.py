"""Triton's interpreter, without work that it does over and over to the same end.

It patches the language in every call of a function, and makes the same types and shapes for every value.
"""

from __future__ import annotations

import builtins
import math
from functools import cache
from typing import Any

import triton
from triton import language as tl
from triton.runtime import interpreter

KNOWN = "3.6.0"
"""The version whose workings these are; another one is left as it is."""


def quicken() -> None:
    """Do it for this process."""
    if triton.__version__ == KNOWN:
        _patch_once_a_launch()
        _share_block_types()
        _share_shapes()
        _remember_dtypes()


def _patch_once_a_launch() -> None:
    patch, patched = interpreter._patch_lang, set()

    @cache
    def languages(fn: Any) -> frozenset[str]:
        return frozenset(value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch_once(fn: Any) -> Any:
        found = languages(fn)
        if found in patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore

        def forget_and_restore() -> None:
            patched.clear()
            restore()

        scope.restore = forget_and_restore  # called at the end of a launch, not of the functions that it calls
        patched.add(found)
        return scope

    interpreter._patch_lang = patch_once


def _share_block_types() -> None:
    make, made = tl.block_type.__init__, {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        lengths = [length.value if isinstance(length, tl.constexpr) else length for length in shape]
        key = element_ty.name, getattr(element_ty, "address_space", None), *lengths
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    tl.block_type.__init__ = init


def _share_shapes() -> None:
    @cache
    def sizes(lengths: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(math.prod(lengths)), tl.tuple([tl.constexpr(length) for length in lengths])

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes(builtins.tuple(type.shape) if type.is_block() else ())

    tl.tensor.__init__ = init


def _remember_dtypes() -> None:
    find, found = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype.scalar)
        return found[name]

    interpreter._get_np_dtype = remembered
