"""Tools: what a model may call, how it is told of that, and what holds it to a call.

Calls are written between tags, as many models have learned to write them:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

A call that is forced is written without tags, and a grammar lets nothing else be written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ..structured import StructuredOutput
from .errors import ApiError
from .schema import Strict

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_ANY = {"type": "object"}

_INTRODUCTION = """You have these tools, one a line, with JSON schemas of their parameters:
{tools}

To call one, write its name and arguments as JSON between tags, once for each call:
{open}
{{"name": "...", "arguments": {{...}}}}
{close}
What a tool gave comes in the next message, between <tool_response> and </tool_response>."""


class Function(Strict):
    """`strict` is a label: a forced call keeps to the schema in any case."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def text(self) -> str:
        """The call as the model wrote it."""
        arguments = self.function.arguments
        return f'{OPEN}\n{{"name": {json.dumps(self.function.name)}, "arguments": {arguments or "{}"}}}\n{CLOSE}'


class Toolbox:
    """The tools of a request that may be called.

    Args:
        tools: those of the request. choice: which of them may, or must, be called.

    Attributes:
        forced: whether the answer is a call, and nothing else.

    Raises:
        ApiError: a choice that is not there, or two tools of one name.
    """

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice | None) -> None:
        functions = {tool.function.name: tool.function for tool in tools}
        if len(functions) < len(tools):
            raise ApiError(400, "tools: two of them have the same name", param="tools")
        self.forced = choice == "required" or isinstance(choice, NamedTool)
        if self.forced and not functions:
            raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in functions:
                raise ApiError(400, f"tool_choice: there is no tool {name!r}", param="tool_choice")
            self._callable = {name: functions[name]}
        else:
            self._callable = {} if choice == "none" else functions

    def __contains__(self, name: str) -> bool:
        return name in self._callable

    def __bool__(self) -> bool:
        return bool(self._callable)

    def introduction(self) -> str:
        """What the model is told."""
        lines = (
            json.dumps({"name": one.name, "description": one.description or "", "parameters": one.parameters or _ANY})
            for one in self._callable.values()
        )
        return _INTRODUCTION.format(tools="\n".join(lines), open=OPEN, close=CLOSE)

    def structured(self) -> StructuredOutput:
        """What a forced call has to be."""
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": one.name}, "arguments": one.parameters or _ANY},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for one in self._callable.values()
        ]
        return StructuredOutput(json_schema=calls[0] if len(calls) == 1 else {"anyOf": calls})
