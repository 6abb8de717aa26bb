"""Waiters: who waits for news of a request, a thread or a task, and how each is woken."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class ThreadWaiter:
    """A thread that waits for news.

    NOTE: no condition, whose own code an interrupt can end when it has let go of its lock, or has just taken it.
    """

    def __init__(self) -> None:
        self._bell = threading.Lock()  # acquired: silent
        self._bell.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Wait to be woken; False if `timeout` seconds, or as many as a clock can count, went by before that."""
        return self._bell.acquire(timeout=-1 if timeout is None else min(threading.TIMEOUT_MAX, max(0.0, timeout)))

    def wake(self) -> None:
        """Wake the thread, once."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    @property
    def is_deserted(self) -> bool:
        return False


class TaskWaiter:
    """A task that waits for news, in the asyncio loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._woken = False

    async def wait(self) -> None:
        """Wait to be woken."""
        await self._event.wait()

    def wake(self) -> None:
        """Wake the task, once. A closed loop cannot be woken, and must not hurt the others."""
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)

    @property
    def is_deserted(self) -> bool:
        """Whether its loop was closed: nobody waits any more."""
        return self._loop.is_closed()
