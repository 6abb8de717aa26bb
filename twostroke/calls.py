"""Calls: what other threads ask of the loop and wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any

from .errors import TwostrokeError, fresh
from .inbox import Inbox

Begin = Callable[[Any, "Future[Any]"], None]
"""Called with the scheduler, on the loop's thread between two steps; sees to it that the future gets its result."""


class Calls:
    """Commands with an answer. Nobody waits for ever: the end of the loop answers whatever is still open."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()

    def call(self, begin: Begin) -> Any:
        """Have `begin` called, and wait for its future's result.

        Raises:
            EngineClosed, EngineDead: the loop has ended, or did so meanwhile.
            TwostrokeError: whatever `begin` raised; the loop goes on.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._open.add(future)
        try:
            self._inbox.put(partial(_begin, begin, future))
            return future.result()
        except TwostrokeError as error:
            raise fresh(error) from error.__cause__
        finally:
            with self._lock:
                self._open.discard(future)

    def end(self, reason: Exception) -> None:
        """Let all that wait raise `reason`; called when the inbox takes no more commands."""
        with self._lock:
            waiting = list(self._open)
        for future in waiting:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(reason)

    def end_in_child(self, reason: Exception) -> None:
        """The same in a forked child, where the thread that holds the lock may not be."""
        self._lock = threading.Lock()
        self.end(reason)


def _begin(begin: Begin, future: Future[Any], scheduler: Any) -> None:
    try:
        begin(scheduler, future)
    except TwostrokeError as error:
        future.set_exception(error)


def answer(future: Future[Any], result: Any = None) -> None:
    """Set the result, unless the end of the loop was faster."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)
