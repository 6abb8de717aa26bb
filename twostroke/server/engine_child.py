"""The engine process, as the process has it that started it."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from .. import errors
from ..errors import EngineDead, TwostrokeError
from .spawned import spawn
from .wire import Attach, Close, Died, Ready, Refused, decode_from_child, encode

CLOSE_SECONDS = 30.0
"""How long an engine may take to end before its process is killed."""

_DEATH_SECONDS = 1.0
"""How long a process whose connection ended is given to have an exit code."""

_BUFFER_BYTES = 1 << 15
"""Room for messages on their way from the engine process; it merges what does not fit."""

Target = Callable[[Connection, dict[str, Any]], None]


def run_engine_process(connection: Connection, arguments: dict[str, Any]) -> None:
    """What an engine process runs."""
    from .engine_process import run_engine  # brings torch, which this process has no use for

    run_engine(connection, arguments)


class EngineChild:
    """Starts an engine process, gives it connections to API processes, and ends it. Returns when the engine is ready.

    Args:
        arguments: those of `Engine`.
        on_end: called once, by a thread of this object, if the process ends without `close`.
        target: what the process runs.

    Attributes:
        ready: what API processes have to know of the engine.

    Raises:
        InvalidConfig, UnsupportedModel, ...: the engine could not start; see `Engine`.
        EngineDead: its process ended before it was ready.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        on_end: Callable[[], None] = lambda: None,
        target: Target = run_engine_process,
    ) -> None:
        self._on_end = on_end
        self._closing = False
        self._alive = True
        self._over = threading.Event()
        self._attaching = threading.Lock()
        self._connection, there = multiprocessing.Pipe()
        self._process = spawn(target, there, dict(arguments), name="twostroke-engine")
        there.close()  # the engine process has the only other end now, and the connection ends when it dies
        atexit.register(self.hang_up)  # before multiprocessing waits for its processes there
        try:
            self.ready = self._wait_until_ready()
        except BaseException:
            self._process.kill()
            raise
        self._watcher = threading.Thread(target=self._watch, name="twostroke-watcher", daemon=True)
        self._watcher.start()

    @property
    def alive(self) -> bool:
        """Whether the process runs, as far as is known."""
        return self._alive

    @property
    def exitcode(self) -> int | None:
        """That of the process; None before its end."""
        return self._process.exitcode if self._over.is_set() else None

    def death(self) -> EngineDead:
        """How the process ended whose connection did."""
        self._over.wait(_DEATH_SECONDS)
        return EngineDead(f"the engine process ended, with exit code {self.exitcode}")

    def attach(self) -> Connection:
        """Return a connection to the engine for an API process.

        Raises:
            EngineDead: the process has ended.
        """
        ours, theirs = multiprocessing.Pipe()
        _limit_buffer(theirs)
        try:
            with self._attaching, theirs:
                self._connection.send_bytes(encode(Attach()))
                send_handle(self._connection, theirs.fileno(), self._process.pid)
        except OSError as error:
            ours.close()
            raise EngineDead("the engine process has ended") from error
        return ours

    def close(self) -> None:
        """Let the engine cancel what is running and send every output; return when the process has ended."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.send_bytes(encode(Close()))
        self._watcher.join(CLOSE_SECONDS)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()

    def hang_up(self) -> None:
        """End the connection, for whoever reads from it here as well as there: the process ends."""
        hang_up(self._connection)

    def _wait_until_ready(self) -> Ready:
        try:
            message = decode_from_child(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(CLOSE_SECONDS)
            code = self._process.exitcode
            raise EngineDead(f"the engine process ended before it was ready, with exit code {code}") from error
        if isinstance(message, Refused):
            self._process.join(CLOSE_SECONDS)
            raise getattr(errors, message.kind, TwostrokeError)(message.text)
        assert isinstance(message, Ready)
        return message

    def _watch(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            assert isinstance(decode_from_child(self._connection.recv_bytes()), Died)
        self._alive = False
        self.hang_up()
        self._process.join(CLOSE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._over.set()
        atexit.unregister(self.hang_up)
        if not self._closing:
            self._on_end()


def hang_up(connection: Connection) -> None:
    """End a connection, also for a thread that reads from it."""
    with contextlib.suppress(OSError), socket.socket(fileno=connection.fileno()) as ours:
        try:
            ours.shutdown(socket.SHUT_RDWR)
        finally:
            ours.detach()


def _limit_buffer(connection: Connection) -> None:
    with socket.socket(fileno=connection.fileno()) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        ours.detach()
