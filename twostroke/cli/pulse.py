"""A pulse, by which a signal is noticed however long the main thread waits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 0.1


@contextmanager
def pulse() -> Iterator[None]:
    """Have a signal's handler run soon after it came, in the main thread of a command.

    Python only notes a signal, and runs its handler between two instructions, or where the signal itself ends a wait.
    One that comes when a call has begun and does not wait yet would be noted until that call has waited for something
    else: `input()` for the next line. So something ends every wait now and then.
    """
    if not hasattr(signal, "setitimer"):  # Windows, where waits are not ended by signals
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
