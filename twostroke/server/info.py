"""Endpoints that say what is here, and how it is."""

from __future__ import annotations

import time

from fastapi import APIRouter
from fastapi.responses import Response

from .. import __version__
from ..openai.answer_shapes import ModelAnswer, ModelList, Status, VersionAnswer
from ..openai.errors import ApiError
from .description import answers
from .http_errors import json_response
from .service import Service


def add_probes(router: APIRouter, service: Service) -> None:
    """What an orchestrator asks, without a key."""

    @router.get("/health", responses=answers(Status, 503))
    async def health() -> Response:
        """200 while the engine lives, else 503."""
        if not service.alive:
            raise ApiError(503, "the engine is not running", code="engine_stopped")
        return json_response({"status": "ok"})

    @router.get("/ready", responses=answers(Status, 503))
    async def ready() -> Response:
        """200 while requests are admitted, else 503."""
        if not service.ready:
            raise ApiError(503, "no requests are admitted now", code="not_ready")
        return json_response({"status": "ready"})


def add_info(router: APIRouter, service: Service) -> None:
    created = int(time.time())

    @router.get("/version", responses=answers(VersionAnswer))
    async def version() -> Response:
        """The version of this software."""
        return json_response({"version": __version__})

    @router.get("/v1/models", responses=answers(ModelList, 503))
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [_model()]})

    @router.get("/v1/models/{name:path}", responses=answers(ModelAnswer, 404, 503))
    async def model(name: str) -> Response:
        """The model of that name."""
        service.check_model(name)
        return json_response(_model())

    def _model() -> dict[str, object]:
        name = service.settings.model_name
        length = service.engine.max_model_len
        return {"id": name, "object": "model", "created": created, "owned_by": "twostroke", "max_model_len": length}
