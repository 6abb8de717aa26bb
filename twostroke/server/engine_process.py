"""The engine process: an engine that gets token ids from a connection and sends token ids back."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..build import Parts
from ..engine import Engine
from ..errors import EngineClosed, EngineDead, TwostrokeError
from ..request import Request, Sample
from ..trace.glimpse import Glimpse
from .outbox import Outbox
from .wire import (
    AskLook,
    AskStats,
    Cancel,
    Close,
    Entry,
    Finish,
    Look,
    Ready,
    Refused,
    Stats,
    Stream,
    Submit,
    ToEngine,
    decode_for_engine,
    encode,
)

GLIMPSE_STEPS = 16
"""Steps whose times are kept for a look: enough for a picture of both slots."""


class HostedEngine(Engine):
    """An engine whose outputs go to the API process as token ids; nothing here makes text.

    Args:
        connection: to the API process.
        arguments: those of `Engine`.
    """

    def __init__(self, connection: Connection, **arguments: Any) -> None:
        self._connection = connection
        self._samples: dict[int, Sample] = {}
        super().__init__(**arguments)
        self._glimpse = Glimpse(self._parts.runner.activity, GLIMPSE_STEPS)

    @property
    def ready(self) -> Ready:
        """What the API process has to know."""
        directory = self._parts.loaded.directory
        return Ready(self.limits, None if directory is None else str(directory), self.config.max_rows)

    def serve(self) -> None:
        """Follow commands until the API process says to close, or is gone."""
        with contextlib.suppress(EOFError, ConnectionError, EngineDead, EngineClosed):
            while not isinstance(command := decode_for_engine(self._connection.recv_bytes()), Close):
                self._follow(command)

    def _delivery_maker(self, parts: Parts) -> Callable[..., Any]:
        return partial(Outbox, self._connection, self._samples, lambda: parts.scheduler.begun)

    def _follow(self, command: ToEngine) -> None:
        match command:
            case Submit(entries):
                self._commands.submit([sample for entry in entries for sample in self._admit(entry)])
            case AskStats():
                self._life.delivery.answer(Stats(asdict(self.stats())))
            case AskLook():
                self._life.delivery.answer(Look(asdict(self.stats()), list(self._glimpse.look())))
            case Cancel(number):
                self._tell(number, self._commands.cancel)
            case Stream(number):
                self._tell(number, self._commands.stream)
            case Finish(number, count):
                self._tell(number, lambda sample: self._commands.finish(sample, count))

    def _admit(self, entry: Entry) -> list[Sample]:
        """Make the samples of an entry, which the API process has checked."""
        prompt = np.frombuffer(entry.prompt, np.int32)
        assert entry.params.seed is not None
        request = Request.create(str(entry.number), prompt, entry.params, entry.params.seed, self.limits)
        samples = [Sample(request, index) for index in range(request.terms.samples)]
        self._samples |= dict(enumerate(samples, entry.number))
        return samples

    def _tell(self, number: int, command: Callable[[Sample], None]) -> None:
        """Pass on a command about a sample, unless its end is on its way to whoever sent that."""
        if (sample := self._samples.get(number)) is not None:
            command(sample)


def run_engine(connection: Connection, arguments: dict[str, Any]) -> None:
    """Run an engine; the main function of the engine process.

    Signals that reach all processes of a terminal or a service are the API process's to handle: it says when to close.
    Should it die, the connection ends.
    """
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    try:
        engine = HostedEngine(connection, **arguments)
    except (TwostrokeError, OSError) as error:
        connection.send_bytes(encode(Refused(type(error).__name__, str(error))))
        return
    with engine:
        connection.send_bytes(encode(engine.ready))
        engine.serve()
