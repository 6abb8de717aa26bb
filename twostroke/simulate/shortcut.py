"""The shortcut through steady turns."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..scheduler.scheduler import Scheduler
from .arrivals import OUTPUT_TOKEN
from .clock import Clock
from .measures import Measures
from .row_times import RowTimes
from .step_time import Flight, StepTime, decode_work

LEAST = 2
"""Turns below which the shortcut is a detour."""


class Shortcut:
    """Takes many turns at once, where each of them would plan the same rows, and commit what ends nobody.

    A run of turns is *steady* if, at its beginning, all steps in flight have the lanes of now and nothing else; no row
    prefills, waits for its lane, drains or is about to be released; nobody waits who could get a row; and no sample
    ends at the commit of any of its turns, or reaches the limit of what may be launched. Then each of them does this,
    and no more:

        plan      every lane is launched one position further; rows at the edge of their last block take one each
        commit    every lane is confirmed one position further, and a token is written

    So `launched` and `confirmed` grow by the number of turns, and blocks are taken in the order in which the turns
    would take them, from the same pool by the same call: what is evicted and which row has which block is the same,
    too. The run ends before a turn whose blocks are not there, and before one that would begin at `until` or later. The
    clock goes through it turn by turn. What is left behind is equal to the bit to what the turns themselves leave;
    `tests/test_simulate_shortcut.py` holds the one against the other.

    Args:
        scheduler, clock, times, in_flight: of the replica.
        takes_rows: whether who waits may take the rows of others, see `Policy`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        times: RowTimes,
        in_flight: deque[Flight],
        measures: Measures,
        step_time: StepTime,
        *,
        depth: int,
        takes_rows: bool,
    ) -> None:
        self._scheduler, self._clock, self._times, self._in_flight = scheduler, clock, times, in_flight
        self._measures, self._step_time = measures, step_time
        self._depth, self._takes_rows = depth, takes_rows

    def take(self, until: float) -> int:
        """Take the steady turns that begin before `until`; return their number, often 0."""
        if not self._is_steady():
            return 0
        lanes, rows = self._scheduler.batch.lanes.index, self._scheduler.rows
        most = min(
            int((rows.limit[lanes] - rows.launched[lanes]).min()),
            int((self._times.end[lanes] - rows.confirmed[lanes]).min()) - 1,
        )
        if most < LEAST:
            return 0
        began, steps = self._walk(lanes, most, until)
        if steps:
            self._settle(lanes, began, steps)
        return len(steps)

    def _is_steady(self) -> bool:
        scheduler, batch = self._scheduler, self._scheduler.batch
        if batch.prefilling or batch.ready or batch.draining or batch.releases or not batch.lanes.count:
            return False
        if scheduler.waiting and (self._takes_rows or scheduler.rows.free):
            return False
        rows = batch.lanes.plan_rows
        alike = (plan.lane_rows is rows and not len(plan.chunks) for plan, _ in self._in_flight)
        return len(self._in_flight) == self._depth - 1 and all(alike)

    def _walk(self, lanes: np.ndarray, most: int, until: float) -> tuple[list[float], list[float]]:
        """Launch and wait for up to `most` turns; return when each commit was, and the seconds of each step."""
        rows, pool, clock = self._scheduler.rows, self._scheduler.pool, self._clock
        launched, count = rows.launched[lanes], len(lanes)
        positions = int(launched.sum())
        left = rows.event_at[lanes] - launched
        edge = int(left.min())
        commits: list[float] = []
        steps: list[float] = []
        while len(steps) < most and clock.now < until:
            if edge == len(steps):
                due = lanes[left == edge]
                if len(due) > pool.available:
                    break
                rows.add_blocks(due, pool.take(len(due)))
                left = rows.event_at[lanes] - launched
                edge = int(left.min())
            positions += count
            steps.append(self._step_time.seconds(decode_work(count, positions)))
            clock.launch(steps[-1])
            clock.wait()
            commits.append(clock.now)
        return commits, steps

    def _settle(self, lanes: np.ndarray, commits: list[float], steps: list[float]) -> None:
        """Bring everything to where the turns would have left it."""
        scheduler, rows, batch, turns = self._scheduler, self._scheduler.rows, self._scheduler.batch, len(steps)
        places = (rows.confirmed[lanes] + 1)[:, None] + np.arange(turns)
        rows.tokens[lanes[:, None], places] = OUTPUT_TOKEN
        rows.launched[lanes] += turns
        rows.confirmed[lanes] += turns
        batch.launched_step += turns
        batch.committed_step += turns
        self._times.tokens(lanes, commits[0])
        for before, now in pairwise(commits):
            self._measures.gap(now - before, len(lanes))
        self._times.committed(lanes, commits[-1])
        seconds = [flight.seconds for flight in self._in_flight] + steps
        for one in seconds[:turns]:
            scheduler.observe(len(lanes), 0, one)
        flights = [
            Flight(replace(plan, step=plan.step + turns), one)
            for (plan, _), one in zip(self._in_flight, seconds[turns:], strict=True)
        ]
        self._in_flight.clear()
        self._in_flight.extend(flights)
