"""The always-on accounting: where the compute stream's time went, and the CPU's."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from ..plan import Flag, Plan, StepOutput
from .step_times import CAUSES, PHASES, Span, StepTimes, gap_parts
from .streams import Device, Event

_TOKEN = int(Flag.TOKEN)


class Window(Protocol):
    """Where the times of steps go; filled by the loop's thread."""

    def append(self, times: StepTimes, /) -> None: ...


class _Part(NamedTuple):
    """What was launched in one piece: a step, or one part of a step with held rows.

    Attributes:
        times: of the part.
        arrived: recorded when its input was on the device.
        last: nothing of the step comes after it. split: it is part of a step with held rows.
        window: if its copies are metered, where the times go.
    """

    times: StepTimes
    arrived: Event
    last: bool
    split: bool
    window: Window | None


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
        sampled_tokens: tokens that steps gave. prompt_tokens: tokens of prompts that steps computed.
        newest: the step that was done last, or its first part.
        window: where the times of the steps go that are launched while it is set; None, as a rule.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.busy_seconds = 0.0
        self.gap_seconds = 0.0
        self.idle_seconds = 0.0
        self.idle = dict.fromkeys(CAUSES, 0.0)
        self.cpu = dict.fromkeys(PHASES, 0.0)
        self.sampled_tokens = 0
        self.prompt_tokens = 0
        self.window: Window | None = None
        self._launched: deque[_Part | None] = deque()  # None: new weights
        self._writes: list[Span] = []
        self._in_flight: dict[int, StepTimes] = {}
        self._ended_early: set[int] = set()
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

    @property
    def resting_seconds(self) -> float:
        """How long there has been nothing to do; not in `idle_seconds` until the next step. 0 while there is work."""
        return max(0.0, time.perf_counter() - self._ended) if self._resting else 0.0

    def planned(self, began: float, ended: float) -> None:
        """Note a call to the scheduler's `plan`."""
        self._plan = began, ended
        self.cpu["plan"] += ended - began

    def launched(
        self,
        plan: Plan,
        began: float,
        filled: float,
        queued_at: float,
        ended: float,
        window: Window | None,
        arrived: Event,
    ) -> None:
        """Note a launch; of a step with held rows, that of its first part.

        Args:
            began, filled, ended: host times: of the begin, after `Slot.fill`, and of the end.
            queued_at: host time at which the input's copy was queued, before the step itself was.
            window: if the copies are metered, where the step's times go.
            arrived: recorded when the step's input was on the device.
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
        self._in_flight[plan.step] = times
        split = len(plan.held) > 0
        self._launched.append(_Part(times, arrived, not split, split, window))
        self._resting, self._plan, self._free_at = False, None, ended
        self._captures.clear()
        self._note_cpu(began, filled, ended)

    def completed(
        self,
        plan: Plan,
        began: float,
        filled: float,
        queued_at: float,
        ended: float,
        window: Window | None,
        arrived: Event,
    ) -> None:
        """Note the launch of a step's second part, see `launched`. Before `began` the device waited for masks."""
        times = StepTimes(
            step=plan.step,
            lanes=0,
            prompt_tokens=0,
            rested=False,
            free_at=began,
            plan=(began, began),
            fill=(began, filled),
            queue=(filled, ended),
            queued_at=queued_at,
        )
        self._launched.append(_Part(times, arrived, True, True, window))
        self._note_cpu(began, filled, ended)
        self._free_at = ended

    def _note_cpu(self, began: float, filled: float, ended: float) -> None:
        self.cpu["fill"] += filled - began
        self.cpu["queue"] += ended - filled

    def done(self, step: int, began: float, ended: float, device: Device) -> None:
        """Note the wait for the oldest step in flight, and read from the device's meters when it ran.

        Parts are read in the order in which they ran: what later steps ran before the second part of this one, with it.

        Args:
            step: its number.
            began, ended: host times of the wait.
        """
        self.cpu["wait"] += ended - began
        while step not in self._ended_early:
            part = self._launched.popleft()
            if part is None:
                self._writes.append(device.meter.read())
                continue
            part.times.wait = began, ended
            self._read(part, device)
            if part.last:
                self._ended_early.add(part.times.step)
        self._ended_early.discard(step)
        self.newest = self._in_flight.pop(step)

    def _read(self, part: _Part, device: Device) -> None:
        times = part.times
        times.compute = device.meter.read()
        times.arrived_at = device.meter.time_of(part.arrived)
        if self._writes:
            times.writes = tuple(self._writes)
            self._writes.clear()
        if part.window is not None:
            h2d, d2h = device.copy_meters
            # Of a step with held rows, the copy of the masks is not metered.
            times.h2d = None if part.split and part.last else h2d.read()
            times.d2h = d2h.read() if part.last else None
            part.window.append(times)
        self._add(times)
        self.steps += part.last

    def count(self, plan: Plan, output: StepOutput) -> None:
        """Count the tokens of a step whose output has come."""
        self.prompt_tokens += len(plan.prompt_tokens)
        self.sampled_tokens += int(np.count_nonzero(output.flags & _TOKEN))

    def committed(self, began: float, ended: float) -> None:
        """Note the commit of the step that was done last; from now on the CPU can plan."""
        self.cpu["commit"] += ended - began
        self._free_at = ended
        if self.newest is not None:
            self.newest.commit = began, ended

    def wrote_weights(self) -> None:
        """Note that new weights were queued on the compute stream, and are metered there."""
        self._launched.append(None)

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
        self.busy_seconds += ended - began
        unasked = 0.0
        for cause, start, end in gap_parts(times):
            self.idle[cause] += end - start
            if times.rested and end <= times.free_at:
                unasked += end - start
        self.idle_seconds += unasked
        self.gap_seconds += times.gap - unasked
