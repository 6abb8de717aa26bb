"""The engine process: an engine that gets token ids from API processes and sends token ids back."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from ..build import Parts
from ..engine import Engine, InboxCommands
from ..errors import EngineClosed, EngineDead, InvalidRequest, TwostrokeError
from ..request import Request, Sample
from ..trace.glimpse import Glimpse
from .hosted_tasks import begin
from .outbox import HostedSample, Outbox
from .outboxes import Outboxes
from .wire import (
    AskLook,
    AskStats,
    Attach,
    Cancel,
    Close,
    Entry,
    Finish,
    Look,
    Maintain,
    Ready,
    Refused,
    Stats,
    Stream,
    Submit,
    ToEngine,
    Unfit,
    decode_for_child,
    decode_for_engine,
    encode,
)

GLIMPSE_STEPS = 16
"""Steps whose times are kept for a look: enough for a picture of both slots."""


class HostedEngine(Engine):
    """An engine whose outputs go to API processes as token ids; nothing here makes text.

    Args:
        parent: the connection to the process that started this one.
        arguments: those of `Engine`.
    """

    def __init__(self, parent: Connection, **arguments: Any) -> None:
        self._parent = parent
        self._requests = itertools.count()
        super().__init__(**arguments)
        self._outboxes: Outboxes = self._life.delivery
        self._parts.scheduler.on_begun(self._outboxes.count_begun)
        self._loop = InboxCommands(self._life.inbox, self._parts.scheduler)
        self._glimpse = Glimpse(self._parts.runner.activity, GLIMPSE_STEPS)
        self._born = time.perf_counter()

    @property
    def ready(self) -> Ready:
        """What API processes have to know."""
        directory = self._parts.loaded.directory
        named = None if directory is None else str(directory)
        return Ready(self.limits, named, self.config.max_rows, os.getpid(), self._born)

    def serve(self) -> None:
        """Take in API processes until the parent says to close, or is gone."""
        with contextlib.suppress(EOFError, OSError):
            while isinstance(decode_for_child(self._parent.recv_bytes()), Attach):
                connection = Connection(recv_handle(self._parent))
                threading.Thread(target=self._attend, args=(connection,), name="twostroke-client", daemon=True).start()

    def _delivery_maker(self, parts: Parts) -> Callable[..., Any]:
        return partial(Outboxes, self._parent)

    def _attend(self, connection: Connection) -> None:
        """Follow an API process until it leaves or is gone; what it has running then ends."""
        outbox = self._outboxes.open(connection)
        try:
            with contextlib.suppress(EOFError, OSError):  # also amid a message
                while not isinstance(command := decode_for_engine(connection.recv_bytes()), Close):
                    self._follow(command, outbox)
                self._cancel(outbox)
                outbox.leave()
        except BaseException as error:
            self._outboxes.on_error(error)
        self._cancel(outbox)
        self._outboxes.drop(outbox)
        connection.close()

    def _cancel(self, outbox: Outbox) -> None:
        """Cancel all that an API process has running."""
        with contextlib.suppress(EngineDead, EngineClosed):
            for sample in tuple(outbox.samples.values()):
                self._loop.cancel(sample)

    def _follow(self, command: ToEngine, outbox: Outbox) -> None:
        """Do what an API process says; after the engine's end, which is on its way to it, nothing."""
        with contextlib.suppress(EngineDead, EngineClosed):
            self._do(command, outbox)

    def _do(self, command: ToEngine, outbox: Outbox) -> None:
        match command:
            case Submit(entries):
                self._loop.submit([sample for entry in entries for sample in self._admit(entry, outbox)])
            case AskStats():
                outbox.answer(Stats(asdict(self.stats())))
            case AskLook():
                outbox.answer(Look(asdict(self.stats()), list(self._glimpse.look())))
            case Maintain():
                begin(self, command, outbox.answer)
            case Cancel(number):
                _tell(outbox, number, self._loop.cancel)
            case Stream(number):
                _tell(outbox, number, self._loop.stream)
            case Finish(number, count):
                _tell(outbox, number, lambda sample: self._loop.finish(sample, count))

    def _admit(self, entry: Entry, outbox: Outbox) -> list[HostedSample]:
        """Make the samples of an entry, which the API process has checked; none if the checks here say otherwise."""
        prompt = np.frombuffer(entry.prompt, np.int32)
        assert entry.params.seed is not None
        try:
            request = Request.create(str(next(self._requests)), prompt, entry.params, entry.params.seed, self.limits)
        except InvalidRequest as error:
            outbox.answer(Unfit(entry.number, str(error)))
            return []
        samples = [
            HostedSample(request, index, outbox=outbox, number=entry.number + index)
            for index in range(request.terms.samples)
        ]
        outbox.samples |= {sample.number: sample for sample in samples}
        return samples


def _tell(outbox: Outbox, number: int, command: Callable[[Sample], None]) -> None:
    """Pass on a command about a sample, unless its end is on its way to whoever sent that."""
    if (sample := outbox.samples.get(number)) is not None:
        command(sample)


def run_engine(parent: Connection, arguments: dict[str, Any]) -> None:
    """Run an engine; the main function of the engine process.

    The parent says when to close. Should it die, the connection ends.
    """
    try:
        engine = HostedEngine(parent, **arguments)
    except (TwostrokeError, OSError) as error:
        with contextlib.suppress(ConnectionError):
            parent.send_bytes(encode(Refused(type(error).__name__, str(error))))
        return
    with engine, contextlib.suppress(ConnectionError):  # the parent is gone
        parent.send_bytes(encode(engine.ready))
        engine.serve()
