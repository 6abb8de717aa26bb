"""Server-sent events, as text."""

from __future__ import annotations

from typing import Any

import msgspec


def event(body: Any, name: str | None = None) -> bytes:
    """Return one event, whose data is `body` as JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
