"""Folders to write into, made before the work whose outcome goes there."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InvalidConfig


def make_folder(folder: Path, flag: str) -> None:
    """Make `folder` if it is not there yet.

    Raises:
        InvalidConfig: it cannot be made, or written into; the message names the flag and the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"{flag} {folder}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise InvalidConfig(f"{flag} {folder}: cannot be written into")
