"""A terminal for tests: what a user types, and what is written."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0
"""Seconds after which what should be written counts as missing; a command that starts with an engine takes some."""


class Terminal:
    """What a program on a terminal of its own reads and writes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._read = ""

    def type(self, text: str) -> None:
        os.write(self._number, text.encode())

    def expect(self, text: str, count: int = 1) -> str:
        """Wait until `text` was written `count` times; return what was written up to there since the last call."""
        deadline = time.monotonic() + PATIENCE
        while self._read.count(text) < count:
            assert time.monotonic() < deadline, self._read
            if select.select([self._number], [], [], 0.2)[0]:
                self._read += os.read(self._number, 4096).decode(errors="replace")
        read = text.join(self._read.split(text)[:count])
        self._read = self._read[len(read) + len(text) :]
        return read


@contextmanager
def on_terminal(
    *arguments: str, python: Sequence[str] = ("-m", "twostroke"), pass_fds: Sequence[int] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """Run the command line, or what Python is told with `python`, until the end of the block."""
    number, theirs = pty.openpty()
    # A session of its own, so that the terminal is the one that Ctrl-C is typed on.
    process = subprocess.Popen(
        [sys.executable, *python, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "dumb", "PYTHONPATH": os.fspath(ROOT)},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        pass_fds=pass_fds,
    )
    os.close(theirs)
    try:
        yield process, Terminal(number)
    finally:
        process.kill()
        process.wait()
        os.close(number)
