"""What the loop of an engine process has for delivery: an outbox for each API process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import cast

from ..request import Sample
from ..scheduler.committed import Committed
from .outbox import HostedSample, Outbox
from .wire import Died, encode


class Outboxes:
    """Hands what the loop committed to all API processes.

    One that cannot keep up, or is gone, is of no concern to the others.

    Args:
        parent: the connection to the process that started this one, which is told of a failure.
        on_error: called with the exception that ended the sending to one of them, or the work for it.
    """

    def __init__(self, parent: Connection, on_error: Callable[[BaseException], None]) -> None:
        self.on_error = on_error
        self._parent = parent
        self._changing = threading.Lock()
        # NOTE: replaced rather than changed, since the loop reads it meanwhile.
        self._open: tuple[Outbox, ...] = ()

    def open(self, connection: Connection) -> Outbox:
        """Return an outbox for an API process that has come."""
        outbox = Outbox(connection, self.on_error)
        with self._changing:
            self._open = (*self._open, outbox)
        return outbox

    def drop(self, outbox: Outbox) -> None:
        """Its API process is gone."""
        with self._changing:
            self._open = tuple(other for other in self._open if other is not outbox)
        outbox.close()

    def put(self, committed: Committed | None) -> None:
        """Send a commit's result; called by the loop."""
        for outbox in self._open:
            outbox.put(committed)

    def count_begun(self, sample: Sample) -> None:
        """A sample waits no longer to begin; called by the loop."""
        cast(HostedSample, sample).outbox.begun += 1

    def fail(self, error: Exception) -> None:
        """Say that the engine failed."""
        for outbox in self._open:
            outbox.fail(error)
        with contextlib.suppress(OSError):
            self._parent.send_bytes(encode(Died(str(error))))

    def close(self) -> None:
        """Send what is queued, then end all threads and wait for that."""
        for outbox in self._open:
            outbox.close()

    def end_in_child(self, error: Exception) -> None:
        """A forked child of the engine process has no callers to tell."""
