"""The progress bar of a call to `generate`."""

from __future__ import annotations

import sys
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """Counts finished requests on stderr; silent unless asked for, or on a terminal if `shown` is None."""

    def __init__(self, total: int, shown: bool | None) -> None:
        self._bar = None
        if sys.stderr.isatty() if shown is None else shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("requests", total=total)

    def count(self, output: T) -> T:
        """Count one more request, and return its output."""
        if self._bar is not None:
            self._bar.advance(self._task)
        return output

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
