"""The folder where converted models are kept, and making a folder in it all at once."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

CONVERTER_VERSION = 1
"""Part of the folders' names: raised when a change of the conversion makes older folders wrong."""


def cached_place(name: str) -> Path:
    """Where the converted model `name` is or goes: in `$XDG_CACHE_HOME/twostroke/models`, by default of `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    models = (Path(cache) if cache else Path.home() / ".cache") / "twostroke" / "models"
    return models / f"{name}-v{CONVERTER_VERSION}"


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a model directory. Folders appear whole, so one file tells."""
    return (folder / "config.json").is_file()


def make_once(target: Path, fill: Callable[[Path], None]) -> Path:
    """Return `target`, first made by `fill` if it is not there yet.

    `fill` writes into an empty folder beside it, which is then renamed: nobody ever sees `target` half made, and of two
    processes that make it at once the later one's copy is thrown away.

    Args:
        fill: writes the files, `config.json` among them, into the folder it is given.

    Raises:
        OSError: the folder can't be written, or `target` holds something else.
    """
    if is_complete(target):
        return target
    draft = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    draft.mkdir(parents=True)
    try:
        fill(draft)
        draft.rename(target)
    except OSError:
        if not is_complete(target):
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target
