"""The handle of a submitted request: wait for its output, iterate over it, cancel it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any, Protocol

from ..request import FinishReason, Sample
from .output import Delta, RequestOutput


class Owner(Protocol):
    """What a handle asks of the engine."""

    def cancel(self, sample: Sample) -> None:
        """End the sample soon; does nothing if it has ended. Never raises."""

    def stream(self, sample: Sample) -> None:
        """Have its tokens handed over as they come, from the first one on."""


class Handle:
    """One request on its way. Safe to use from any thread, and from any asyncio loop.

    `result()` and `await handle` give the whole output. `for delta in handle` and `async for delta in handle` give it
    in pieces; leaving such a loop early cancels the request. One iteration at a time.
    """

    def __init__(self, sample: Sample, owner: Owner) -> None:
        self.sample = sample
        self._owner = owner
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._ids: list[int] = []
        self._text: list[str] = []
        self._streaming = False
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._taken_last = False

    @property
    def request_id(self) -> str:
        return self.sample.request.id

    @property
    def done(self) -> bool:
        """True once the request has ended, in whatever way."""
        return self._output is not None or self._error is not None

    def cancel(self) -> None:
        """End the request; it gets a final output with the tokens so far. Does nothing if it has ended."""
        if not self.done:
            self._owner.cancel(self.sample)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the whole output.

        Args:
            timeout: seconds to wait at most; None is for ever.

        Raises:
            TimeoutError: the request goes on; call again or cancel it.
            EngineDead, EngineClosed: the engine ended before the request.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"request {self.request_id!r} has not ended within timeout={timeout} s")
        return self._outcome()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._wait_async().__await__()

    def __iter__(self) -> Iterator[Delta]:
        self.begin_stream()
        try:
            while not self._taken_last:
                with self._changed:
                    self._changed.wait_for(self._has_news)
                    delta = self._take()
                yield delta
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        self.begin_stream()
        try:
            while not self._taken_last:
                await self._news_async(self._has_news)
                with self._changed:
                    delta = self._take()
                yield delta
        finally:
            self.cancel()

    def begin_stream(self) -> None:
        """Have the output handed over as it comes, rather than when it is asked for first."""
        if not self._streaming and not self.done:
            self._streaming = True
            self._owner.stream(self.sample)

    def push(self, ids: Sequence[int], text: str) -> None:
        """Add output that came; called by delivery."""
        with self._changed:
            self._ids.extend(ids)
            self._text.append(text)
            self._notify()

    def finish(self, output: RequestOutput, ids: Sequence[int], text: str) -> None:
        """Set the outcome, with the output that was not pushed yet; called by delivery."""
        with self._changed:
            self._ids.extend(ids)
            self._text.append(text)
            self._output = output
            self._notify()

    def fail(self, error: Exception) -> None:
        """Make every wait raise `error`, now and later. Does nothing if the request has ended."""
        with self._changed:
            if not self.done:
                self._error = error
                self._notify()

    def _outcome(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def _has_news(self) -> bool:
        return bool(self._ids) or self.done

    def _take(self) -> Delta:
        """Return what has come since the last call; raise what the request failed with."""
        reason: FinishReason | None = None
        if not self._ids:
            reason = self._outcome().finish_reason
        elif self._output is not None:
            reason = self._output.finish_reason
        delta = Delta("".join(self._text), self._ids, reason)
        self._ids, self._text = [], []
        self._taken_last = reason is not None
        return delta

    def _notify(self) -> None:
        """Wake every waiter; an asyncio loop that was closed means that its consumer is gone."""
        self._changed.notify_all()
        for loop, event in self._waiters:
            try:
                loop.call_soon_threadsafe(event.set)
            except RuntimeError:
                self._owner.cancel(self.sample)
        self._waiters.clear()

    async def _news_async(self, ready: Any) -> None:
        while True:
            event = asyncio.Event()
            with self._changed:
                if ready():
                    return
                self._waiters.append((asyncio.get_running_loop(), event))
            await event.wait()

    async def _wait_async(self) -> RequestOutput:
        await self._news_async(lambda: self.done)
        return self._outcome()
