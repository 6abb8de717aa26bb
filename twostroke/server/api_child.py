"""An API process, as the process has it that started it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import socket
from multiprocessing.reduction import send_handle

from .. import errors
from ..errors import EngineDead, TwostrokeError
from .api_process import Task, run_api_process
from .board import Board
from .engine_child import EngineChild
from .settings import ServerSettings
from .spawned import spawn
from .wire import Drain, NewEngine, Refused, decode_from_api, encode


class ApiChild:
    """Starts an API process.

    Args:
        engine: its first one, if there is one.
        settings, seed, board, listener: see `Task`.
    """

    def __init__(
        self,
        engine: EngineChild | None,
        settings: ServerSettings,
        seed: int | None,
        board: Board,
        listener: socket.socket,
    ) -> None:
        self._connection, there = multiprocessing.Pipe()
        attached = None
        with contextlib.suppress(EngineDead):
            attached = None if engine is None else (engine.attach(), engine.ready)
        level = logging.getLogger("twostroke").getEffectiveLevel()
        task = Task(settings, seed, level, board, listener, there, attached)
        self._process = spawn(run_api_process, task, name="twostroke-api")
        there.close()
        if attached is not None:
            attached[0].close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def listening(self) -> None:
        """Return when it answers.

        Raises:
            TwostrokeError: it will not.
        """
        await _readable(self._connection.fileno())
        try:
            message = decode_from_api(self._connection.recv_bytes())
        except (EOFError, OSError):
            code = await self.ended()
            raise TwostrokeError(f"an API process ended before it answered, with exit code {code}") from None
        if isinstance(message, Refused):
            raise getattr(errors, message.kind, TwostrokeError)(message.text)

    async def ended(self) -> int | None:
        """Return its exit code once it has ended."""
        await _readable(self._process.sentinel)
        self._process.join()
        return self._process.exitcode

    def give(self, engine: EngineChild) -> None:
        """Give it another engine; one that is dead already is none."""
        with contextlib.suppress(EngineDead, OSError), engine.attach() as connection:
            self._connection.send_bytes(encode(NewEngine(engine.ready)))
            send_handle(self._connection, connection.fileno(), self._process.pid)

    def drain(self) -> None:
        """Let it end its requests, then exit."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(encode(Drain()))

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()
        self._process.join()


async def _readable(descriptor: int) -> None:
    """Return when there is something to read, or the other end is gone."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
