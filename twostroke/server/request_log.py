"""Request ids, and the log of requests, which holds neither prompts nor keys."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

HEADER = "X-Request-Id"

_VALID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestLog:
    """Gives each response the id that its request came with, if that is a harmless one, else a new one.

    The id is a label for both sides' logs: nothing in the server is found by it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _VALID.fullmatch(given) else uuid.uuid4().hex
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        began = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            _log.info("%s %s %s %.3fs %s", scope["method"], _quoted(scope), status, seconds, request_id)


def _quoted(scope: Scope) -> str:
    """The path as the client sent it, without its query; what is not printable is escaped."""
    return scope["raw_path"].partition(b"?")[0].decode("latin-1").encode("ascii", "backslashreplace").decode()
