"""The handle of a submitted request: wait for its output, iterate over it, cancel it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from ..errors import InvalidRequest, fresh, shown
from ..request import Sample
from .ending import Ending
from .output import Delta, RequestOutput, SampleOutput, TokenLogprob, best
from .waiters import TaskWaiter, ThreadWaiter

T = TypeVar("T")


class Owner(Protocol):
    """What a handle asks of the engine."""

    def cancel(self, sample: Sample) -> None:
        """End the sample soon; does nothing if it has ended. Never raises."""

    def stream(self, sample: Sample) -> None:
        """Have its tokens handed over as they come, from the first one on. Never raises."""

    def finish(self, sample: Sample, count: int) -> None:
        """End the sample soon, with its first `count` output tokens; does nothing if it has ended. Never raises."""


class _Piece:
    """The output of a sample that nobody has taken yet."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []

    @classmethod
    def of(cls, output: SampleOutput) -> _Piece:
        """All of an output."""
        piece = cls()
        piece.ids.extend(output.token_ids)
        piece.text.append(output.text or "")
        piece.logprobs.extend(output.logprobs or ())
        return piece

    def __bool__(self) -> bool:
        return bool(self.ids or self.text)


class Handle:
    """One request on its way. Safe to use from any thread, and from any asyncio loop.

    `result()` and `await handle` give the whole output. `for delta in handle` and `async for delta in handle` give it
    in pieces, one iteration at a time. Who leaves such an iteration early, or is cancelled in an `await`, no longer
    wants the output: the request is cancelled.

    NOTE: there may be a hundred thousand that wait, and each collection of garbage looks at every object that can
    refer to others. So there is none here before it is needed: empty tuples and empty dictionaries do not count.

    Args:
        samples: those of the request, in the order of their indices.
        owner: the engine; let go of once the request has ended.
        place: of the prompt in the call to `generate`.
    """

    __slots__ = (
        *("samples", "place", "_owner", "_lock", "_waiters", "_pieces", "_endings"),
        *("_prompt_logprobs", "_streaming", "_output", "_error", "_on_end", "_on_sample", "__weakref__"),
    )

    def __init__(self, samples: Sequence[Sample], owner: Owner, place: int = 0) -> None:
        self.samples = tuple(samples)
        self.place = place
        self._owner: Owner | None = owner
        self._lock = threading.RLock()
        self._waiters: tuple[ThreadWaiter | TaskWaiter, ...] = ()
        self._pieces: dict[int, _Piece] = {}
        self._endings: dict[int, Ending] = {}
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._streaming = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._on_end: tuple[Callable[[Handle], object], ...] = ()
        self._on_sample: tuple[Callable[[SampleOutput], object], ...] = ()

    @property
    def sample(self) -> Sample:
        """The first sample."""
        return self.samples[0]

    @property
    def request_id(self) -> str:
        return self.sample.request.id

    @property
    def done(self) -> bool:
        """True once the request has ended, in whatever way."""
        return len(self._endings) == len(self.samples) or self._error is not None

    def cancel(self, index: int | None = None) -> None:
        """End the request, or its sample `index`; it gets a final output with the tokens so far.

        Does nothing if it has ended.
        """
        if (owner := self._owner) is not None:
            for sample in self.samples if index is None else (self.samples[index],):
                owner.cancel(sample)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output.

        Args:
            timeout: seconds to wait at most; None, or more than a clock can count, is for ever.

        Raises:
            TimeoutError: the request goes on; call again or cancel it.
            EngineDead, EngineClosed: the engine ended before the request.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"request {shown(self.request_id)} has not ended within timeout={timeout} s")
        return self._outcome()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended; False if `timeout` seconds went by before that."""
        seconds = None if timeout is None else min(threading.TIMEOUT_MAX, timeout)  # also of what is no number
        return self.done or bool(self._wait(lambda: self.done, seconds))

    def on_sample(self, callback: Callable[[SampleOutput], object]) -> None:
        """Have `callback` called with the output of each sample, once that has ended, or now if it has.

        By delivery, as with `on_end`, and before that.
        """
        with self._lock:
            ended = self._ended()
            self._on_sample += (callback,)
        for output in ended:
            callback(output)

    def on_end(self, callback: Callable[[Handle], object]) -> None:
        """Have `callback` called with this handle once the request has ended, or now if it has.

        It is called by delivery, for which all requests wait: it must return at once, and must not raise.
        """
        with self._lock:
            if not self.done:
                self._on_end += (callback,)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._result_async().__await__()

    def __iter__(self) -> Deltas:
        self.begin_stream()
        return Deltas(self)

    def __aiter__(self) -> Deltas:
        self.begin_stream()
        return Deltas(self)

    def begin_stream(self) -> None:
        """Have the output handed over as it comes, rather than when it has ended.

        Raises:
            InvalidRequest: see `require_streamable`.
        """
        self.require_streamable()
        if not self._streaming and (owner := self._owner) is not None:
            self._streaming = True
            for sample in self.samples:
                owner.stream(sample)

    def require_streamable(self) -> None:
        """Raise `InvalidRequest` if the request has `best_of`: which samples it returns is known at its end."""
        if (count := self.sample.request.params.best_of) is not None:
            raise InvalidRequest(f"best_of={count} cannot be streamed: which samples are the best is known at the end")

    def next_delta(self, wanted: Sequence[int] = (0,)) -> Delta:
        """Wait for output of one of the samples `wanted` that was not taken yet, and take it; the first has priority.

        A sample that has ended, and of which all was taken, gives an empty delta.
        """
        delta = self._wait(lambda: self._take(wanted))
        assert delta is not None
        return delta

    async def next_delta_async(self, wanted: Sequence[int] = (0,)) -> Delta:
        """The same without blocking the asyncio loop."""
        return await self._wait_async(lambda: self._take(wanted))

    def stop(self, sample: Sample, count: int) -> None:
        """End a sample, whose first `count` tokens make its output; called by delivery."""
        if (owner := self._owner) is not None:
            owner.finish(sample, count)

    def push(self, index: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Add output of sample `index` that came; called by delivery."""
        with self._lock:
            self._add(index, ids, text, logprobs)
            # NOTE: who waits for the whole output is not woken for a part of it.
            if self._streaming and (ids or text):
                self._notify()

    def finish(self, ending: Ending, ids: Sequence[int] = (), text: str = "") -> None:
        """Set the outcome of a sample, with what was not pushed yet, if part of it was taken; called by delivery."""
        index, log = ending.sample.index, ending.log
        with self._lock:
            if ids or text:
                self._add(index, ids, text, log.hand_over(len(ids)) if log else ())
            if log and self.sample.request.terms.wanted_prompt_logprobs:
                # Of the samples that began to compute the prompt only one may have come to its end.
                self._prompt_logprobs = max(self._prompt_logprobs or [], log.prompt, key=len)
            self._endings[index] = ending
            if self.done:
                self._owner = None
            if self._waiters and (self._streaming or self.done):
                self._notify()
            listeners = self._on_sample
        for listener in listeners:
            listener(self._output_of(ending))
        if self._on_end:
            self._call_back()

    def fail(self, error: Exception) -> None:
        """Make every wait raise `error`, now and later. Does nothing if the request has ended."""
        with self._lock:
            if not self.done:
                self._error, self._owner = error, None
                self._notify()
        self._call_back()

    def end_in_child(self, error: Exception) -> None:
        """Fail in a forked child, where other threads' hold on the lock is for ever, and asyncio loops are not ours."""
        self._lock, self._waiters = threading.RLock(), ()
        self.fail(error)

    def cancel_if_deserted(self) -> None:
        """Cancel the request if an asyncio loop that waits for it was closed: its consumer is gone."""
        if any(waiter.is_deserted for waiter in self._waiters):
            self.cancel()

    def _call_back(self) -> None:
        with self._lock:
            ended, self._on_end = (self._on_end, ()) if self.done else ((), self._on_end)
        for callback in ended:
            callback(self)

    def _outcome(self) -> RequestOutput:
        if self._error is not None:
            raise fresh(self._error)
        with self._lock:
            if self._output is None:
                self._output = self._whole(self._ended())
            return self._output

    def _whole(self, outputs: list[SampleOutput]) -> RequestOutput:
        """The output of the request, all of whose samples have ended."""
        request = self.sample.request
        return RequestOutput(
            request_id=request.id,
            index=self.place,
            prompt_token_ids=request.prompt.tolist(),
            outputs=outputs if request.params.best_of is None else best(outputs, request.params.n),
            cached_tokens=self.sample.cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _ended(self) -> list[SampleOutput]:
        """The outputs of the samples that have ended, in the order of their indices."""
        return [self._endings[index].output for index in sorted(self._endings)]

    def _output_of(self, ending: Ending) -> SampleOutput:
        with self._lock:
            return ending.output

    def _add(self, index: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprob]) -> None:
        piece = self._pieces.get(index) or self._pieces.setdefault(index, _Piece())
        piece.ids.extend(ids)
        piece.logprobs.extend(logprobs)
        if text:
            piece.text.append(text)

    def _has_news(self, index: int) -> bool:
        return bool(self._pieces.get(index)) or index in self._endings

    def _take(self, wanted: Sequence[int]) -> Delta | None:
        """Return what has come of a sample since the last call, if anything; raise what the request failed with."""
        index = next(filter(self._has_news, wanted), None)
        if index is None:
            if self._error is not None:
                raise fresh(self._error)
            return None
        piece, ending = self._pieces.pop(index, None) or _Piece(), self._endings.get(index)
        if ending is not None and ending.untaken:
            ending.untaken = False
            piece = _Piece.of(ending.output)
        reason = ending.finish_reason if ending else None
        logprobs = None if self.sample.request.params.logprobs is None else piece.logprobs
        return Delta("".join(piece.text), piece.ids, reason, index, logprobs)

    def _notify(self) -> None:
        """Wake every waiter."""
        self.cancel_if_deserted()
        for waiter in self._waiters:
            waiter.wake()

    def _wait(self, take: Callable[[], T | None], timeout: float | None = None) -> T | None:
        """Wait until `take`, called with the lock, gives something; what is false after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            waiter = ThreadWaiter()
            with self._lock:
                if taken := take():
                    return taken
                self._waiters += (waiter,)
            try:
                woken = waiter.wait(None if deadline is None else deadline - time.monotonic())
            finally:
                self._forget(waiter)
            if not woken:
                with self._lock:
                    return take()

    async def _wait_async(self, take: Callable[[], T | None]) -> T:
        """The same without blocking the asyncio loop; whatever ends the wait early cancels the request."""
        while True:
            waiter = TaskWaiter()
            with self._lock:
                if taken := take():
                    return taken
                self._waiters += (waiter,)
            try:
                await waiter.wait()
            except BaseException:
                self.cancel()
                raise
            # NOTE: not removed when it is woken, since its loop may be closed before it hears of that.
            self._forget(waiter)

    def _forget(self, waiter: ThreadWaiter | TaskWaiter) -> None:
        with self._lock:
            self._waiters = tuple(other for other in self._waiters if other is not waiter)

    async def _result_async(self) -> RequestOutput:
        await self._wait_async(lambda: self.done)
        return self._outcome()


class Deltas:
    """One iteration, with `for` or `async for`, over the output of a handle; to let go of it early cancels the request.

    NOTE: no generator, since an asynchronous one that is left early lives on until the asyncio loop turns again, which
    may never be.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._wanted = list(range(len(handle.samples)))

    def __iter__(self) -> Deltas:
        return self

    def __aiter__(self) -> Deltas:
        return self

    def __next__(self) -> Delta:
        if not self._wanted:
            raise StopIteration
        try:
            return self._passed_on(self._handle.next_delta(self._wanted))
        except BaseException:
            self._handle.cancel()
            raise

    async def __anext__(self) -> Delta:
        if not self._wanted:
            raise StopAsyncIteration
        return self._passed_on(await self._handle.next_delta_async(self._wanted))

    def __del__(self) -> None:
        self._handle.cancel()

    def _passed_on(self, delta: Delta) -> Delta:
        """Let the other samples have their turn before this one, or strike it off if it has ended."""
        self._wanted.remove(delta.index)
        if delta.finish_reason is None:
            self._wanted.append(delta.index)
        return delta
