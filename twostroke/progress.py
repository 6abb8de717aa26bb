"""The progress of a call to `generate`, and the bar that shows it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from .stderr import stderr_console
from .text.handle import Handle
from .text.waiters import ThreadWaiter

_REFRESH_SECONDS = 0.02
"""Time between two looks at what has ended. The device waits while outputs are made of what ends in the last one."""


class Progress:
    """Tells which requests have ended, and shows on stderr how many. It keeps no handle once it has told of it.

    Args:
        shown: False for silence on stderr; None: shown if that is a terminal.
    """

    def __init__(self, handles: Sequence[Handle], shown: bool | None) -> None:
        self._total = len(handles)
        self._told = 0
        self._ended = itertools.count(1)
        self._news: deque[Handle] = deque()
        self._all_ended = ThreadWaiter()
        for handle in handles:
            handle.on_end(self._hear)
        self._shown = shown
        self._bar: Any = None

    def wait(self) -> Iterator[Handle]:
        """Wait until all requests have ended, in whatever order they do; yield each that has, most while others run."""
        while self._told < self._total:
            # NOTE: not for each of them, since every wake-up takes the interpreter from the loop.
            self._all_ended.wait(_REFRESH_SECONDS)
            for _ in range(len(self._news)):
                self._told += 1
                yield self._news.popleft()
            self._show()

    def _hear(self, handle: Handle) -> None:
        """Called with each request that has ended, by whichever thread ends it."""
        self._news.append(handle)
        # NOTE: no lock, which a forked child could find held for ever.
        if next(self._ended) == self._total:
            self._all_ended.wake()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._told)

    def __enter__(self) -> Progress:
        if (console := stderr_console(self._shown)) is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            self._bar = Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
            self._task = self._bar.add_task("requests", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
