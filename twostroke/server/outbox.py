"""The outbox: the engine process's side of delivery, which sends token ids to the API process."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np

from ..logprob_record import LOGPROB_RECORD, NO_RECORDS
from ..request import Sample
from ..scheduler.committed import Committed
from .wire import Begun, Died, Ended, FromEngine, Look, Outputs, Stats, encode


class Outbox:
    """Sends what the loop committed. The loop's thread only queues.

    What is committed while the last message is still on its way becomes one message, so an API process that cannot keep
    up gets fewer and larger ones, and holds up nobody.

    Args:
        connection: to the API process.
        samples: those on their way, by the number that the API process gave them; those that ended are taken out.
        begun: see `front.Commands`; sent whenever it has changed.
        on_error: called with the exception that ended the sending, unless the API process is gone.
    """

    def __init__(
        self,
        connection: Connection,
        samples: dict[int, Sample],
        begun: Callable[[], int],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._connection = connection
        self._samples = samples
        self._begun = begun
        self._begun_sent = 0
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Committed | FromEngine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="twostroke-outbox", daemon=True)
        self._thread.start()

    def put(self, committed: Committed | None) -> None:
        """Send a commit's result; called by the loop."""
        if committed is not None and (committed.finished or committed.streamed or committed.scored):
            self._queue.put(committed)
        if (begun := self._begun()) != self._begun_sent:
            self._begun_sent = begun
            self._queue.put(Begun(begun))

    def answer(self, answer: Stats | Look) -> None:
        self._queue.put(answer)

    def fail(self, error: Exception) -> None:
        """Say that the engine failed."""
        self._queue.put(Died(str(error)))

    def close(self) -> None:
        """Send what is queued, then end the thread and wait for that."""
        self._queue.put(None)
        self._thread.join()

    def end_in_child(self, error: Exception) -> None:
        """A forked child of the engine process has no callers to tell."""

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
        """Send what was queued; False if that was all for ever."""
        if commits := [item for item in taken if isinstance(item, Committed)]:
            self._connection.send_bytes(encode(self._outputs(commits)))
        for item in taken:
            if item is not None and not isinstance(item, Committed):
                self._connection.send_bytes(encode(item))
        return None not in taken

    def _outputs(self, commits: Sequence[Committed]) -> Outputs:
        numbers = [_number(sample) for commit in commits for sample in commit.streamed]
        tokens = np.concatenate([commit.tokens for commit in commits], dtype=np.int32)
        ended = [self._ended(sample) for commit in commits for sample in commit.finished]
        scored = [_number(sample) for commit in commits for sample in commit.scored]
        scores = np.concatenate([commit.scores for commit in commits])
        return Outputs(
            streamed=np.array(numbers, np.int64).tobytes(),
            tokens=tokens.tobytes(),
            records=_records(commits).tobytes(),
            scored=np.array(scored, np.int64).tobytes(),
            scores=scores.tobytes(),
            ended=ended,
        )

    def _ended(self, sample: Sample) -> Ended:
        assert sample.finish_reason is not None
        number = _number(sample)
        del self._samples[number]
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


def _records(commits: Sequence[Committed]) -> np.ndarray:
    """The records of all streamed tokens, zeros for a commit without; none at all if no commit has any."""
    if not any(len(commit.records) for commit in commits):
        return NO_RECORDS
    zeros = (np.zeros(len(commit.streamed), LOGPROB_RECORD) for commit in commits)
    return np.concatenate(
        [commit.records if len(commit.records) else none for commit, none in zip(commits, zeros, strict=True)]
    )


def _number(sample: Sample) -> int:
    return int(sample.request.id) + sample.index
