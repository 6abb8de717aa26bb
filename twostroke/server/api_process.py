"""An API process beside others: it answers HTTP, with an engine that its parent gave it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from ..errors import TwostrokeError
from .board import Board
from .http_server import new_runner, serve_until
from .logs import log_to_stderr
from .settings import ServerSettings
from .shared_engine import SharedEngine
from .wire import Listening, NewEngine, Ready, Refused, decode_for_api, encode

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What an API process is given; an argument of the process.

    Attributes:
        settings: of the server.
        seed: of the engine.
        log_level: from which on things are logged.
        board: with the process's place on it.
        listener: the socket whose connections it answers.
        parent: the connection to the process that started it.
        engine: the connection to the engine and what that said of itself; None while there is none.
    """

    settings: ServerSettings
    seed: int | None
    log_level: int
    board: Board
    listener: socket.socket
    parent: Connection
    engine: tuple[Connection, Ready] | None


def run_api_process(task: Task) -> None:
    """Answer HTTP until the parent says to drain, or is gone; the main function of an API process.

    It exits with 1 if it fails at what the engine sends it; then there should be another in its place.
    """
    log_to_stderr(task.log_level)
    try:
        seat = EngineSeat(task)
        with new_runner() as runner:
            runner.run(_serve(task, seat))
    except (TwostrokeError, OSError) as error:
        with contextlib.suppress(OSError):
            task.parent.send_bytes(encode(Refused(type(error).__name__, str(error))))
        return
    seat.close()
    if seat.failed:
        sys.exit(1)


async def _serve(task: Task, seat: EngineSeat) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=seat.follow, args=(end,), name="twostroke-parent", daemon=True).start()
    tell = task.parent.send_bytes
    await serve_until(stop, task.settings, seat, task.listener, lambda url: tell(encode(Listening())), task.board)


class EngineSeat:
    """Holds the engine that is in use: the first one, then those that the parent sends when it has died."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._end: Callable[[], None] = lambda: None
        self._engine: SharedEngine | None = None
        if task.engine is not None:
            self._take(*task.engine)

    @property
    def engine(self) -> SharedEngine | None:
        """The engine that takes requests, if there is one."""
        engine = self._engine
        return engine if engine is not None and engine.alive else None

    @property
    def failed(self) -> bool:
        """Whether this process failed, and the engine did not."""
        return self._engine is not None and self._engine.failed

    def follow(self, end: Callable[[], None]) -> None:
        """Do what the parent says; `end` is called when the process is to end."""
        self._end = end
        self._on_engine_end()  # before that, there was nobody to tell
        parent = self._task.parent
        try:
            with contextlib.suppress(EOFError, ConnectionError):
                while isinstance(message := decode_for_api(parent.recv_bytes()), NewEngine):
                    self._take(Connection(recv_handle(parent)), message.ready)
        except Exception:  # nobody would hear the parent any more
            _log.exception("this API process could not take another engine, and ends")
        end()

    def close(self) -> None:
        """Leave the engine."""
        if self._engine is not None:
            self._engine.close()

    def _take(self, connection: Connection, ready: Ready) -> None:
        self._engine = SharedEngine(connection, ready, self._task.seed, self._task.board, self._on_engine_end)

    def _on_engine_end(self) -> None:
        if self.failed:
            _log.error("this API process has failed, and ends")
            self._end()
