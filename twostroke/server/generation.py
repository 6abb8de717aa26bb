"""What the endpoints that make text share: from a call to a response, whole or in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from ..openai.call import Call
from ..text.output import RequestOutput
from .connection import while_connected
from .event_stream import EventStream
from .http_errors import json_response


class Answer(Protocol):
    """How an endpoint words what the engine says."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The body of the response."""

    def events(self, call: Call) -> AsyncIterator[bytes]:
        """The events of a stream."""


async def respond(request: Request, call: Call, answer: Answer, *, stream: bool) -> Response:
    """Return the response; the call ends with it."""
    if stream:
        return EventStream(answer.events(call), call.end)
    try:
        outputs = await while_connected(request, call.outputs())
    finally:
        call.end()
    return json_response(answer.whole(outputs))
