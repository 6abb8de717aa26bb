"""A copy of stdin, for an input that is read twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .journal import DurableFile

_PIECE_BYTES = 1 << 20


@contextmanager
def stdin_copied(path: Path) -> Iterator[None]:
    """Have `path` hold what stdin holds, until the context ends; a copy that a killed process left is written over.

    Raises:
        InvalidRequest: another process has its copy there, or it cannot be opened.
        OSError: the disk is full, for example.
    """
    file = DurableFile(path, f"input='-': its copy {str(path)!r}")
    try:
        file.cut(0)
        while piece := sys.stdin.buffer.read(_PIECE_BYTES):
            file.append(piece)
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()
