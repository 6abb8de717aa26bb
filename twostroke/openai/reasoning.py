"""What a model thinks before it answers, in a text that comes piece by piece."""

from __future__ import annotations

from .tags import overlap

OPEN, CLOSE = "<think>", "</think>"


class Reasoning:
    """Separates the thinking at the beginning of a text, `<think> ... </think>`, from the answer behind it.

    Args:
        begun: the prompt ends in thinking, so that the text begins with it.
    """

    def __init__(self, *, begun: bool) -> None:
        self._thinks: bool | None = True if begun else None
        self._trims = begun
        self._rest = ""

    def push(self, text: str) -> tuple[str, str]:
        """Take in text; return the thoughts and the answer that are now known, without line breaks around them."""
        self._rest += text
        if self._thinks is None and not self._begin():
            return "", ""
        if self._trims:
            self._rest = self._rest.lstrip("\n")
            self._trims = not self._rest
        if not self._thinks:
            rest, self._rest = self._rest, ""
            return "", rest
        thoughts, tag, answer = self._rest.partition(CLOSE)
        if tag:
            self._thinks, self._trims, self._rest = False, True, answer
            return thoughts.rstrip("\n"), self.push("")[1]
        return self._thoughts(thoughts), ""

    def _begin(self) -> bool:
        """Find out whether the text begins with thoughts; False while that is not known."""
        start = self._rest.lstrip()
        if len(start) < len(OPEN) and OPEN.startswith(start):
            return False
        self._thinks = self._trims = start.startswith(OPEN)
        if self._thinks:
            self._rest = start.removeprefix(OPEN)
        return True

    def finish(self) -> tuple[str, str]:
        """Return what was held back; nothing comes any more."""
        rest, self._rest = self._rest, ""
        return (rest, "") if self._thinks else ("", rest)

    def _thoughts(self, text: str) -> str:
        """Hold back what may belong to the tag, and the line breaks before it."""
        shown = text[: len(text) - overlap(text, CLOSE)].rstrip("\n")
        self._rest = text[len(shown) :]
        return shown
