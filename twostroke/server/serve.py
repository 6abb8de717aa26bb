"""Running the server: sockets, signals, and the order in which things start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn

from .app import create_app
from .protocol import LimitedHttp
from .remote_engine import RemoteEngine
from .service import Service
from .settings import ServerSettings
from .supervisor import Supervisor

_log = logging.getLogger(__name__)

_LAST_SECONDS = 5
"""What responses have to be sent in, after all requests have ended."""


class _Server(uvicorn.Server):
    """uvicorn, which is told when to stop, rather than being stopped by signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: ServerSettings, arguments: Mapping[str, Any], on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Then no more requests are admitted, and those that run end, or are cancelled.

    Args:
        arguments: those of `Engine`.
        on_listening: called with the server's URL once it answers.

    Raises:
        InvalidConfig, UnsupportedModel, ...: see `Engine`. OSError: the address cannot be had.
    """
    settings.validate()
    with bind(settings.host, settings.port) as listener:
        supervisor = Supervisor(lambda on_end: RemoteEngine(arguments, on_end=on_end), restart=settings.restart)
        try:
            with _new_runner() as runner:
                runner.run(_serve_until_signal(settings, supervisor, listener, on_listening))
        finally:
            supervisor.close()


async def _serve_until_signal(
    settings: ServerSettings, supervisor: Supervisor, listener: socket.socket, on_listening: Callable[[str], None]
) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    await serve_until(stop, settings, supervisor, listener, on_listening)


async def serve_until(
    stop: asyncio.Event,
    settings: ServerSettings,
    supervisor: Supervisor,
    listener: socket.socket,
    on_listening: Callable[[str], None],
) -> None:
    """Serve an engine until `stop` is set and all requests have ended."""
    service = Service(supervisor, settings)
    config = uvicorn.Config(
        create_app(service),
        http=LimitedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    stopping = asyncio.ensure_future(stop.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    on_listening(_url(settings, listener))
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    _log.info("shutting down")
    await service.drain()
    server.should_exit = True
    await serving
    await service.close()


def _new_runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:  # there is none for this system
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address. An address in use is told of here, before an engine starts."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {host} port {port}: {error.strerror}") from error
    return listener


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
