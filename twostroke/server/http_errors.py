"""What HTTP clients get of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ..openai.errors import ApiError


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, dict(headers or {}), media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Paths that are not there, and methods that they do not have."""
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, str(error.detail), headers=error.headers))


async def on_any_error(request: Request, error: Exception) -> Response:
    """A fault of the server's own; its details are for the log alone."""
    return error_response(ApiError(500, "the server failed on this request"))
