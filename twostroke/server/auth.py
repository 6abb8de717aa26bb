"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request

from ..openai.errors import ApiError


def require_key(keys: Sequence[str]) -> Callable[[Request], Coroutine[Any, Any, None]]:
    """Return a dependency that lets requests pass that bear one of `keys`; all requests if there is none.

    The comparison takes the same time wherever a wrong key differs, and whichever key it is compared with.
    """
    digests = [_digest(key.encode()) for key in keys]

    async def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, known) for known in digests]
        if digests and not (any(matches) and scheme.lower() == "bearer"):
            message = "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    return check


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
