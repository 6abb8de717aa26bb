"""What clients still send of a request that has its answer already."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_UNREAD_BYTES = 64 << 20
"""Of a refused body; who sends more may find the connection reset before having read the answer."""

MAX_UNREAD_SECONDS = 5.0
"""In which it must have come."""


class ReadToEnd:
    """Answers when a request has been read to its end, also one that was refused before.

    Many clients send all of a request before they look for an answer. If the server closed the connection meanwhile,
    the system would reset it, and the answer be lost. So what comes is thrown away, up to a limit. A client that asks
    before it sends a body (`Expect: 100-continue`) is spared that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asks = Headers(scope=scope).get("expect", "").lower() == "100-continue"
        ended = False

        async def note() -> Message:
            nonlocal asks, ended
            asks = False
            message = await receive()
            ended = not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not ended:
                if not asks:
                    await _throw_away(note)
                if not ended:
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        await self._app(scope, note, answer)


async def _throw_away(receive: Receive) -> None:
    """Read a body to its end, or to a limit."""
    unread = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_UNREAD_SECONDS):
            while unread < MAX_UNREAD_BYTES:
                message = await receive()
                unread += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
