"""The board: numbers that the API processes of one server share."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

_BYTES = 8
"""Of a number, a float."""

WAITING = 0
"""The place among a process's own numbers of how many samples it has in the engine's queue, or on their way there."""


class Board:
    """Memory in which each API process has numbers of its own, that the others read, and all have some together.

        | shared | own of process 0 | own of process 1 | ...

    Nobody but a process writes its own numbers, so none needs a lock to count. They outlive it: who takes its place
    counts on. It can be an argument of a process that is spawned.

    Args:
        shared, own: how many numbers there are for all, and for each process.
        processes: how many.
        place: which of them this one is.
        file: a descriptor of memory that is a board already; None makes a new one, all zero.

    Attributes:
        shared: the numbers of all, used under `locked`.
        own: those of this process.
    """

    def __init__(self, shared: int, own: int, processes: int = 1, place: int = 0, file: int | None = None) -> None:
        self._sizes = shared, own, processes
        size = _BYTES * (shared + own * processes)
        if file is None and processes > 1:
            file = os.memfd_create("twostroke-board")
            os.truncate(file, size)
        self._file = file
        self._lock = threading.Lock()
        numbers = memoryview(mmap.mmap(-1 if file is None else file, size)).cast("d")
        self.shared = numbers[:shared]
        self._each = [numbers[shared + own * number :][:own] for number in range(processes)]
        self.place = place
        self.own = self._each[place]

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._file is not None
        return _join, (*self._sizes, self.place, DupFd(self._file))

    def at(self, place: int) -> Board:
        """Return the board as the process at `place` has it."""
        return Board(*self._sizes, place, self._file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others out who ask for this; a process that dies lets them in."""
        with self._lock:
            if self._file is not None:
                fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if self._file is not None:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)

    def elsewhere(self, index: int) -> float:
        """The sum of a number over all other processes."""
        return self.total(index) - self.own[index]

    def total(self, index: int) -> float:
        """The sum of a number over all processes."""
        return sum(own[index] for own in self._each)


def _join(shared: int, own: int, processes: int, place: int, file: Any) -> Board:
    return Board(shared, own, processes, place, file.detach())
