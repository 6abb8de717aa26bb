"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from ..openai.answer_shapes import ErrorAnswer
from ..openai.errors import ApiError


class RequireKey(HTTPBearer):
    """A dependency that lets requests pass that bear one of `keys`, which are keys of a kind: `API` or `admin`.

    The comparison takes the same time wherever a wrong key differs, and whichever key it is compared with.
    """

    def __init__(self, keys: Sequence[str], kind: str) -> None:
        super().__init__(scheme_name=f"{kind}_key")
        self._kind = kind
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, request: Request) -> None:  # type: ignore[override]
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not (any(matches) and scheme.lower() == "bearer"):
            message = f"an {self._kind} key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def locked(keys: Sequence[str], kind: str = "API") -> dict[str, Any]:
    """What a router is included with that one of `keys` opens; without a key it is open to all who reach it."""
    if not keys:
        return {}
    return {"dependencies": [Depends(RequireKey(keys, kind))], "responses": {401: {"model": ErrorAnswer}}}


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
