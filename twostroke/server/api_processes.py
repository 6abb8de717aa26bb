"""All API processes of a server, in front of one engine process."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence

from ..errors import TwostrokeError
from .api_child import ApiChild
from .board import WAITING
from .engine_child import EngineChild
from .http_server import LAST_SECONDS
from .metrics import make_board
from .settings import ServerSettings
from .supervisor import Failures

_log = logging.getLogger(__name__)


class ApiProcesses:
    """Has an API process for each of some sockets, all at one address, and starts another where one has died.

    A socket outlives its process: connections that come meanwhile wait for the next.

        engine --Outputs-->  API process 0 <-- socket 0 <-- connections that the system gave to it
               --Outputs-->  API process 1 <-- socket 1 <-- ...
        parent: engine process, API processes, signals

    Args:
        settings: of the server.
        seed: of the engine.
        listeners: the sockets.
    """

    def __init__(self, settings: ServerSettings, seed: int | None, listeners: Sequence[socket.socket]) -> None:
        self._settings = settings
        self._seed = seed
        self._listeners = listeners
        self._board = make_board(len(listeners))
        self._children: dict[int, ApiChild] = {}
        self._engine: EngineChild | None = None
        self._changing = threading.Lock()

    def use(self, engine: EngineChild) -> None:
        """Give all processes, and those that will be, this engine. Called by any thread."""
        with self._changing:
            self._engine = engine
            for child in self._children.values():
                child.give(engine)

    async def start(self) -> None:
        """Start all; return when they answer.

        Raises:
            TwostrokeError: one does not.
        """
        for place in range(len(self._listeners)):
            self._start(place)
        await asyncio.gather(*(child.listening() for child in self._children.values()))

    async def keep(self) -> None:
        """Start another where one has died, for ever."""
        await asyncio.gather(*(self._keep(place) for place in range(len(self._listeners))))

    async def drain(self) -> None:
        """Let all end their requests and exit; those that take too long are killed."""
        for listener in self._listeners:
            listener.close()  # a process that has exited leaves its connections to the others then
        for child in self._children.values():
            child.drain()
        endings = [asyncio.ensure_future(child.ended()) for child in self._children.values()]
        await asyncio.wait(endings, timeout=self._settings.shutdown_timeout + 2 * LAST_SECONDS)
        self.kill()
        await asyncio.gather(*endings)

    def kill(self) -> None:
        """End all that have not ended."""
        for child in self._children.values():
            child.kill()

    def _start(self, place: int) -> ApiChild:
        with self._changing:
            board, listener = self._board.at(place), self._listeners[place]
            child = ApiChild(self._engine, self._settings, self._seed, board, listener)
            self._children[place] = child
        return child

    async def _keep(self, place: int) -> None:
        child, failures = self._children[place], Failures()
        while True:
            code = await child.ended()
            self._board.at(place).own[WAITING] = 0
            _log.error("an API process has ended, with exit code %s; starting another", code)
            await asyncio.sleep(failures.delay())
            try:
                child = self._start(place)
                await child.listening()
                failures.started()
            except (TwostrokeError, OSError) as error:
                _log.error("the API process did not start: %s", error)
