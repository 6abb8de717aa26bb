"""Running the server: sockets, signals, and the order in which things start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from .api_processes import ApiProcesses
from .engine_child import EngineChild
from .http_server import new_runner, serve_until, url
from .remote_engine import RemoteEngine
from .settings import ServerSettings
from .supervisor import Supervisor

_log = logging.getLogger(__name__)


def serve(settings: ServerSettings, arguments: Mapping[str, Any], on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Then no more requests are admitted, and those that run end, or are cancelled.

    Args:
        arguments: those of `Engine`.
        on_listening: called with the server's URL once it answers.

    Raises:
        InvalidConfig, UnsupportedModel, ...: see `Engine`. OSError: the address cannot be had.
    """
    settings.validate()
    if settings.api_processes > 1:
        _serve_by_many(settings, arguments, on_listening)
        return
    with bind(settings.host, settings.port) as listener:
        supervisor = Supervisor(lambda on_end: RemoteEngine(arguments, on_end=on_end), restart=settings.restart)
        try:
            with new_runner() as runner:
                runner.run(_serve_until_signal(settings, supervisor, listener, on_listening))
        finally:
            supervisor.close()


async def _serve_until_signal(
    settings: ServerSettings,
    supervisor: Supervisor[RemoteEngine],
    listener: socket.socket,
    on_listening: Callable[[str], None],
) -> None:
    await serve_until(_stop_by_signal(), settings, supervisor, listener, on_listening)


def _serve_by_many(settings: ServerSettings, arguments: Mapping[str, Any], on_listening: Callable[[str], None]) -> None:
    """Serve with several API processes; this one starts them and the engine process, and answers nothing itself."""
    with contextlib.ExitStack() as stack:
        listeners = bind_shared(settings.host, settings.port, settings.api_processes)
        for listener in listeners:
            stack.enter_context(listener)
        processes = ApiProcesses(settings, arguments.get("seed"), listeners)

        def start(on_end: Callable[[], None]) -> EngineChild:
            engine = EngineChild(arguments, on_end=on_end)
            processes.use(engine)
            return engine

        supervisor = Supervisor(start, restart=settings.restart)
        stack.callback(supervisor.close)
        stack.callback(processes.kill)
        with new_runner() as runner:
            runner.run(_keep_until_signal(processes, lambda: on_listening(url(settings, listeners[0]))))


async def _keep_until_signal(processes: ApiProcesses, on_listening: Callable[[], None]) -> None:
    stop = _stop_by_signal()
    await processes.start()
    on_listening()
    keeping, stopping = asyncio.ensure_future(processes.keep()), asyncio.ensure_future(stop.wait())
    await asyncio.wait((keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    _log.info("shutting down")
    await processes.drain()


def _stop_by_signal() -> asyncio.Event:
    """Return what is set by SIGTERM and Ctrl-C."""
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address. An address in use is told of here, before an engine starts."""
    return _bind(host, port, shared=False)


def bind_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """Return so many sockets at one address, among which the system shares connections out."""
    with bind(host, port) as alone:  # sockets that share an address would not mind another server's
        port = alone.getsockname()[1]
    return [_bind(host, port, shared=True) for _ in range(count)]


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {host} port {port}: {error.strerror}") from error
    return listener
