"""Files that must not be one and the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidRequest


def require_apart(files: Mapping[str, Path]) -> None:
    """Refuse two names of one file, which what writes the one would destroy for the other.

    Args:
        files: by their name in messages; of two that are the same file, the later one is blamed.

    Raises:
        InvalidRequest: two paths lead to the same file, by links of either kind perhaps.
    """
    seen: dict[object, str] = {}
    for name, path in files.items():
        other = seen.setdefault(_place(path), name)
        if other != name:
            raise InvalidRequest(f"{name}={str(path)!r} is the {other} itself")


def _place(path: Path) -> object:
    """What is equal for two paths to one file."""
    try:
        found = path.stat()
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino
