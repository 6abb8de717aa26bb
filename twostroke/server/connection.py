"""The client's side of an HTTP request: its body, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from ..errors import counted, shown
from ..openai.errors import ApiError, from_validation_error

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


_NAMES = 10
"""A message names so many parameters of a query at most."""


class ClientGone(Exception):
    """The client has hung up; nobody waits for the answer."""


async def refuse_query(request: Request) -> None:
    """Raise ApiError if a POST has a query: its parameters are in its body, and none is ignored."""
    names = request.query_params.keys() if request.method == "POST" else ()
    if names:
        given = ", ".join(shown(name) for name in [*names][:_NAMES])
        message = f"the URL's query has {given}: parameters of this endpoint belong in the body"
        raise ApiError(400, message, param=next(iter(names)), code="unknown_parameter")


async def read_body(request: Request, kind: type[Body], limit: int) -> Body:
    """Return a request's body, checked.

    Raises:
        ApiError: it is larger than `limit` bytes, no JSON, or not what `kind` says.
        ClientGone: the client hung up amid it.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    # NOTE: a web page can make a browser post other types here without asking, but not this one.
    if media_type != "application/json":
        raise ApiError(415, "the content-type must be application/json", code="unsupported_media_type")
    try:
        return kind.model_validate_json(await _read(request, limit))
    except ValidationError as error:
        raise from_validation_error(error) from error


async def _read(request: Request, limit: int) -> bytes:
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                message = f"the body is larger than {counted(limit, 'byte')}"
                raise ApiError(413, message, code="body_too_large")
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(data)


async def read_options(request: Request, kind: type[Body], limit: int) -> Body:
    """Return a request's body, checked; the defaults of `kind` if there is none. Raises as `read_body` does."""
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return await read_body(request, kind, limit) if has_body else kind()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`; it is cancelled when the client hangs up.

    Raises:
        ClientGone: it has.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
