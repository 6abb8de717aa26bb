"""The inbox: commands that other threads leave for the loop."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from .errors import fresh

Command = Callable[[Any], Any]


class Inbox:
    """A thread-safe list of commands, taken by the loop between steps.

    A command is called with the scheduler, on the loop's thread; what it returns is handed over like a commit's result.

    NOTE: `put` and `close` are also called by finalizers, which the garbage collector may run in the midst of any call
    here, on the same thread. So the lock can be taken again, and a bell, once rung, stays so until it was heard: the
    notice of a condition would be lost on a thread that is just about to wait.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bell = threading.Lock()  # acquired: silent
        self._bell.acquire()
        self._commands: list[Command] = []
        self._timed: list[tuple[float, int, Command]] = []
        self._numbers = itertools.count()
        self._closed: Exception | None = None

    def put(self, command: Command) -> None:
        """Leave a command.

        Raises:
            EngineClosed, EngineDead: the inbox is closed; the command will not run.
        """
        with self._lock:
            if self._closed is not None:
                raise fresh(self._closed)
            self._commands.append(command)
            self._ring()

    def put_at(self, moment: float, command: Command) -> None:
        """Leave a command that is not taken before `moment`, in seconds of `time.perf_counter`; never, once closed."""
        with self._lock:
            heapq.heappush(self._timed, (moment, next(self._numbers), command))
            self._ring()

    def take(self, *, block: bool) -> list[Command]:
        """Return the commands that have come, oldest first; with `block`, wait for one or for the inbox to close."""
        if not block and not self._commands and not self._is_due():
            return []  # no lock in the steady state: a command that comes now is taken before the next step
        while block and not self._commands and not self._is_due() and self._closed is None:
            self._bell.acquire(timeout=self._seconds_left())
        with self._lock:
            commands, self._commands = self._commands, []
            while self._is_due():
                commands.append(heapq.heappop(self._timed)[2])
            return commands

    def _is_due(self) -> bool:
        return bool(self._timed) and self._timed[0][0] <= time.perf_counter()

    def _seconds_left(self) -> float:
        """Until the next command of `put_at` is due; -1, for ever, if there is none."""
        with self._lock:
            if not self._timed:
                return -1
            return min(max(0.0, self._timed[0][0] - time.perf_counter()), threading.TIMEOUT_MAX)

    def close(self, reason: Exception, last: Command | None = None) -> None:
        """Refuse further commands with `reason`; those already here, and `last` after them, are still taken.

        A second close does nothing: the first reason stays.
        """
        with self._lock:
            if self._closed is None:
                if last is not None:
                    self._commands.append(last)
                self._closed = reason  # after that, since the loop asks without the lock whether it is open
            self._ring()

    def end_in_child(self, reason: Exception) -> None:
        """Refuse all commands in a forked child: the thread that takes them, and may hold the lock, is not there."""
        self._lock = threading.RLock()
        self._commands.clear()
        self._closed = reason

    @property
    def open(self) -> bool:
        """True until the inbox is closed and its last command was taken."""
        return self._closed is None or bool(self._commands)

    def _ring(self) -> None:
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # whoever interrupted this call has rung
                self._bell.release()
