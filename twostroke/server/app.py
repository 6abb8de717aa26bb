"""The application: endpoints, their order of checks, and how errors are worded."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from .. import __version__
from ..openai.chat import ChatRequest
from ..openai.completions import CompletionRequest
from ..openai.errors import ApiError
from ..openai.responses import ResponsesRequest
from .admin import NoOptions, PauseRequest, WeightsRequest, add_admin
from .auth import locked
from .connection import ClientGone, refuse_query
from .description import describe
from .endpoints import add_chat, add_completions, add_responses
from .http_errors import on_any_error, on_api_error, on_http_error
from .info import add_info, add_probes
from .live import add_live
from .page import add_page
from .request_log import HEADER, RequestLog
from .scrape import add_metrics
from .service import Service
from .tokens import DetokenizeRequest, TokenizeRequest, add_tokens
from .unread import ReadToEnd

BODIES = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
ADMIN_BODIES = (PauseRequest, WeightsRequest, NoOptions)


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application that serves `service`."""
    # NOTE: the pages that FastAPI shows its description with load scripts from elsewhere, so there are none.
    app = FastAPI(title="twostroke", version=__version__, docs_url=None, redoc_url=None)
    open_to_all, with_key, with_admin_key = (
        APIRouter(default_response_class=Response, dependencies=[Depends(refuse_query)]) for _ in range(3)
    )
    add_probes(open_to_all, service)
    add_page(open_to_all)
    for add in (add_chat, add_completions, add_responses, add_tokens, add_info, add_metrics, add_live):
        add(with_key, service)
    app.include_router(open_to_all)
    app.include_router(with_key, **locked(service.settings.api_keys))
    if service.settings.admin_keys:
        add_admin(with_admin_key, service)
        app.include_router(with_admin_key, **locked(service.settings.admin_keys, "admin"))
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_any_error)
    if service.settings.allow_origins:
        origins = list(service.settings.allow_origins)
        headers: Any = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": [HEADER]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, **headers)
    if service.settings.otlp_traces_endpoint is not None:
        from .tracing import TraceParent  # its packages are an extra of their own

        app.add_middleware(TraceParent)
    app.add_middleware(ReadToEnd)
    app.add_middleware(RequestLog)
    description = describe(app, BODIES + ADMIN_BODIES if service.settings.admin_keys else BODIES)
    app.openapi = lambda: description  # type: ignore[method-assign]
    return app


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody gets this response; the log shows its status."""
    return Response(status_code=499)
