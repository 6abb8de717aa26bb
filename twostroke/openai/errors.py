"""Errors as OpenAI's API words them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from ..errors import InvalidRequest, shown

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_NAME = re.compile(r"[A-Za-z_]\w*")


class ApiError(Exception):
    """What a client is told when its request fails.

    Args:
        status: of HTTP.
        message: for people.
        param: the field that is at fault.
        code: for programs.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@contextmanager
def refusals(**names: str) -> Iterator[None]:
    """Make a 400 of what the engine refuses.

    Args:
        names: what the request calls a parameter, where that is not the engine's name.
    """
    try:
        yield
    except InvalidRequest as error:
        message = str(error)
        found = _NAME.match(message)
        name = found.group() if found else ""
        outer = names.get(name, name)
        text = outer + message[len(name) :]
        raise ApiError(400, text, param=outer or None, code="invalid_value") from error


def from_validation_error(error: ValidationError) -> ApiError:
    """The 400 for a body that is not what the endpoint takes; it tells of one fault, the first of the innermost ones.

    Where a field may have several forms, that is the fault of the form that fits best.
    """
    first = max(error.errors(include_url=False, include_context=False), key=lambda fault: len(fault["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON that can be read: {first['msg']}", code="invalid_json")
    path = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{path} is not a parameter of this endpoint", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    if first["type"] == "unsupported":
        return ApiError(400, first["msg"], param=path, code="unsupported_parameter")
    message = f"{path or 'the body'}={shown(first['input'])}: {first['msg']}"
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(400, message, param=path or None, code=code)


def _path(loc: Sequence[str | int]) -> str:
    """`messages[0].content` from the place that pydantic names, which also holds the branches of unions."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            path += f".{part}" if path else part
    return path


_BRANCHES = {"str", "int", "float", "bool"}
