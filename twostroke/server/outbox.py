"""The outbox: the engine process's side of delivery, which sends token ids to an API process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from ..logprob_record import LOGPROB_RECORD, NO_RECORDS
from ..request import Sample
from ..scheduler.committed import NOTHING, Committed
from .wire import Begun, Died, Done, Ended, Failed, FromEngine, Look, Outputs, Stats, Unfit, encode

_PATIENCE = 1000
"""Commits that may wait for the thread before those that have nothing for its process are left out."""


class Outbox:
    """Sends one API process what the loop committed of its samples. The loop's thread only queues.

    What is committed while the last message is still on its way becomes one message, so an API process that cannot keep
    up gets fewer and larger ones, and holds up nobody. One that stands still has no more waiting for it than its own.

    Args:
        connection: to the API process.
        on_error: called with the exception that ended the sending, unless the API process is gone.

    Attributes:
        samples: those on their way, by the number that the API process gave them; those that ended are taken out.
        begun: samples that wait no longer to begin, in all; counted by the loop, and sent whenever it has changed.
    """

    def __init__(self, connection: Connection, on_error: Callable[[BaseException], None]) -> None:
        self.samples: dict[int, HostedSample] = {}
        self.begun = 0
        self._begun_sent = 0
        self._leaving = False
        self._connection = connection
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Committed | FromEngine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="twostroke-outbox", daemon=True)
        self._thread.start()

    def put(self, committed: Committed | None) -> None:
        """Send what a commit's result has for this process; called by the loop."""
        # NOTE: first, so that whoever has a token of a sample finds that it waits no longer.
        if self.begun != self._begun_sent:
            self._begun_sent = self.begun
            self._queue.put(Begun(self.begun))
        if committed is not None and self._takes(committed):
            self._queue.put(committed)

    def answer(self, answer: Stats | Look | Unfit | Done | Failed) -> None:
        self._queue.put(answer)

    def fail(self, error: Exception) -> None:
        """Say that the engine failed."""
        self._queue.put(Died(str(error)))

    def leave(self) -> None:
        """Send all that is still to come of its samples, then end the thread and wait for that."""
        self._leaving = True
        self._queue.put(NOTHING)
        self._thread.join()

    def close(self) -> None:
        """Send what is queued, then end the thread and wait for that."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        try:
            with contextlib.suppress(OSError):  # the API process is gone, and with it all who wait
                while self._send(self._take()):
                    pass
        except BaseException as error:
            self._on_error(error)

    def _take(self) -> list[Committed | FromEngine | None]:
        """Wait for something to send; return all that there is."""
        taken = [self._queue.get()]
        while not self._queue.empty():
            taken.append(self._queue.get())
        return taken

    def _send(self, taken: Sequence[Committed | FromEngine | None]) -> bool:
        """Send what was queued; False if nothing will come behind it."""
        for begun in [item for item in taken if isinstance(item, Begun)][-1:]:
            self._connection.send_bytes(encode(begun))
        outputs = self._outputs([item for item in taken if isinstance(item, Committed)])
        if outputs.streamed or outputs.scored or outputs.ended:
            self._connection.send_bytes(encode(outputs))
        for item in taken:
            if item is not None and not isinstance(item, Committed | Begun):
                self._connection.send_bytes(encode(item))
        over = self._leaving and not self.samples
        return not over and not any(item is None or isinstance(item, Died) for item in taken)

    def _outputs(self, commits: Sequence[Committed]) -> Outputs:
        """What commits have for this process."""
        streamed, own_streamed = self._own(sample for commit in commits for sample in commit.streamed)
        scored, own_scored = self._own(sample for commit in commits for sample in commit.scored)
        records = _records(commits)
        return Outputs(
            streamed=streamed.tobytes(),
            tokens=_joined([commit.tokens for commit in commits], np.int32)[own_streamed].tobytes(),
            records=(records[own_streamed] if len(records) else records).tobytes(),
            scored=scored.tobytes(),
            scores=_joined([commit.scores for commit in commits], LOGPROB_RECORD)[own_scored].tobytes(),
            ended=[self._ended(sample) for commit in commits for sample in commit.finished if self._has(sample)],
        )

    def _own(self, samples: Iterable[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of those samples that are this process's, int64, and for each sample whether it is, bool."""
        hosted = cast("list[HostedSample]", list(samples))
        own = np.fromiter((sample.outbox is self for sample in hosted), bool, len(hosted))
        numbers = np.fromiter((sample.number for sample in hosted), np.int64, len(hosted))
        return numbers[own], own

    def _takes(self, committed: Committed) -> bool:
        """Whether to queue a commit's result. Whom it concerns the thread finds out, unless it stands still."""
        if self._queue.qsize() < _PATIENCE:
            return bool(committed.finished or committed.streamed or committed.scored)
        return any(map(self._has, (*committed.finished, *committed.streamed, *committed.scored)))

    def _has(self, sample: Sample) -> bool:
        return cast(HostedSample, sample).outbox is self

    def _ended(self, sample: Sample) -> Ended:
        assert sample.finish_reason is not None
        number = cast(HostedSample, sample).number
        del self.samples[number]
        return Ended(
            number=number,
            tokens=sample.output.astype(np.int32).tobytes(),
            reason=sample.finish_reason,
            error=sample.error,
            cached_tokens=sample.cached_tokens,
            preemptions=sample.preemptions,
            versions=list(sample.versions),
            admitted=sample.timings.admitted,
            first_token=sample.timings.first_token,
            finished=sample.timings.finished,
        )


@dataclass(eq=False, kw_only=True, slots=True)
class HostedSample(Sample):
    """A sample of an API process.

    Attributes:
        outbox: where its tokens go.
        number: what the API process calls it.
    """

    outbox: Outbox
    number: int


def _joined(arrays: Sequence[np.ndarray], dtype: np.dtype | type) -> np.ndarray:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype)


def _records(commits: Sequence[Committed]) -> np.ndarray:
    """The records of all streamed tokens, zeros for a commit without; none at all if no commit has any."""
    if not any(len(commit.records) for commit in commits):
        return NO_RECORDS
    zeros = (np.zeros(len(commit.streamed), LOGPROB_RECORD) for commit in commits)
    return np.concatenate(
        [commit.records if len(commit.records) else none for commit, none in zip(commits, zeros, strict=True)]
    )
