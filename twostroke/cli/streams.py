"""The standard streams of a command, which may be missing from the start, or go while it works."""

from __future__ import annotations

import os
import sys
from typing import TextIO, cast

import typer


def open_missing() -> None:
    """Put the null device where the process was started without a stream.

    Else the next file that is opened would take its number, and with it whatever libraries print there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = _null(mode)
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)


def tell(line: str) -> None:
    """Say a line on stderr. If nobody can hear it any more the work goes on, and the exit code stays its own."""
    try:
        typer.echo(line, err=True)
    except OSError:
        sys.stderr = _null("w")  # the old one holds what would fail again at exit


def _null(mode: str) -> TextIO:
    return cast(TextIO, open(os.devnull, mode))  # open as long as the process runs
