"""The always-on accounting: where the compute stream's time went, and the CPU's."""

from __future__ import annotations

import time
from collections import deque

from ..plan import Plan
from .step_times import CAUSES, PHASES, Span, StepTimes, gap_parts
from .streams import Device, Event

Window = deque[StepTimes]
"""The last steps, in full; bounded by its `maxlen`."""


class Activity:
    """Sums over all steps, from the meter of the compute stream and a few time stamps of the CPU per step.

    The CPU's time stamps and the device's times must meet on one clock for a gap to be split by cause. The meter's
    clock is set by the CPU's whenever the engine rests; a CUDA clock then drifts by some parts in a million. Two facts
    hold it: a step cannot begin before its launch, nor end after its output was seen. Where a step would, all times of
    the device are shifted until it does not (`skew`). Lengths of steps and gaps are the meter's own and never touched.

    Attributes:
        steps: steps measured.
        busy_seconds: time inside steps.
        gap_seconds: time between steps while there was work.
        idle_seconds: time between steps in which there was nothing to do.
        idle: seconds between steps by cause; their sum is `gap_seconds + idle_seconds`.
        cpu: seconds of the CPU by phase.
        newest: the step that was done last.
        window: where the times of the steps go that are launched while it is set; None, as a rule.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self.gap_seconds = 0.0
        self.idle_seconds = 0.0
        self.idle = dict.fromkeys(CAUSES, 0.0)
        self.cpu = dict.fromkeys(PHASES, 0.0)
        self.window: Window | None = None
        self._launched: deque[tuple[StepTimes, Window | None]] = deque()
        self.newest: StepTimes | None = None
        self._plan: Span | None = None
        self._captures: list[Span] = []
        self._resting = True
        self._free_at = 0.0
        self._ended = time.perf_counter()
        self._skew = 0.0

    @property
    def active(self) -> float:
        """Share of the working time in which the compute stream ran a step, 0 to 1; 0 before the first step."""
        total = self.busy_seconds + self.gap_seconds
        return self.busy_seconds / total if total else 0.0

    def planned(self, began: float, ended: float) -> None:
        """Note a call to the scheduler's `plan`."""
        self._plan = began, ended
        self.cpu["plan"] += ended - began

    def launched(
        self, plan: Plan, began: float, filled: float, queued_at: float, ended: float, window: Window | None
    ) -> None:
        """Note a launch.

        Args:
            began, filled, ended: host times: of the begin, after `Slot.fill`, and of the end.
            queued_at: host time at which the input's copy was queued, before the step itself was.
            window: if the copies are metered, where the step's times go.
        """
        planned = self._plan or (began, began)
        times = StepTimes(
            step=plan.step,
            lanes=plan.num_lanes,
            prompt_tokens=len(plan.prompt_tokens),
            rested=self._resting,
            free_at=planned[0] if self._resting else self._free_at,
            plan=planned,
            fill=(began, filled),
            queue=(filled, ended),
            queued_at=queued_at,
            captures=tuple(self._captures),
        )
        self._launched.append((times, window))
        self._resting, self._plan, self._free_at = False, None, ended
        self._captures.clear()
        self.cpu["fill"] += filled - began
        self.cpu["queue"] += ended - filled

    def done(self, began: float, ended: float, device: Device, h2d_done: Event) -> None:
        """Note the wait for the oldest step in flight, and read from the device's meters when it ran.

        Args:
            began, ended: host times of the wait.
            h2d_done: recorded when the step's input was on the device.
        """
        times, window = self._launched.popleft()
        times.wait = began, ended
        times.compute = device.meter.read()
        times.arrived_at = device.meter.time_of(h2d_done)
        if window is not None:
            times.h2d, times.d2h = (meter.read() for meter in device.copy_meters)
            window.append(times)
        self.cpu["wait"] += ended - began
        self._add(times)
        self.newest = times

    def committed(self, began: float, ended: float) -> None:
        """Note the commit of the step that was done last; from now on the CPU can plan."""
        self.cpu["commit"] += ended - began
        self._free_at = ended
        if self.newest is not None:
            self.newest.commit = began, ended

    def captured(self, began: float, ended: float) -> None:
        """Note that graphs were captured."""
        self._captures.append((began, ended))

    def rest(self) -> None:
        """Note that there is nothing to do, and that the meter's clock is set anew."""
        self._resting = True
        self._ended += self._skew
        self._skew = 0.0

    def _add(self, times: StepTimes) -> None:
        began, ended = times.compute
        skew = max(self._skew, times.queued_at - began)
        self._skew = times.skew = min(skew, times.wait[1] - ended)
        times.gap = max(0.0, began - self._ended)
        self._ended = ended
        self.steps += 1
        self.busy_seconds += ended - began
        unasked = 0.0
        for cause, start, end in gap_parts(times):
            self.idle[cause] += end - start
            if times.rested and end <= times.free_at:
                unasked += end - start
        self.idle_seconds += unasked
        self.gap_seconds += times.gap - unasked
