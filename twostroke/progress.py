"""The progress bar of a call to `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .stderr import stderr_console

_REFRESH_SECONDS = 0.1


class Counted(Protocol):
    """What the bar counts, see `text.Handle`."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Progress:
    """Shows on stderr how many requests have ended; silent unless asked for, or on a terminal if `shown` is None."""

    def __init__(self, requests: Sequence[Counted], shown: bool | None) -> None:
        self._requests = requests
        self._bar = None
        if (console := stderr_console(shown)) is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("requests", total=len(requests))

    def wait(self) -> None:
        """Wait until all requests have ended, in whatever order they do."""
        # NOTE: the last one first: once it has ended, so have most, and who waits for each in turn is woken by each.
        for request in reversed(self._requests):
            while not request.wait(None if self._bar is None else _REFRESH_SECONDS):
                self._show()
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=sum(request.done for request in self._requests))

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
