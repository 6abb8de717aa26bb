"""A replica: the engine's loop, with its real scheduler, on a simulated machine."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import InvalidRequest
from ..plan import Flag, Plan, StepOutput
from ..request import Request, Sample, Timings
from ..sampling_params import SamplingParams
from .arrivals import OUTPUT_TOKEN, Arrival
from .clock import Clock
from .measures import Measures
from .row_times import RowTimes, Trip
from .settings import Settings
from .shortcut import Shortcut
from .step_time import Flight, StepTime, work_of

_TOKEN, _STOP, _LENGTH = int(Flag.TOKEN), int(Flag.TOKEN | Flag.STOP), int(Flag.TOKEN | Flag.LENGTH)


class Replica:
    """One engine on one device.

    A turn is one round of `AsyncLoop` (with one slot, of `SyncLoop`): plan, launch, and, if all slots are taken or
    there was nothing to plan, wait for the oldest step and commit it. What comes is submitted between two turns.

    Attributes:
        scheduler: the engine's. clock: of its CPU and device.
        times: of its rows.
        in_flight: steps that were launched and not committed, oldest first.
        shortcut: through steady turns; None: every turn is taken.
    """

    def __init__(self, settings: Settings, num_blocks: int, step_time: StepTime, measures: Measures) -> None:
        self.scheduler = settings.scheduler(num_blocks)
        self.clock = Clock(step_time.host)
        self.times = RowTimes(len(self.scheduler.rows.order), measures)
        self.in_flight: deque[Flight] = deque()
        self.depth = settings.depth
        self.step_time = step_time
        self._limits = settings.limits(num_blocks)
        self._surely_fits = min(self._limits.max_model_len, self._limits.cache_positions)
        self._requests: dict[tuple[int, int], Request] = {}
        self._measures = measures
        self._submitted = 0
        self.shortcut: Shortcut | None = Shortcut(
            self.scheduler,
            self.clock,
            self.times,
            self.in_flight,
            measures,
            step_time,
            depth=self.depth,
            takes_rows=settings.policy == "priority",
        )

    @property
    def load(self) -> int:
        """Requests that have come and have not ended."""
        return self.times.on_the_way

    @property
    def rests(self) -> bool:
        return not self.in_flight and not self.scheduler.has_work

    def submit(self, arrival: Arrival) -> None:
        """Take a request that came since the last turn began, or refuse it as the engine would."""
        if self.rests:
            self.clock.rest(arrival.time)
        try:
            request = self._request(arrival)
        except InvalidRequest as error:
            self._measures.refuse(str(error))
            return
        sample = Sample(request)
        sample.timings = Timings(arrival.time)
        self.scheduler.submit(sample)
        self._submitted += 1
        number = self._measures.arrive(arrival.time, len(arrival.prompt))
        outputs = min(arrival.output_tokens, request.max_tokens)
        self.times.submit(sample, Trip(number, sample.prompt_len + outputs - 1))

    def _request(self, arrival: Arrival) -> Request:
        """The checked request; where nothing can be refused or clamped, a copy of one that was checked."""
        waiting, most = self._submitted - self.scheduler.begun, self._limits.max_waiting
        if most is not None and waiting >= most:
            raise InvalidRequest(f"max_waiting={most}: so many wait already")
        kind = arrival.max_tokens, arrival.priority
        if not len(arrival.prompt) or len(arrival.prompt) + arrival.max_tokens > self._surely_fits:
            return self._create(arrival.prompt, *kind)
        if (model := self._requests.get(kind)) is None:
            model = self._requests[kind] = self._create(arrival.prompt[:1], *kind)
        return Request("", arrival.prompt, model.terms, model.seed, model.max_tokens)

    def _create(self, prompt: np.ndarray, max_tokens: int, priority: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, priority=priority)
        return Request.create("", prompt, params, seed=0, limits=self._limits)

    def advance(self, until: float) -> None:
        """Begin turns until the CPU's clock has come so far, or there is nothing to do."""
        while self.clock.now < until and not self.rests:
            if self.shortcut is None or not self.shortcut.take(until):
                self.turn()

    def turn(self) -> None:
        """One round of the loop.

        Raises:
            RuntimeError: there is work, but nothing can be planned, and nothing is in flight.
        """
        plan = self.scheduler.plan()
        if plan is not None:
            self._launch(plan)
        elif not self.in_flight and self.scheduler.has_work:
            raise RuntimeError("the scheduler has work, but plans nothing and has nothing in flight")
        if self.in_flight and (plan is None or len(self.in_flight) == self.depth):
            self._commit(*self.in_flight.popleft())

    def _launch(self, plan: Plan) -> None:
        rows = self.scheduler.rows
        for row in plan.joins["row"].tolist():
            self.times.join(row, rows.samples[row])
        seconds = self.step_time.seconds(work_of(plan, rows))
        self.clock.launch(seconds)
        self.in_flight.append(Flight(plan, seconds))

    def _commit(self, plan: Plan, seconds: float) -> None:
        self.clock.wait()
        rows = plan.sampled_rows()
        flags = self._flags(plan, rows)
        committed = self.scheduler.commit(plan, StepOutput(np.full(len(rows), OUTPUT_TOKEN, np.int32), flags))
        self.scheduler.observe(plan.num_lanes, len(plan.prompt_tokens), seconds)
        self.times.tokens(rows[flags != 0], self.clock.now)
        for sample in committed.finished:
            self.times.finish(sample, self.clock.now)

    def _flags(self, plan: Plan, rows: np.ndarray) -> np.ndarray:
        """What the device would say of each sampled position."""
        table = self.scheduler.rows
        computed = table.confirmed[rows] + 1
        if len(plan.chunks):
            chunks = plan.sampling_chunks()
            computed[plan.num_lanes :] = chunks[:, 1] + chunks[:, 2]
        end = self.times.end[rows]
        flags = np.full(len(rows), _TOKEN, np.int32)
        flags[computed == end] = _STOP
        flags[computed == table.limit[rows]] = _LENGTH
        flags[computed > end] = 0
        return flags
