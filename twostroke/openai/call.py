"""A call: the requests to the engine that one HTTP request makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from ..errors import EngineClosed, EngineDead
from ..request import FinishReason
from ..text.handle import Handle
from ..text.output import Delta, RequestOutput, SampleOutput
from .errors import ApiError


class Call:
    """Handles that live and end together. Used in one asyncio loop.

    Args:
        handles: of the prompts, in their order, all with the same number of samples; they have started.
        seconds: how long they may take; None is for ever.
        on_end: called once, when the call is over.
        on_delta: called with each delta that is about to be yielded, and the place of its request.
    """

    def __init__(
        self,
        handles: Sequence[Handle],
        seconds: float | None,
        on_end: Callable[[Call], None],
        on_delta: Callable[[int, Delta], None],
    ) -> None:
        self.handles = handles
        self._on_delta = on_delta
        self._on_end: Callable[[Call], None] | None = on_end
        self._cause = ApiError(503, "the request was cancelled")
        self._timer: asyncio.TimerHandle | None = None
        if seconds is not None:
            late = ApiError(504, f"the request took longer than {seconds:g} s", code="timeout")
            self._timer = asyncio.get_running_loop().call_later(seconds, self.cancel, late)

    @property
    def choices(self) -> int:
        """Samples of all prompts."""
        return len(self.handles) * len(self.handles[0].samples)

    def cancel(self, cause: ApiError) -> None:
        """End the requests that run; whoever waits for them gets what there is, then `cause`."""
        self._cause = cause
        for handle in self.handles:
            handle.cancel()

    def end(self) -> None:
        """The HTTP request is over, in whatever way; what still runs is cancelled."""
        for handle in self.handles:
            handle.cancel()
        if self._timer is not None:
            self._timer.cancel()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    async def outputs(self) -> list[RequestOutput]:
        """Wait for all outputs.

        Raises:
            ApiError: one did not end well.
        """
        try:
            outputs = [await handle for handle in self.handles]
        except (EngineDead, EngineClosed) as error:
            raise _engine_gone() from error
        for sample in samples(outputs):
            if sample.finish_reason is FinishReason.CANCELLED:
                raise self._cause
        check_outputs(outputs)
        return outputs

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield the deltas as they come, each with the place of its sample among those of all prompts.

        Raises:
            ApiError: one did not end well; all of its deltas were yielded before.
        """
        try:
            async for place, delta in _merged(self.handles):
                self._on_delta(place, delta)
                yield place * len(self.handles[0].samples) + delta.index, delta
                if delta.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
                    self.cancel(self._cause)  # the other samples: the answer fails as a whole
                    await self.outputs()
        except (EngineDead, EngineClosed) as error:
            raise _engine_gone() from error


def samples(outputs: Sequence[RequestOutput]) -> list[SampleOutput]:
    """The samples of all prompts, in order: the choices of an answer."""
    return [sample for output in outputs for sample in output.outputs]


def check_outputs(outputs: Sequence[RequestOutput]) -> None:
    """Raise ApiError if a sample ended with an error."""
    for sample in samples(outputs):
        if sample.finish_reason is FinishReason.ERROR:
            raise _failed(sample.error or "")


def _failed(error: str) -> ApiError:
    if error.startswith("queue_timeout"):
        return ApiError(503, error, param="queue_timeout", code="queue_timeout", headers={"Retry-After": "1"})
    return ApiError(500, error)


def _engine_gone() -> ApiError:
    return ApiError(500, "the engine stopped before the request had ended", code="engine_stopped")


async def _merged(handles: Sequence[Handle]) -> AsyncIterator[tuple[int, Delta]]:
    if len(handles) == 1:
        async for delta in handles[0]:
            yield 0, delta
        return
    iterations = [aiter(handle) for handle in handles]
    tasks = {asyncio.ensure_future(each.__anext__()): place for place, each in enumerate(iterations)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = tasks.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                tasks[asyncio.ensure_future(iterations[place].__anext__())] = place
                yield place, delta
    finally:
        for task in tasks:
            task.cancel()
