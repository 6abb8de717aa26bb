"""A conversation on a terminal, or through pipes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from ..errors import EngineClosed, EngineDead, TwostrokeError
from ..interrupts import Interrupts
from .pulse import pulse
from .speakers import Speaker

if TYPE_CHECKING:
    from rich.console import Console

HELP = "/reset forgets what was said, /quit ends. Ctrl-C stops an answer."

COMMAND = re.compile(r"/[A-Za-z]+(?=\s|$)")
"""What begins a line that is meant as a command; with a second slash before it, it is meant for the model."""


class Conversation:
    """Reads what the user says line by line, and writes the answers.

    On a terminal it asks for each line, and an answer that fails or is stopped leaves it going. Through pipes it writes
    the answers and nothing else.

    Args:
        speaker: who answers.
        system: the first message, if any.
        console: what is written to.

    Attributes:
        asks: whether there is a terminal. failed: whether an answer failed.
    """

    def __init__(self, speaker: Speaker, system: str | None, console: Console) -> None:
        self._speaker = speaker
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = list(self._opening)
        self._console = console
        self._interrupts = Interrupts()
        self.asks = sys.stdin.isatty() and console.is_terminal
        self.failed = False

    def run(self) -> None:
        """Go on until /quit, or the end of the input.

        Raises:
            EngineDead, EngineClosed: nobody is left to answer.
            KeyboardInterrupt: there is no terminal, and Ctrl-C ends all.
        """
        with pulse():
            if not self.asks:
                self._follow(map(str.strip, sys.stdin))
                return
            with suppress(ImportError):  # for editing and history, where there is such a library
                import readline  # noqa: F401
            with self._interrupts:
                self._console.print(HELP, style="dim", highlight=False)
                self._follow(self._asked())

    def _follow(self, lines: Iterator[str]) -> None:
        for line in lines:
            if line == "/quit":
                return
            if line == "/reset":
                self._messages = list(self._opening)
            elif COMMAND.match(line):
                self._refuse(line)
            elif line:
                self._turn(line[1:] if COMMAND.match(line, 1) and line[0] == "/" else line)

    def _refuse(self, line: str) -> None:
        self.failed = True
        word = line.split()[0]
        known = "there are /reset and /quit, each alone on its line"
        print(f"twostroke: {word} is no command: {known}; /{word} says it to the model", file=sys.stderr)

    def _asked(self) -> Iterator[str]:
        with suppress(EOFError):
            while True:
                self._console.print("[bold]>[/bold] ", end="")
                try:
                    line = self._interrupts.call(input)
                except KeyboardInterrupt:
                    self._console.print("\n(/quit or Ctrl-D ends)", style="dim", highlight=False)
                else:
                    yield line.strip()
        self._console.print()

    def _turn(self, line: str) -> None:
        """Answer a line; if that fails before the first word, it is as if the line had not been said."""
        said: list[str] = []
        try:
            self._answer(line, said)
        except (EngineDead, EngineClosed):
            raise
        except TwostrokeError as error:
            self.failed = True
            print(f"twostroke: {' '.join(str(error).split())}", file=sys.stderr)
        except KeyboardInterrupt:
            if not self.asks:
                raise
            self._console.print(" (stopped)", style="dim", highlight=False)
        if answer := "".join(said):
            self._messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]

    def _answer(self, line: str, said: list[str]) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        with closing(self._speaker.answer(messages)) as pieces:  # type: ignore[type-var]
            while (piece := self._interrupts.call(lambda: next(pieces, None))) is not None:
                said.append(piece)
                self._console.out(piece, end="", highlight=False)
        self._console.out("", highlight=False)
