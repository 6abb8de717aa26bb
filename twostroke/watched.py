"""What the loop is given in place of the scheduler and delivery, so that their time is accounted for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .device.activity import Activity


class Watched:
    """A scheduler and a delivery that note in the accounting when they plan and commit. All else is the scheduler's.

    A commit lasts until what it returned is handed over.
    """

    def __init__(self, scheduler: Any, deliver: Callable[[Any], None], activity: Activity) -> None:
        self._scheduler = scheduler
        self._deliver = deliver
        self._activity = activity
        self._committing: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.has_work)

    def plan(self) -> Any:
        began = time.perf_counter()
        plan = self._scheduler.plan()
        self._activity.planned(began, time.perf_counter())
        return plan

    def commit(self, plan: Any, output: Any) -> Any:
        self._committing = time.perf_counter()
        self._activity.count(plan, output)
        if (times := self._activity.newest) is not None:
            self._scheduler.observe(times.lanes, times.prompt_tokens, times.compute[1] - times.compute[0])
        return self._scheduler.commit(plan, output)

    def deliver(self, committed: Any) -> None:
        self._deliver(committed)
        if self._committing is not None:
            self._activity.committed(self._committing, time.perf_counter())
            self._committing = None
