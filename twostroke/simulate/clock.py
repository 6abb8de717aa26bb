"""The clock of a simulated machine: one CPU, one device."""

from __future__ import annotations

from collections import deque


class Clock:
    """When steps begin and end.

        CPU      | host | launch |   wait    | ...
        device       step N - 1  |  step N   | ...

    The CPU works `host` seconds for a step before it launches it. The device begins it then, or when it is done with
    the step before. Waiting for the oldest step in flight takes the CPU to that step's end.

    Attributes:
        now: of the CPU, seconds.
        busy: seconds of the device in steps.
    """

    def __init__(self, host: float) -> None:
        self.now = self.busy = 0.0
        self._host = host
        self._free_at = 0.0
        self._ends: deque[float] = deque()

    def launch(self, seconds: float) -> None:
        """Launch a step that takes the device `seconds`."""
        self.now += self._host
        self._free_at = max(self._free_at, self.now) + seconds
        self.busy += seconds
        self._ends.append(self._free_at)

    def wait(self) -> None:
        """Wait for the oldest step in flight."""
        self.now = max(self.now, self._ends.popleft())

    def rest(self, until: float) -> None:
        """Do nothing until then, if that is later than now."""
        self.now = max(self.now, until)
