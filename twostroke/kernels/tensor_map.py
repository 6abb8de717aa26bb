"""Arguments of kernels with tensor maps, by which the tensor memory accelerator finds a matrix."""

from __future__ import annotations

import ctypes
from typing import TypeVar

import torch

MAP_BYTES = 128

_ALIGNMENT = 128

AnyArguments = TypeVar("AnyArguments", bound=ctypes.Structure)


def zeroed(kind: type[AnyArguments]) -> AnyArguments:
    """Return zeroed arguments at an address that the tensor maps in them may have."""
    raw = ctypes.create_string_buffer(ctypes.sizeof(kind) + _ALIGNMENT)
    return kind.from_buffer(raw, -ctypes.addressof(raw) % _ALIGNMENT)


def check_size(kind: type[ctypes.Structure], size: int) -> None:
    """Raise if the structure is not as large as its twin in a compiled source.

    Raises:
        RuntimeError: it is not.
    """
    if ctypes.sizeof(kind) != size:
        raise RuntimeError(f"{kind.__name__} has {ctypes.sizeof(kind)} bytes, in the compiled source {size}")


def place_in(arguments: ctypes.Structure, offset: int) -> ctypes.c_void_p:
    """Return where the field at `offset` lies."""
    return ctypes.c_void_p(ctypes.addressof(arguments) + offset)


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor begins; None is the null pointer."""
    return None if tensor is None else tensor.data_ptr()


def check(code: int, what: str) -> None:
    """Raise for a code that a function of a compiled source returned.

    Raises:
        RuntimeError: it is an error of CUDA.
    """
    if code != 0:
        raise RuntimeError(f"{what} failed with CUDA error {code}")
