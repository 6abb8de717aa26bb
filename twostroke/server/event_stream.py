"""Server-sent events: an answer in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..openai.errors import ApiError
from ..openai.events import event
from .connection import ClientGone, while_connected


class EventStream(Response):
    """Sends events as they come, and tells when the stream is over, in whatever way it ended.

    A client that reads slowly holds up its own stream alone: what comes meanwhile is merged by its handles.

    Args:
        events: may raise ApiError, which becomes the last event.
        on_end: called when the stream is over.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None] = lambda: None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(Request(scope, receive), self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for piece in events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
