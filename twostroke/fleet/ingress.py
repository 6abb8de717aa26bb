"""The ingress: it reads requests, hands each to the replica that has its beginning, and passes the response on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..openai.errors import ApiError
from ..openai.events import event
from ..server.http_errors import error_response
from .http_call import SENT, Head, HttpCall
from .prefix_map import prefix_blocks

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""To how many replicas a call is given while they die before their response has begun."""

_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class Ingress:
    """Takes HTTP requests from Ray Serve's proxies. It has no state but what its router learns.

    Args:
        replicas: the deployment of `Replica`.
        max_body_bytes: how much of a body is read at most; that it is too large, the replica says.
    """

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas: Any = replicas.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        body = await self._read(request)
        scope = {name: request.scope[name] for name in SENT if name in request.scope}
        call = HttpCall(scope, body, tuple(prefix_blocks(body)))
        try:
            head, parts = await self._begin(call)
        except BackPressureError:
            error = ApiError(429, "the queue is full", code="queue_full", headers={"Retry-After": "1"})
            return error_response(error)
        except RayActorError:
            return error_response(_lost())
        response = StreamingResponse(_body(parts, _STREAM in head.headers), head.status)
        response.raw_headers = head.headers
        return response

    async def _read(self, request: Request) -> bytes:
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._max_body_bytes:
                break
        return bytes(data)

    async def _begin(self, call: HttpCall) -> tuple[Head, DeploymentResponseGenerator]:
        """Return the head of the response, and what yields the rest.

        A replica that dies before has sent nothing, so the client cannot tell that another one answers.

        Raises:
            RayActorError: several replicas died. BackPressureError: too many calls wait.
        """
        for attempt in range(1, ATTEMPTS + 1):
            parts = self._replicas.remote(call)
            try:
                return await anext(parts), parts
            except RayActorError:
                _log.warning("a replica died before it answered; attempt %d of %d", attempt, ATTEMPTS)
                if attempt == ATTEMPTS:
                    raise
            except BaseException:
                parts.cancel()
                raise
        raise AssertionError("unreachable")


async def _body(parts: DeploymentResponseGenerator, stream: bool) -> AsyncIterator[bytes]:
    """Yield the body; if the replica dies, a stream ends with an error as its last event, and all else breaks off."""
    try:
        async for part in parts:
            yield part
    except RayActorError:
        if not stream:
            raise
        yield event(_lost().body())
    finally:
        parts.cancel()


def _lost() -> ApiError:
    return ApiError(503, "the replica stopped before the request had ended", code="engine_stopped")
