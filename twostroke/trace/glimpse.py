"""A glimpse: the last steps of an engine that goes on, for whoever looks now and then."""

from __future__ import annotations

from collections.abc import Sequence

from ..device.activity import Activity
from ..device.step_times import StepTimes


class Glimpse:
    """Keeps the times of some steps after each look, then of none until the next: unseen, it costs the loop nothing.

    Args:
        activity: the engine's accounting, whose window this is meanwhile.
        steps: how many to keep.
    """

    def __init__(self, activity: Activity, steps: int) -> None:
        self._activity = activity
        self._steps = steps
        self._kept: list[StepTimes] = []
        self._shown: list[StepTimes] = []

    def append(self, times: StepTimes) -> None:
        """Keep the times of a step; called by the loop."""
        self._kept.append(times)
        if len(self._kept) >= self._steps:
            self._activity.window = None

    def look(self) -> Sequence[StepTimes]:
        """Return the steps that came after the last look, at most those that it asked for, and ask for more.

        Where fewer came, they stay, and the next ones are added to them; where none came, those seen last are returned.
        """
        kept = self._kept[: self._steps]
        if self._activity.window is None:
            self._shown, self._kept = kept, []
            self._activity.window = self
        return kept or self._shown
