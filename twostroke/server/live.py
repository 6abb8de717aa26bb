"""/live: what the engine does now, again and again, for the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from ..device.step_times import StepTimes
from ..errors import EngineClosed, EngineDead
from ..openai.events import event
from ..trace.spans import spans_of
from .attached_engine import AttachedEngine
from .description import EVENTS
from .event_stream import EventStream
from .service import Service

PERIOD = 0.5
"""Seconds between two looks."""

MIN_STEPS = 4
"""Steps after a rest from which on those before it are not shown."""


class LiveFeed:
    """Looks at the engine for all who watch together: many watchers cost the engine no more than one."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._looked = 0.0
        self._seen: dict[str, Any] = {}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield what is seen, until the server shuts down."""
        while not self._service.draining:
            yield event(await self.look())
            await asyncio.sleep(PERIOD)

    async def look(self) -> dict[str, Any]:
        """Return what is to be seen, of this moment or of one not long ago."""
        async with self._lock:
            if time.monotonic() - self._looked > PERIOD / 2:
                self._seen = await self._look()
                self._looked = time.monotonic()
            return self._seen

    async def _look(self) -> dict[str, Any]:
        settings, engine = self._service.settings, self._service.running_engine
        seen = {"model": settings.model_name, "gpu_price": settings.gpu_price, "engine": None}
        if engine is None:
            return seen
        try:
            return seen | {"engine": await _look_at(engine)}
        except (EngineDead, EngineClosed):
            return seen


async def _look_at(engine: AttachedEngine) -> dict[str, Any]:
    look = await asyncio.wrap_future(engine.ask_look())
    return {
        "pid": engine.pid,
        "time": time.perf_counter(),
        "max_rows": engine.ready.max_rows,
        "usable_blocks": engine.limits.usable_blocks,
        "stats": look.values,
        "spans": _spans(_after_rest(look.steps)),
    }


def _after_rest(steps: Sequence[StepTimes]) -> Sequence[StepTimes]:
    """The steps from the last rest on, unless that was just now: a long rest would leave no room for anything else."""
    rested = [place for place, times in enumerate(steps[: 1 - MIN_STEPS]) if times.rested]
    return steps[rested[-1] :] if rested else steps


def _spans(steps: Sequence[StepTimes]) -> list[tuple[str, str, int, float, float]]:
    """(row, kind, step, begin, end) of each span, in milliseconds from the first begin; see `trace.spans.Span`."""
    if not steps:
        return []
    spans = [span for span in spans_of(steps) if span.begin < span.end]
    start = min(span.begin for span in spans)
    return [
        (span.row, span.kind, span.step, round(1e3 * (span.begin - start), 4), round(1e3 * (span.end - start), 4))
        for span in spans
    ]


def add_live(router: APIRouter, service: Service) -> None:
    feed = LiveFeed(service)

    @router.get("/live", responses={200: EVENTS})
    async def live() -> Response:
        """What the engine does now, as events, twice a second."""
        return EventStream(feed.events())
