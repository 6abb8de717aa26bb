"""The page at `/`, which shows what the GPU does now, and lets one try the model."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

PAGE = Path(__file__).with_name("page.html").read_bytes()

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""It loads nothing from anywhere, and talks to this server alone."""


def add_page(router: APIRouter) -> None:
    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        """The page holds no data, so it needs no key: what it asks for does."""
        return Response(PAGE, headers=HEADERS, media_type="text/html")
