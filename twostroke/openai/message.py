"""The message of an answer: its text taken apart into thoughts, content, and calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from .reasoning import Reasoning
from .tool_parser import Said, ToolParser
from .tools import Toolbox


class MessageParser:
    """Takes apart the text of one choice, whole or as it comes.

    Args:
        reasoning: takes the thoughts out.
        tools: what may be called. several: whether more than once.
    """

    def __init__(self, reasoning: Reasoning, tools: Toolbox, *, several: bool) -> None:
        self._reasoning = reasoning
        self._tools = ToolParser(tools, several=several) if tools else None

    @property
    def has_called(self) -> bool:
        """Whether the text has a call."""
        return self._tools is not None and self._tools.calls > 0

    def push(self, text: str, *, last: bool) -> dict[str, Any]:
        """Return the `delta` of a chunk: what is known now, with `last` all that is left."""
        thoughts, answer = self._think(text, last=last)
        said = [Said(answer)] if self._tools is None else self._tools.push(answer)
        if self._tools is not None and last:
            said += self._tools.finish()
        delta: dict[str, Any] = {"reasoning_content": thoughts} if thoughts else {}
        if content := "".join(one.text for one in said if one.call is None):
            delta["content"] = content
        if calls := _calls([one for one in said if one.call is not None]):
            delta["tool_calls"] = calls
        return delta

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message that `text` is."""
        delta = self.push(text, last=True)
        calls = [{key: value for key, value in one.items() if key != "index"} for one in delta.get("tool_calls", ())]
        content = delta.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        return message | ({"tool_calls": calls} if calls else {})

    def _think(self, text: str, *, last: bool) -> tuple[str, str]:
        thoughts, answer = self._reasoning.push(text)
        more = self._reasoning.finish() if last else ("", "")
        return thoughts + more[0], answer + more[1]


def _calls(said: Sequence[Said]) -> list[dict[str, Any]]:
    """The pieces of calls, those of one call joined."""
    calls: dict[int, dict[str, Any]] = {}
    for one in said:
        assert one.call is not None
        entry = calls.setdefault(one.call, {"index": one.call, "function": {"arguments": ""}})
        if one.name is not None:
            entry |= {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
            entry["function"]["name"] = one.name
        entry["function"]["arguments"] += one.text
    return list(calls.values())
