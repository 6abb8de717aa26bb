"""stderr as a place to show progress on, which may be gone before the work is done."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


def stderr_console(shown: bool | None) -> Console | None:
    """A console on stderr for what is `shown`; None where it is not. `shown=None` is: if that is a terminal."""
    stderr = _Stderr()
    if not (stderr.isatty() if shown is None else shown):
        return None
    from rich.console import Console

    return Console(file=cast(TextIO, stderr))


class _Stderr(io.TextIOBase):
    """The process's stderr of now. What it does not take is dropped: its terminal may be closed, its disk full."""

    def __init__(self) -> None:
        self._file = sys.stderr  # None in a process that was started without

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        with suppress(OSError, ValueError, AttributeError):
            return self._file.isatty()
        return False

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._file.flush()
