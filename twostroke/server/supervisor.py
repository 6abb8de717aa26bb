"""The supervisor: has an engine process, notices its death, and starts another if asked to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ..errors import TwostrokeError

_log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds before the first restart, and at most; each failure in a row doubles them."""

STEADY_SECONDS = 60.0
"""What ran as long did not fail in a row with the time before."""


class Failures:
    """How often in a row something has failed that is started again; its first start was just now."""

    def __init__(self) -> None:
        self._count = 0
        self._began: float | None = time.monotonic()

    def started(self) -> None:
        """It runs again."""
        self._began = time.monotonic()

    def delay(self) -> float:
        """Note that it failed, or did not start; return the seconds to wait before the next start."""
        if self._began is not None and time.monotonic() - self._began > STEADY_SECONDS:
            self._count = 0
        self._began = None
        self._count += 1
        return min(FIRST_DELAY * 2 ** (self._count - 1), LONGEST_DELAY)


class Engine(Protocol):
    """An engine in a process of its own."""

    @property
    def alive(self) -> bool: ...
    def close(self) -> None: ...


E = TypeVar("E", bound=Engine)


class Supervisor(Generic[E]):
    """Holds the engine that is in use. Returns when the first one is ready.

    Args:
        start: starts an engine; called with what is to be called when it dies.
        restart: start another one then.

    Raises:
        TwostrokeError: the first engine did not start.
    """

    def __init__(self, start: Callable[[Callable[[], None]], E], *, restart: bool) -> None:
        self._start = start
        self._restart = restart
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._failures = Failures()
        with self._starting:
            self._engine: E | None = start(self._on_end)

    @property
    def engine(self) -> E | None:
        """The engine that takes requests, if there is one."""
        engine = self._engine
        return engine if engine is not None and engine.alive else None

    def close(self) -> None:
        """Close the engine, and start no other."""
        self._closed.set()
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _on_end(self) -> None:
        """The engine is dead; called by a thread that was its own."""
        _log.error("the engine process has ended%s", "; starting another" if self._restart else "")
        with self._starting:  # one that dies as it starts is waited for
            while self._restart and self.engine is None:
                if self._closed.wait(self._failures.delay()):
                    return
                self._try_start()

    def _try_start(self) -> None:
        try:
            engine = self._start(self._on_end)
        except (TwostrokeError, OSError) as error:
            _log.error("the engine did not start: %s", error)
            return
        self._failures.started()
        with self._lock:
            if not self._closed.is_set():
                self._engine = engine
                return
        engine.close()
