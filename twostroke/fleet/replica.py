"""A replica: a server without its socket, and the engine process behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from ..errors import EngineDead
from ..server.app import create_app
from ..server.remote_engine import RemoteEngine
from ..server.service import Service
from ..server.settings import ServerSettings
from ..server.supervisor import Supervisor
from .http_call import Head, HttpCall, responses


class Replica:
    """Answers calls as `twostroke serve` would. When its engine dies it is unhealthy, and Ray Serve replaces it.

    Args:
        settings: those of the server; where to listen does not count.
        arguments: those of `Engine`.

    Raises:
        InvalidConfig, UnsupportedModel, ...: the engine could not start; see `Engine`.
    """

    def __init__(self, settings: ServerSettings, arguments: Mapping[str, Any]) -> None:
        settings.validate()
        self._supervisor = Supervisor(lambda on_end: RemoteEngine(arguments, on_end=on_end), restart=False)
        self._service = Service(self._supervisor, settings)
        self._app = create_app(self._service)

    async def answer(self, call: HttpCall) -> AsyncIterator[Head | bytes]:
        """Yield the head of the response, then its body in pieces."""
        async with aclosing(responses(self._app, call)) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        """Raise EngineDead if the engine has ended; asked by Ray Serve every few seconds."""
        if not self._service.alive:
            raise EngineDead("the engine of this replica has ended")

    def __del__(self) -> None:
        """Ray Serve has let running requests end, and stops this replica."""
        if (supervisor := getattr(self, "_supervisor", None)) is not None:
            supervisor.close()
