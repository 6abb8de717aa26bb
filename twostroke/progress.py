"""The progress of a call to `generate`, and the bar that shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from .stderr import stderr_console
from .text.handle import Handle

_REFRESH_SECONDS = 0.1
"""Time between two looks at what has ended."""


class Progress:
    """Tells which requests have ended, and shows on stderr how many.

    Args:
        shown: False for silence on stderr; None: shown if that is a terminal.
    """

    def __init__(self, handles: Sequence[Handle], shown: bool | None) -> None:
        self._handles = handles
        self._count = 0
        self._news: deque[Handle] = deque()
        for handle in handles:
            handle.on_end(self._news.append)
        self._shown = shown
        self._bar: Any = None

    def wait(self) -> Iterator[Handle]:
        """Wait until all requests have ended, in whatever order they do; yield those that have while others run."""
        # NOTE: the last one first: once it has ended, so have most, and who waits for each in turn is woken by each.
        for handle in reversed(self._handles):
            while not handle.done:
                handle.wait(_REFRESH_SECONDS)
                yield from self._take_news()
        self._show(len(self._handles))

    def _take_news(self) -> list[Handle]:
        """Those of which was heard since the last call. One whose waiter was just woken may not be among them yet."""
        news = [self._news.popleft() for _ in range(len(self._news))]
        self._count += len(news)
        self._show(self._count)
        return news

    def _show(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=count)

    def __enter__(self) -> Progress:
        if (console := stderr_console(self._shown)) is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            self._bar = Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
            self._task = self._bar.add_task("requests", total=len(self._handles))
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
