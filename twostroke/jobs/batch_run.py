"""The run of a batch: a window of requests over the input, from the engine into the output."""

from __future__ import annotations

import heapq
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import QueueFull
from ..interrupts import Interrupts
from ..openai.answers import token_counts
from ..openai.errors import ApiError, refusals
from ..prompts import Prompt
from ..sampling_params import SamplingParams
from ..text.handle import Handle
from .answered import Answers
from .batch_input import Line, custom_id
from .batch_request import BatchRequest, RequestReader

AHEAD = 4
"""Requests that are read ahead, in rows of the engine."""

SUBMITTED = 2
"""Samples that the engine has at most, in its rows: those that run, and as many that are about to."""

BAD_AT_ONCE = 64
"""Lines that fail before they run, between two looks at what has ended: a flood of them must not hold up the engine."""

CHECK_SECONDS = 0.1
"""Time between two looks for Ctrl-C while nothing ends."""


class Starter(Protocol):
    """What a run asks of the engine, see `Front.start`."""

    def start(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Handle]: ...


@dataclass(order=True)
class _Waiting:
    """A request that was read ahead. The longest goes first, then the one that was read first."""

    rank: tuple[int, int]
    request: BatchRequest = field(compare=False)


class BatchRun:
    """One run. The input may be of any size: what is in memory is the window.

        input -> read ahead, 4 x rows, longest first -> engine, 2 x rows -> group -> output

    Whatever is short waits in the part that is read ahead until nothing longer is there, so when the input is at its
    end, the long requests have begun already, and short ones fill the rows that they leave.

    Args:
        engine: answers.
        rows: samples that it runs at once.
        lines: the input.
        reader: makes requests of them.
        output: what has not had them yet.
        on_change: called after each change of the output's totals.
        on_error: called with the number of a line that failed, and why.
    """

    def __init__(
        self,
        engine: Starter,
        rows: int,
        lines: Iterator[Line],
        reader: RequestReader,
        output: Answers,
        on_change: Callable[[], None],
        on_error: Callable[[int, ApiError], None],
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._lines = lines
        self._reader = reader
        self._output = output
        self._on_change = on_change
        self._on_error = on_error
        self._ahead: list[_Waiting] = []
        self._running: dict[BatchRequest, list[Handle]] = {}
        self._samples = 0
        self._failed = 0  # since the last look at what has ended
        self._interrupts = Interrupts()
        self._ended: queue.SimpleQueue[BatchRequest] = queue.SimpleQueue()

    def run(self) -> None:
        """Answer all lines.

        Raises:
            EngineDead, EngineClosed: the engine ended.
            OSError: the output cannot be written, or the input cannot be read.
            KeyboardInterrupt: Ctrl-C, between two answers: what has ended is written.
        """
        with self._interrupts:
            self._answer()

    def _answer(self) -> None:
        try:
            self._fill()
            while self._running or self._flooded:
                self._take()
                self._fill()
        except BaseException as error:
            self._cancel()
            if not isinstance(error, OSError):
                self._output.flush()
            raise
        self._output.flush()
        self._on_change()

    def _fill(self) -> None:
        """Read ahead, and submit as many as the engine should have."""
        self._failed = 0
        while True:
            self._interrupts.check()
            self._read_ahead()
            if not self._ahead or (self._running and self._samples >= SUBMITTED * self._rows):
                return
            waiting = heapq.heappop(self._ahead)
            if not self._submit(waiting.request):
                heapq.heappush(self._ahead, waiting)
                return

    @property
    def _flooded(self) -> bool:
        return self._failed >= BAD_AT_ONCE

    def _read_ahead(self) -> None:
        while len(self._ahead) < AHEAD * self._rows and not self._flooded:
            if (line := next(self._lines, None)) is None:
                return
            try:
                request = self._reader.read(line)
            except ApiError as error:
                self._fail(line.number, custom_id(line), error)
            else:
                heapq.heappush(self._ahead, _Waiting((-request.tokens, request.line), request))

    def _submit(self, request: BatchRequest) -> bool:
        """Hand a request to the engine; False if that has no room for it now."""
        try:
            with refusals(**request.names):
                handles = self._engine.start(request.prompts, [request.params] * len(request.prompts))
        except QueueFull as error:
            if self._running:
                return False
            self._fail(request.line, request.custom_id, ApiError(429, str(error), code="queue_full"))
        except ApiError as error:
            self._fail(request.line, request.custom_id, error)
        else:
            self._running[request] = handles
            self._samples += request.samples
            for handle in handles:
                handle.on_end(lambda _: self._ended.put(request))
        return True

    def _take(self) -> None:
        """Wait until a request has ended, or the group is due; take all that have ended."""
        due = self._output.due_in()
        patience = CHECK_SECONDS if due is None else min(due, CHECK_SECONDS)
        try:
            self._end(self._ended.get(timeout=0 if self._flooded else patience))
            while True:
                self._end(self._ended.get_nowait())
        except queue.Empty:
            self._output.flush_if_due()

    def _end(self, request: BatchRequest) -> None:
        """Take the answer of a request, if all of its handles have ended; each of them says so once."""
        handles = self._running.get(request)
        if handles is None or not all(handle.done for handle in handles):
            return
        outputs = [handle.result() for handle in handles]
        del self._running[request]
        self._samples -= request.samples
        try:
            body = request.body(outputs)
        except ApiError as error:
            self._fail(request.line, request.custom_id, error)
            return
        self._output.add_answer(request.line, request.custom_id, body, *token_counts(outputs))
        self._on_change()

    def _fail(self, line: int, name: str, error: ApiError) -> None:
        self._failed += 1
        self._output.add_error(line, name, error)
        self._output.flush_if_due()
        self._on_error(line, error)
        self._on_change()

    def _cancel(self) -> None:
        for handles in self._running.values():
            for handle in handles:
                handle.cancel()
