"""/metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..errors import EngineClosed, EngineDead
from .description import text
from .service import Service

PATIENCE = 5.0
"""Seconds in which an engine says how it is."""


def add_metrics(router: APIRouter, service: Service) -> None:
    @router.get("/metrics", responses={200: text("text/plain", "application/openmetrics-text")})
    async def metrics(request: Request) -> Response:
        """All metrics, for Prometheus."""
        await _ask_engine(service)
        body, content_type = service.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


async def _ask_engine(service: Service) -> None:
    if (engine := service.running_engine) is None:
        service.metrics.engine.lost()
        return
    try:
        stats = await asyncio.wait_for(asyncio.wrap_future(engine.ask_stats()), PATIENCE)
    except (EngineDead, EngineClosed, TimeoutError):
        service.metrics.engine.lost()
        return
    service.metrics.engine.update(engine.ready.born, engine.limits.usable_blocks, stats)
