"""Endpoints that say what is here, and how it is."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import Response

from .. import __version__
from ..openai.errors import ApiError
from .http_errors import json_response
from .service import Service


def add_probes(router: APIRouter, service: Service) -> None:
    """What an orchestrator asks, without a key."""

    @router.get("/health")
    async def health() -> Response:
        """200 while the engine lives, else 503."""
        if not service.alive:
            raise ApiError(503, "the engine is not running", code="engine_stopped")
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are admitted, else 503."""
        if not service.ready:
            raise ApiError(503, "no requests are admitted now", code="not_ready")
        return json_response({"status": "ready"})


def add_info(router: APIRouter, service: Service) -> None:
    created = int(time.time())

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(_model())

    def _model() -> dict[str, object]:
        name = service.settings.model_name
        length = service.engine.max_model_len
        return {"id": name, "object": "model", "created": created, "owned_by": "twostroke", "max_model_len": length}
