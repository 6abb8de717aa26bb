"""The engine as the API process sees it: a front whose loop runs in another process."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..constraints.constraints import Constraints
from ..errors import EngineClosed, EngineDead, TwostrokeError
from ..front import Front
from ..logprob_record import LOGPROB_RECORD
from ..request import Sample, SampleState
from ..scheduler.committed import Committed
from ..text.delivery import Delivery
from ..text.tokenizer import find_tokenizer
from .remote_commands import RemoteCommands
from .wire import (
    AskLook,
    AskStats,
    Begun,
    Close,
    Died,
    Ended,
    FromEngine,
    Look,
    Outputs,
    Ready,
    Refused,
    Stats,
    decode_from_engine,
)

_CLOSE_SECONDS = 30.0
"""How long an engine process may take to end before it is killed."""

_DEATH_SECONDS = 1.0
"""How long a process whose connection ended is given to have an exit code."""

_BUFFER_BYTES = 1 << 15
"""Room for messages on their way from the engine process; it merges what does not fit."""

Target = Callable[[Connection, dict[str, Any]], None]


def _run_engine(connection: Connection, arguments: dict[str, Any]) -> None:
    from .engine_process import run_engine  # brings torch, which the API process has no use for

    run_engine(connection, arguments)


class RemoteEngine(Front):
    """A front to an engine in a process of its own. A context manager.

        this process                                         engine process
        Front --> RemoteCommands --> writer   ============>  main thread --> inbox --> loop
        Handle <-- Delivery <-- reader        <============  outbox <----------------- loop

    The reader waits for delivery before it reads on. So what this process is too slow for waits in the outbox, which
    merges it, and neither the loop nor the memory feels it.

    Args:
        arguments: those of `Engine`.
        on_end: called once, by a thread of this object, if the engine process ends without `close`.
        target: what the process runs.

    Raises:
        InvalidConfig, UnsupportedModel, ...: the engine could not start; see `Engine`.
        EngineDead: its process ended before it was ready.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        on_end: Callable[[], None] = lambda: None,
        target: Target = _run_engine,
    ) -> None:
        self._on_end = on_end
        self._closing = False
        self._questions: deque[Future[Any]] = deque()
        self._asking = threading.Lock()
        self._connection, there = multiprocessing.Pipe()
        _limit_buffer(there)
        # NOTE: spawned, since neither threads nor CUDA survive a fork.
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=target, args=(there, dict(arguments)), name="twostroke-engine")
        self._process.start()
        there.close()  # the engine process has the only other end now, and the connection ends when it dies
        atexit.register(self._hang_up)  # before multiprocessing waits for its processes there
        try:
            ready = self._wait_until_ready()
            tokenizer = find_tokenizer(Path(ready.directory) if ready.directory is not None else None)
        except BaseException:
            self._process.kill()
            raise
        self.max_rows = ready.max_rows
        delivery = Delivery(tokenizer, self._fail)
        self._remote = RemoteCommands(self._connection)
        constraints = Constraints(tokenizer, ready.limits)
        super().__init__(tokenizer, ready.limits, arguments.get("seed"), delivery, self._remote, constraints)
        self._reader = threading.Thread(target=self._read, name="twostroke-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """The id of the engine process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._remote.open

    def ask_stats(self) -> Future[dict[str, Any]]:
        """Ask for `EngineStats`, as a dict.

        Raises:
            EngineDead, EngineClosed: the engine has ended; also raised by the future.
        """
        return self._ask(AskStats())

    def ask_look(self) -> Future[Look]:
        """Ask what the engine does now; raises as `ask_stats` does."""
        return self._ask(AskLook())

    def _ask(self, question: AskStats | AskLook) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # who no longer waits for it cannot cancel it: it will come
        with self._asking:
            self._questions.append(answer)
            self._remote.send(question)
        return answer

    def close(self) -> None:
        """Cancel what is running, hand over every output, and end the process. Safe to call twice."""
        self._closing = True
        with contextlib.suppress(TwostrokeError):
            self._remote.send(Close())
        self._reader.join(_CLOSE_SECONDS)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait_until_ready(self) -> Ready:
        try:
            message = decode_from_engine(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(_CLOSE_SECONDS)
            code = self._process.exitcode
            raise EngineDead(f"the engine process ended before it was ready, with exit code {code}") from error
        if isinstance(message, Refused):
            self._process.join(_CLOSE_SECONDS)
            raise getattr(errors, message.kind, TwostrokeError)(message.text)
        assert isinstance(message, Ready)
        return message

    def _read(self) -> None:
        reason: Exception | None = None
        try:
            while not isinstance(message := decode_from_engine(self._connection.recv_bytes()), Died):
                self._take(message)
            reason = EngineDead(message.text)
        except (EOFError, OSError):
            pass
        except BaseException as error:
            reason = EngineDead(f"the engine's messages could not be read: {type(error).__name__}: {error}")
        self._hang_up()
        self._end(reason or self._reason())
        self._process.join(_CLOSE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
        atexit.unregister(self._hang_up)
        if not self._closing:
            self._on_end()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Stats):
            self._questions.popleft().set_result(message.values)
        elif isinstance(message, Look):
            self._questions.popleft().set_result(message)
        elif isinstance(message, Begun):
            self._remote.begun = message.count
        elif isinstance(message, Outputs):
            streamed, scored = self._samples(message.streamed), self._samples(message.scored)
            records, scores = (np.frombuffer(part, LOGPROB_RECORD) for part in (message.records, message.scores))
            finished = [self._finish(ended) for ended in message.ended]
            tokens = np.frombuffer(message.tokens, np.int32)
            self._delivery.put(Committed(finished, streamed, tokens, records, scored, scores))
            self._delivery.settle()

    def _samples(self, numbers: bytes) -> list[Sample]:
        return [self._remote.sample(number) for number in np.frombuffer(numbers, np.int64).tolist()]

    def _finish(self, ended: Ended) -> Sample:
        """Let a sample of this process be as that of the engine process was when it ended."""
        sample = self._remote.pop(ended.number)
        sample.tokens = np.concatenate([sample.request.prompt, np.frombuffer(ended.tokens, np.int32)])
        sample.state, sample.finish_reason, sample.error = SampleState.FINISHED, ended.reason, ended.error
        sample.cached_tokens, sample.preemptions = ended.cached_tokens, ended.preemptions
        sample.versions = tuple(ended.versions)
        times = sample.timings
        times.admitted, times.first_token, times.finished = ended.admitted, ended.first_token, ended.finished
        return sample

    def _reason(self) -> Exception:
        if self._closing:
            return EngineClosed("the engine is closed")
        self._process.join(_DEATH_SECONDS)
        return EngineDead(f"the engine process ended, with exit code {self._process.exitcode}")

    def _fail(self, error: BaseException) -> None:
        """Delivery failed; called by its worker."""
        dead = EngineDead(f"the delivery failed: {type(error).__name__}: {error}")
        dead.__cause__ = error
        self._remote.close(dead)
        self._delivery.fail(dead)
        self._hang_up()

    def _end(self, reason: Exception) -> None:
        """Every waiting caller gets the reason now, later ones at once."""
        self._remote.close(reason)
        self._delivery.fail(reason)
        self._delivery.close()
        while self._questions:
            self._questions.popleft().set_exception(reason)

    def _hang_up(self) -> None:
        """End the connection, for whoever reads from it here as well as there."""
        with contextlib.suppress(OSError), socket.socket(fileno=self._connection.fileno()) as ours:
            try:
                ours.shutdown(socket.SHUT_RDWR)
            finally:
                ours.detach()


def _limit_buffer(connection: Connection) -> None:
    with socket.socket(fileno=connection.fileno()) as ours:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        ours.detach()
