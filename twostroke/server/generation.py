"""What the endpoints that make text share: from a call to a response, whole or in pieces."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from ..openai.answers import Answer
from ..openai.call import Call
from .connection import while_connected
from .event_stream import EventStream
from .http_errors import json_response


async def respond(request: Request, call: Call, answer: Answer, *, stream: bool) -> Response:
    """Return the response; the call ends with it."""
    if stream:
        return EventStream(answer.events(call), call.end)
    try:
        outputs = await while_connected(request, call.outputs())
    finally:
        call.end()
    return json_response(answer.whole(outputs))
