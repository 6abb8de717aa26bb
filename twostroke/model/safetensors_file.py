"""Writing a safetensors file one tensor at a time.

The library's own writer wants all tensors in memory at once; the format does not need it: eight bytes of header length,
a JSON header of names, types, shapes and offsets, then the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

_ALIGNMENT = 8
_FLOAT_BYTES = 4


def write_float32(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray]) -> None:
    """Write `tensors`, float32, whose names and shapes are those of `shapes`, in its order.

    Raises:
        ValueError: a tensor has not the shape that was announced, or they are not as many.
    """
    with path.open("wb") as file:
        file.write(_header(shapes))
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != shape or tensor.dtype != np.float32:
                raise ValueError(f"{name}: {tensor.dtype} {tensor.shape} instead of float32 {shape}")
            file.write(np.ascontiguousarray(tensor).data)


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + _FLOAT_BYTES * int(np.prod(shape))
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
