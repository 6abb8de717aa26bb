"""`twostroke serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidConfig
from ..server.logs import log_to_stderr
from ..server.settings import DEFAULT_MAX_WAITING, ServerSettings, read_admin_keys, read_api_keys
from .flags import EngineFlags, with_flags

DEFAULTS = ServerSettings()


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Server")


@with_flags
def serve(
    engine: EngineFlags,
    host: Annotated[str, _option("Address to listen at.")] = DEFAULTS.host,
    port: Annotated[int, _option("Port to listen at; 0 is any free one.")] = DEFAULTS.port,
    served_model_name: Annotated[str | None, _option("What clients call the model; its own name by default.")] = None,
    api_key_file: Annotated[
        Path | None, _option("File of keys, one a line; the variable TWOSTROKE_API_KEY holds another.")
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        _option(
            "File of keys, one a line, that open endpoints to pause the engine, let it sleep, and give it weights."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, _option("Web origin whose pages may call the API; may be repeated.", "--allow-origin")
    ] = None,
    ssl_certfile: Annotated[Path | None, _option("PEM file of the certificate, for TLS.")] = None,
    ssl_keyfile: Annotated[Path | None, _option("PEM file of its key.")] = None,
    max_samples: Annotated[int, _option("Most samples of one request.")] = DEFAULTS.max_samples,
    max_body_bytes: Annotated[int, _option("Most bytes of a request's body.")] = DEFAULTS.max_body_bytes,
    request_timeout: Annotated[float | None, _option("Seconds that a request may take.")] = DEFAULTS.request_timeout,
    shutdown_timeout: Annotated[
        float, _option("Seconds that requests have to end after SIGTERM.")
    ] = DEFAULTS.shutdown_timeout,
    restart: Annotated[bool, _option("Start the engine again when it has died.", "--restart")] = DEFAULTS.restart,
    api_processes: Annotated[
        int, _option("Processes that answer HTTP, in front of one engine process.")
    ] = DEFAULTS.api_processes,
    gpu_price: Annotated[
        float | None, _option("What an hour of the GPU costs, to show what its idle time does.")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, _option("URL to send traces of requests to, by OpenTelemetry's OTLP over HTTP.")
    ] = None,
    log_requests: Annotated[bool, _option("Log each request on stderr.", "--log-requests/--no-log-requests")] = True,
) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    try:
        from ..server.serve import serve as run
    except ModuleNotFoundError as error:
        raise InvalidConfig(f"the server needs the package {error.name}: pip install 'twostroke[server]'") from error
    log_to_stderr(logging.INFO if log_requests else logging.WARNING)
    arguments = {"max_waiting": DEFAULT_MAX_WAITING} | engine.arguments()
    settings = ServerSettings(
        host=host,
        port=port,
        model_name=served_model_name or arguments.get("model", DEFAULTS.model_name),
        api_keys=read_api_keys(api_key_file),
        admin_keys=read_admin_keys(admin_key_file, api_key_file=api_key_file),
        allow_origins=tuple(allow_origin or ()),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        max_samples=max_samples,
        max_body_bytes=max_body_bytes,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        restart=restart,
        api_processes=api_processes,
        gpu_price=gpu_price,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )
    run(settings, arguments, lambda url: typer.echo(f"serving {settings.model_name} at {url}"))
