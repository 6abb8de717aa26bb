"""Tool calls in a text that comes piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from .tags import overlap
from .tools import CLOSE, OPEN, Toolbox

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


class Said(NamedTuple):
    """A piece of an answer: text, or a piece of a call.

    Attributes:
        text: of the content, or of the call's arguments.
        call: the number of the call; None for content.
        name: of the function, in the first piece of a call.
    """

    text: str
    call: int | None = None
    name: str | None = None


class ToolParser:
    """Separates calls from the text around them.

    The arguments of a call are handed on as they come. What stands between the tags and is no call of a tool that may
    be called is text as any other.

        content --<tool_call>--> call --name is known--> arguments --} --> tail --</tool_call>--> content

    Args:
        tools: those that may be called. several: whether calls after the first count; if not, they are dropped.
    """

    def __init__(self, tools: Toolbox, *, several: bool) -> None:
        self._tools = tools
        self._several = several
        self._state = self._call if tools.forced else self._content
        self._rest = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self.calls = 0

    def push(self, text: str) -> list[Said]:
        """Take in text; return what is now known."""
        self._rest += text
        return list(self._all())

    def finish(self) -> list[Said]:
        """Return what was held back; nothing comes any more."""
        rest, self._rest = self._rest, ""
        if self._state == self._call and not self._tools.forced:
            return [Said(OPEN + rest)]
        if self._state == self._content and self.calls:
            rest = rest if rest.strip() else ""
        return [Said(rest)] if rest and self._state in (self._content, self._call) else []

    def _all(self) -> Iterator[Said]:
        while True:
            state, length = self._state, len(self._rest)
            yield from state()
            if (self._state == state and len(self._rest) == length) or not self._rest:
                return

    def _content(self) -> Iterator[Said]:
        text, tag, after = self._rest.partition(OPEN)
        whole = text if tag else text[: len(text) - overlap(text, OPEN)]
        # Line breaks before a call are a part of it, and so is all space between two calls.
        shown = whole.rstrip() if self.calls else whole.rstrip("\n")
        self._rest, self._state = (after, self._call) if tag else (text[len(shown) :], self._content)
        if shown:
            yield Said(shown)

    def _call(self) -> Iterator[Said]:
        if head := _HEAD.match(self._rest):
            name = json.loads(head.group(1))
            if name in self._tools:
                self._rest, self._state, self._depth = self._rest[head.end() :], self._arguments, 0
                self.calls += 1
                if self._counts:
                    yield Said("", self.calls - 1, name)
                return
        whole, tag, after = self._rest.partition(CLOSE)
        if tag:
            self._rest, self._state = after, self._content
            yield self._whole(whole)

    def _whole(self, text: str) -> Said:
        """A call that could not be read from its beginning: its keys stand in another order, or it is none."""
        try:
            made = json.loads(text)
            name, arguments = made["name"], made["arguments"]
        except (ValueError, KeyError, TypeError):
            return Said(OPEN + text + CLOSE)
        if name not in self._tools:
            return Said(OPEN + text + CLOSE)
        self.calls += 1
        return Said(json.dumps(arguments), self.calls - 1, name) if self._counts else Said("")

    def _arguments(self) -> Iterator[Said]:
        for place, character in enumerate(self._rest):
            self._follow(character)
            if not self._depth:
                text, self._rest, self._state = self._rest[: place + 1], self._rest[place + 1 :], self._tail
                break
        else:
            text, self._rest = self._rest, ""
        if text and self._counts:
            yield Said(text, self.calls - 1)

    def _follow(self, character: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")

    def _tail(self) -> Iterator[Said]:
        _, tag, after = self._rest.partition(CLOSE)
        if tag and not self._tools.forced:
            self._rest, self._state = after, self._content
        yield from ()

    @property
    def _counts(self) -> bool:
        return self._several or self.calls == 1
