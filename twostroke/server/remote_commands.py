"""A front's commands on their way to the engine process."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from ..errors import InvalidRequest, fresh, shown
from ..request import Request, Sample
from .wire import Cancel, Entry, Finish, Message, Stream, Submit, encode


class RemoteCommands:
    """Numbers the samples and sends commands about them. No call waits for the engine process: a thread writes.

    What the engine process says of them is noted by who reads it.
    """

    def __init__(self, connection: Connection) -> None:
        self._begun = 0
        self._unfit = 0
        self._connection = connection
        self._next_number = itertools.count()
        self._numbers: dict[Sample, int] = {}
        self._samples: dict[int, Sample] = {}
        self._closed: Exception | None = None
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="twostroke-writer", daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """Whether commands are taken."""
        return self._closed is None

    @property
    def begun(self) -> int:
        """See `front.Commands`."""
        return self._begun + self._unfit

    def count_begun(self, begun: int) -> None:
        """So many samples have begun in the engine process, in all."""
        self._begun = begun

    def submit(self, samples: Sequence[Sample]) -> None:
        numbers = [next(self._next_number) for _ in samples]
        numbered = list(zip(numbers, samples, strict=True))
        entries = [_entry(number, sample.request) for number, sample in numbered if sample.index == 0]
        for number, sample in numbered:
            self._numbers[sample], self._samples[number] = number, sample
        self.send(Submit(entries))

    def cancel(self, sample: Sample) -> None:
        if (number := self._numbers.get(sample)) is not None:
            self.send(Cancel(number))

    def stream(self, sample: Sample) -> None:
        if (number := self._numbers.get(sample)) is not None:
            self.send(Stream(number))

    def finish(self, sample: Sample, count: int) -> None:
        if (number := self._numbers.get(sample)) is not None:
            self.send(Finish(number, count))

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            EngineClosed, EngineDead: the engine process has ended, or is about to.
        """
        if self._closed is not None:
            raise fresh(self._closed)
        self._queue.put(encode(message))

    def sample(self, number: int) -> Sample:
        return self._samples[number]

    def pop(self, number: int) -> Sample:
        """Return the sample of `number`, which has ended."""
        sample = self._samples.pop(number)
        del self._numbers[sample]
        return sample

    def pop_unfit(self, number: int) -> list[Sample]:
        """Return the samples of a request that the engine process does not take; `number` is the first one's."""
        count = self._samples[number].request.terms.samples
        self._unfit += count
        return [self.pop(number + index) for index in range(count)]

    def close(self, reason: Exception) -> None:
        """Refuse further commands with `reason`. A second close does nothing: the first reason stays."""
        if self._closed is None:
            self._closed = reason
            self._queue.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader sees to the end of the connection
            while (message := self._queue.get()) is not None:
                self._connection.send_bytes(message)


def _entry(number: int, request: Request) -> Entry:
    if request.params.logits_processors:
        raise InvalidRequest(
            f"logits_processors={shown(request.params.logits_processors)} cannot reach an engine in another process"
        )
    params = replace(
        request.params,
        seed=request.seed,
        max_tokens=request.max_tokens,
        min_tokens=min(request.params.min_tokens, request.max_tokens),  # it may exceed what the context has room for
        bad_words=request.terms.rules.bad_words() or None,
    )
    return Entry(number, request.prompt.tobytes(), params)
