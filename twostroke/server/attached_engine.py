"""An engine in another process, as an API process sees it: a front over a connection."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..constraints.constraints import Constraints
from ..errors import EngineClosed, EngineDead, InvalidWeights, TwostrokeError
from ..front import Front
from ..logprob_record import LOGPROB_RECORD
from ..request import FinishReason, Sample, SampleState
from ..scheduler.committed import Committed
from ..scheduler.draft import NO_TOKENS
from ..text.delivery import Delivery
from ..text.tokenizer import find_tokenizer
from .engine_child import CLOSE_SECONDS, hang_up
from .remote_commands import RemoteCommands
from .remote_tasks import RemoteTasks
from .wire import (
    AskLook,
    AskStats,
    Begun,
    Close,
    Died,
    Done,
    Ended,
    Failed,
    FromEngine,
    Look,
    Outputs,
    Pause,
    Ready,
    ResetPrefixCache,
    Resume,
    Sleep,
    Stats,
    Unfit,
    UpdateWeights,
    Wake,
    decode_from_engine,
)


class AttachedEngine(Front):
    """A front to an engine in another process. A context manager.

        this process                                         engine process
        Front --> RemoteCommands --> writer   ============>  client thread --> inbox --> loop
        Handle <-- Delivery <-- reader        <============  outbox <------------------- loop

    The reader waits for delivery before it reads on. So what this process is too slow for waits in the outbox, which
    merges it, and neither the loop nor the memory feels it.

    Args:
        connection: to the engine.
        ready: what it said of itself.
        seed: see `Front`.
        on_end: called once, by a thread of this object, if the connection ends without `close`.

    Attributes:
        tasks: what is done to the engine, for those who do not want to wait.
        failed: whether it was this process that failed.
    """

    failed = False

    def __init__(
        self, connection: Connection, ready: Ready, seed: int | None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self.ready = ready
        self._connection = connection
        self._on_end = on_end
        self._closing = False
        self._questions: deque[Future[Any]] = deque()
        self._asking = threading.Lock()
        tokenizer = find_tokenizer(Path(ready.directory) if ready.directory is not None else None)
        delivery = Delivery(tokenizer, self._fail)
        self._remote = RemoteCommands(connection)
        self.tasks = RemoteTasks(self._remote.send)
        super().__init__(tokenizer, ready.limits, seed, delivery, self._remote, Constraints(tokenizer, ready.limits))
        self._reader = threading.Thread(target=self._read, name="twostroke-reader", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The id of the engine process."""
        return self.ready.pid

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

    @property
    def weight_version(self) -> int:
        """See `Engine`, as for what follows. It is asked for, and raises EngineDead after the engine's end."""
        return int(self.ask_stats().result()["weight_version"])

    def pause(self, mode: str = "keep") -> None:
        self.tasks.begin(Pause(str(mode))).result()

    def resume(self) -> None:
        self.tasks.begin(Resume()).result()

    def sleep(self) -> None:
        self.tasks.begin(Sleep()).result()

    def wake(self) -> None:
        self.tasks.begin(Wake()).result()

    def reset_prefix_cache(self) -> None:
        self.tasks.begin(ResetPrefixCache()).result()

    def update_weights(self, weights: str | os.PathLike[str], *, recompute: bool = False, partial: bool = False) -> int:
        """See `Engine`; only a path can be sent to another process."""
        if not isinstance(weights, str | os.PathLike):
            raise InvalidWeights(f"weights: a {type(weights).__name__} cannot reach an engine in another process")
        return self.tasks.begin(UpdateWeights(os.fsdecode(weights), bool(recompute), bool(partial))).result()

    def close(self) -> None:
        """Cancel what is running, hand over every output, and leave the engine. Safe to call twice."""
        self._closing = True
        with contextlib.suppress(TwostrokeError):
            self._remote.send(Close())
        self._reader.join(CLOSE_SECONDS)
        hang_up(self._connection)
        self._reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> None:
        reason: Exception | None = None
        try:
            while not isinstance(message := decode_from_engine(self._connection.recv_bytes()), Died):
                self._take(message)
            reason = EngineDead(message.text)
        except (EOFError, OSError):
            pass
        except BaseException as error:
            self.failed = True
            reason = EngineDead(f"the engine's messages could not be read: {type(error).__name__}: {error}")
        hang_up(self._connection)
        self._end(reason or (EngineClosed("the engine is closed") if self._closing else self._death()))
        if not self._closing:
            self._on_end()

    def _death(self) -> Exception:
        """Why the connection ended."""
        return EngineDead("the engine process ended")

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Stats):
            self._questions.popleft().set_result(message.values)
        elif isinstance(message, Look):
            self._questions.popleft().set_result(message)
        elif isinstance(message, Done | Failed):
            self.tasks.take(message)
        elif isinstance(message, Begun):
            self._remote.count_begun(message.count)
        elif isinstance(message, Unfit):
            self._deliver(Committed(self._refuse(message), [], NO_TOKENS))
        elif isinstance(message, Outputs):
            streamed, scored = self._samples(message.streamed), self._samples(message.scored)
            records, scores = (np.frombuffer(part, LOGPROB_RECORD) for part in (message.records, message.scores))
            finished = [self._finish(ended) for ended in message.ended]
            tokens = np.frombuffer(message.tokens, np.int32)
            self._deliver(Committed(finished, streamed, tokens, records, scored, scores))

    def _deliver(self, committed: Committed) -> None:
        self._delivery.put(committed)
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

    def _refuse(self, unfit: Unfit) -> list[Sample]:
        """End the samples of a request that was admitted here, and is not taken there."""
        samples = self._remote.pop_unfit(unfit.number)
        for sample in samples:
            sample.state, sample.finish_reason, sample.error = SampleState.FINISHED, FinishReason.ERROR, unfit.text
            sample.timings.finished = time.perf_counter()
        return samples

    def _fail(self, error: BaseException) -> None:
        """Delivery failed; called by its worker."""
        dead = EngineDead(f"the delivery failed: {type(error).__name__}: {error}")
        dead.__cause__ = error
        self.failed = True
        self._remote.close(dead)
        self._delivery.fail(dead)
        hang_up(self._connection)

    def _end(self, reason: Exception) -> None:
        """Every waiting caller gets the reason now, later ones at once."""
        self._remote.close(reason)
        self._delivery.fail(reason)
        self._delivery.close()
        while self._questions:
            self._questions.popleft().set_exception(reason)
        self.tasks.end(reason)
