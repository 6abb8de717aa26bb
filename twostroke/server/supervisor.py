"""The supervisor: has an engine process, notices its death, and starts another if asked to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ..errors import TwostrokeError
from .remote_engine import RemoteEngine

_log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds before the first restart, and at most; each failure in a row doubles them."""

STEADY_SECONDS = 60.0
"""An engine that lived as long did not fail in a row with the one before."""


class Supervisor:
    """Holds the engine that is in use. Returns when the first one is ready.

    Args:
        start: starts an engine; called with what is to be called when it dies.
        restart: start another one then.

    Raises:
        TwostrokeError: the first engine did not start.
    """

    def __init__(self, start: Callable[[Callable[[], None]], RemoteEngine], *, restart: bool) -> None:
        self._start = start
        self._restart = restart
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._failures = 0
        self._began = time.monotonic()
        self._engine: RemoteEngine | None = start(self._on_end)

    @property
    def engine(self) -> RemoteEngine | None:
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
        if time.monotonic() - self._began > STEADY_SECONDS:
            self._failures = 0
        while self._restart and self.engine is None:
            if self._closed.wait(min(FIRST_DELAY * 2**self._failures, LONGEST_DELAY)):
                return
            self._failures += 1
            self._try_start()

    def _try_start(self) -> None:
        try:
            engine = self._start(self._on_end)
        except (TwostrokeError, OSError) as error:
            _log.error("the engine did not start: %s", error)
            return
        self._began = time.monotonic()
        with self._lock:
            if not self._closed.is_set():
                self._engine = engine
                return
        engine.close()
