"""Running the server: sockets, signals, and the order in which things start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from .api_processes import ApiProcesses
from .engine_child import EngineChild
from .http_server import new_runner, serve_until, url
from .remote_engine import RemoteEngine
from .settings import ServerSettings
from .supervisor import E, Supervisor

_log = logging.getLogger(__name__)


def serve(settings: ServerSettings, arguments: Mapping[str, Any], on_listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Then no more requests are admitted, and those that run end, or are cancelled.

    Before the engine is ready, they end its start.

    Args:
        arguments: those of `Engine`.
        on_listening: called with the server's URL once it answers.

    Raises:
        InvalidConfig, UnsupportedModel, ...: see `Engine`. OSError: the address cannot be had.
    """
    settings.validate()
    run = _serve_alone if settings.api_processes == 1 else _serve_by_many
    with new_runner() as runner:
        runner.run(run(settings, arguments, on_listening))


async def _serve_alone(
    settings: ServerSettings, arguments: Mapping[str, Any], on_listening: Callable[[str], None]
) -> None:
    def start(on_end: Callable[[], None]) -> RemoteEngine:
        return RemoteEngine(arguments, on_end=on_end)

    stop = _stop_by_signal()
    with bind(settings.host, settings.port) as listener:
        async with _supervised(start, settings, stop) as supervisor:
            if supervisor is not None:
                await serve_until(stop, settings, supervisor, listener, on_listening)


async def _serve_by_many(
    settings: ServerSettings, arguments: Mapping[str, Any], on_listening: Callable[[str], None]
) -> None:
    """Serve with several API processes; this one starts them and the engine process, and answers nothing itself."""
    stop = _stop_by_signal()
    with contextlib.ExitStack() as stack:
        listeners = bind_shared(settings.host, settings.port, settings.api_processes)
        for listener in listeners:
            stack.enter_context(listener)
        processes = ApiProcesses(settings, arguments.get("seed"), listeners)

        def start(on_end: Callable[[], None]) -> EngineChild:
            engine = EngineChild(arguments, on_end=on_end)
            processes.use(engine)
            return engine

        async with _supervised(start, settings, stop) as supervisor:
            if supervisor is not None:
                try:
                    await _keep_until(stop, processes, lambda: on_listening(url(settings, listeners[0])))
                finally:
                    processes.kill()


async def _keep_until(stop: asyncio.Event, processes: ApiProcesses, on_listening: Callable[[], None]) -> None:
    await processes.start()
    on_listening()
    keeping, stopping = asyncio.ensure_future(processes.keep()), asyncio.ensure_future(stop.wait())
    await asyncio.wait((keeping, stopping), return_when=asyncio.FIRST_COMPLETED)
    keeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeping
    _log.info("shutting down")
    await processes.drain()


@contextlib.asynccontextmanager
async def _supervised(
    start: Callable[[Callable[[], None]], E], settings: ServerSettings, stop: asyncio.Event
) -> AsyncIterator[Supervisor[E] | None]:
    """Have an engine; None if `stop` is set before it is ready."""
    starting = asyncio.ensure_future(asyncio.to_thread(Supervisor, start, restart=settings.restart))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await _give_up(starting)
        yield None
        return
    supervisor = starting.result()
    try:
        yield supervisor
    finally:
        await asyncio.to_thread(supervisor.close)


async def _give_up(starting: asyncio.Future[Supervisor[E]]) -> None:
    """End the start of an engine, which ends when its process does."""
    while not starting.done():
        for process in multiprocessing.active_children():  # there is none before it is started
            process.kill()
        await asyncio.wait((starting,), timeout=0.1)
    if starting.exception() is None:
        await asyncio.to_thread(starting.result().close)


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
