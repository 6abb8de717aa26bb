"""An HTTP request on its way from the ingress to a replica, and its response on the way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

Headers = list[tuple[bytes, bytes]]


class HttpCall(NamedTuple):
    """A request.

    Attributes:
        scope: what ASGI says of it, without what cannot be sent.
        body: all of it, or so much that it is clear that it is too large.
        prefix: see `prefix_blocks`.
    """

    scope: dict[str, Any]
    body: bytes
    prefix: tuple[int, ...]


class Head(NamedTuple):
    """What a response begins with."""

    status: int
    headers: Headers


SENT = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")
"""The parts of an ASGI scope that are sent."""


async def responses(app: ASGIApp, call: HttpCall) -> AsyncGenerator[Head | bytes]:
    """Yield the head of the response that `app` gives, then its body in pieces; those that wait are merged into one.

    When the iteration is given up, it is to `app` as if its client hung up.
    """
    heads: list[Head] = []
    body = bytearray()
    requests: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    changed, gone = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            heads.append(Head(message["status"], list(message["headers"])))
        else:
            body.extend(message.get("body", b""))
        changed.set()

    running = asyncio.ensure_future(app(dict(call.scope), receive, send))
    running.add_done_callback(lambda _: changed.set())
    try:
        while heads or body or not running.done():
            if heads:
                yield heads.pop()
            elif body:
                piece = bytes(body)
                body.clear()
                yield piece
            else:
                changed.clear()
                await changed.wait()
        await running
    finally:
        gone.set()
        await asyncio.wait((running,))
