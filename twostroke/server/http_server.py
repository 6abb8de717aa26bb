"""An HTTP server in this process: the application under uvicorn, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from .app import create_app
from .board import Board
from .protocol import LimitedHttp
from .service import Seat, Service
from .settings import ServerSettings

_log = logging.getLogger(__name__)

LAST_SECONDS = 5
"""What responses have to be sent in, after all requests have ended."""


class _Server(uvicorn.Server):
    """uvicorn, which is told when to stop, rather than being stopped by signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_until(
    stop: asyncio.Event,
    settings: ServerSettings,
    seat: Seat,
    listener: socket.socket,
    on_listening: Callable[[str], None],
    board: Board | None = None,
) -> None:
    """Serve the engine at `seat` until `stop` is set and all requests have ended; for `board` see `Service`."""
    service = Service(seat, settings, board)
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
        timeout_graceful_shutdown=LAST_SECONDS,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    stopping = asyncio.ensure_future(stop.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    on_listening(url(settings, listener))
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    _log.info("shutting down")
    await service.drain()
    server.should_exit = True
    await serving
    await service.close()


def new_runner() -> asyncio.Runner:
    """Return what runs the server's coroutines."""
    try:
        import uvloop
    except ImportError:  # there is none for this system
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def url(settings: ServerSettings, listener: socket.socket) -> str:
    """Return the URL of a server that listens there."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
