"""Ctrl-C as news, for work that must not be left in its midst."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

Returned = TypeVar("Returned")


class Interrupts:
    """A context manager within which Ctrl-C raises KeyboardInterrupt where it is asked for, and nowhere else.

    Python raises it between any two instructions: between two changes that belong together, or in a library that then
    counts for ever what it never left. Here it is noted, and raised by `check`, out of `call`, or at the end at last.

    Where Ctrl-C would raise nothing, in other threads or where somebody else has taken it over, it is left as it is.
    """

    def __init__(self) -> None:
        self._noted = False
        self._at_once = False
        self._taken = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._taken:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since that was last raised."""
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def call(self, function: Callable[[], Returned]) -> Returned:
        """Return what `function` does; Ctrl-C ends it, and so does one that was pressed before.

        Raises:
            KeyboardInterrupt: for whatever else comes out of what it ended, too.
        """
        try:
            self._at_once = True
            try:
                self.check()
                return function()
            finally:
                self._at_once = False
        except BaseException as error:
            if self._noted:
                self._noted = False
                raise KeyboardInterrupt from error
            raise

    def _note(self, *_: object) -> None:
        # NOTE: stays noted, since what is raised in a finalizer comes to nobody; and is raised once in a call, since
        # whoever catches the one must not be met by another.
        self._noted = True
        if self._at_once:
            self._at_once = False
            raise KeyboardInterrupt
