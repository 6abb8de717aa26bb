"""The audit: the scheduler's invariants, checked after every plan and commit in debug mode."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ..plan import DUMMY_BLOCK, NO_LEDGER, Plan
from ..request import SampleState

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Audit:
    """Keeps the plans in flight, and holds the scheduler's books against them. Raises AssertionError."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: deque[Plan] = deque()
        self._most_in_flight = 0

    def planned(self, plan: Plan) -> None:
        self._in_flight.append(plan)
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight))
        assert plan.num_tokens <= self._scheduler.max_step_tokens, "step over budget"
        assert plan.after <= plan.step, "a step waits for copies that are not queued"
        assert len(np.unique(plan.lane_deltas[:, 0])) == len(plan.lane_deltas), "two deltas for one lane"
        self._check()

    def committed(self, plan: Plan) -> None:
        assert self._in_flight.popleft() is plan, "committed out of order"
        self._check()
        rows = self._scheduler.rows
        assert not (rows.alive & (rows.confirmed >= rows.limit)).any(), "a sample outlived its limit"

    def _check(self) -> None:
        self._check_blocks()
        self._check_host()
        self._check_rows()
        self._check_lanes()
        self._check_counters()

    def _check_blocks(self) -> None:
        """Every block but the dummy is free, or in use by as many as have it in their tables; promises add up."""
        scheduler = self._scheduler
        rows, pool = scheduler.rows, scheduler.pool
        pending = [run.blocks for release in scheduler.batch.releases.pending() for run in release.runs]
        in_use = np.concatenate([*(rows.own_blocks(row) for row in range(len(rows.held))), *pending])
        users = np.bincount(in_use, minlength=pool.total + 1)
        assert (pool.sharers == np.maximum(users - 1, 0)).all(), "those who share a block do not add up"
        blocks = np.sort(np.concatenate([pool.free_blocks(), np.flatnonzero(users)]))
        assert np.array_equal(blocks, np.arange(DUMMY_BLOCK + 1, pool.total + 1)), "a block is lost, or free and in use"
        assert sum(map(len, pending)) == scheduler.batch.releases.blocks
        assert pool.reserved == rows.reserved.sum(), "reservations do not add up"
        assert 0 <= pool.reserved <= pool.free, "more promised than free"
        self._check_cache(users)
        self._check_windows()

    def _check_windows(self) -> None:
        """A row has all that its next position looks into, and no more than it may."""
        scheduler, rows = self._scheduler, self._scheduler.rows
        running = rows.order >= 0
        for group, (reach, span) in enumerate(zip(scheduler.groups.reaches(), scheduler.groups.spans(), strict=True)):
            first = np.maximum(rows.launched // rows.block_size - reach, 0) if reach is not None else 0
            assert (rows.first[group] <= first)[running].all(), "a block slid out too early"
            # NOTE: a row that decodes before its prompt is published gets a block at each edge, if there are enough,
            # and gives back what it does not look into at the edge after that.
            extra = 1 + self._most_in_flight // rows.block_size
            assert (rows.held - rows.first[group] - extra <= span)[running].all(), "more than a window and a chunk"

    def _check_host(self) -> None:
        """Every host slot is free, or holds one block."""
        if (tier := self._scheduler.pool.tier) is not None:
            used, free = tier.slots.all()
            assert sorted([*used, *free]) == list(range(tier.num_slots)), "a host slot is lost, or used twice"

    def _check_cache(self, users: np.ndarray) -> None:
        """A known block is known for one content, and idle if nobody uses it."""
        scheduler = self._scheduler
        known, idle = scheduler.pool.cache.known_blocks(), scheduler.pool.cache.idle_blocks()
        assert len(set(known)) == len(known), "a block is known for two contents"
        assert {block for block in known if not users[block]} == set(idle), "a known block is neither idle nor in use"

    def _check_rows(self) -> None:
        """Every row is free, running, draining or dead; waiting samples are younger than who goes on at their rank."""
        scheduler, rows = self._scheduler, self._scheduler.rows
        running = np.flatnonzero(rows.order >= 0).tolist()
        pending = [release.row for release in scheduler.batch.releases.pending()]
        every = sorted([*rows.free, *running, *scheduler.batch.draining, *pending])
        assert every == list(range(len(rows.held))), "a row is lost or counted twice"
        assert rows.running == len(running)
        assert sorted(scheduler.batch.row_of.values()) == sorted([*running, *scheduler.batch.draining])
        assert 0 <= scheduler.forks.promised <= len(rows.free), "more rows promised than free"
        held = rows.ledger[rows.ledger != NO_LEDGER].tolist()
        assert sorted([*rows.free_ledgers, *held]) == list(range(scheduler.num_ledgers)), "a ledger is lost"
        assert not (rows.ledger[rows.free] != NO_LEDGER).any(), "a free row has a ledger"
        waiting = list(scheduler.waiting)
        assert len(waiting) == len(scheduler.waiting), "the queue's count is off"
        assert all(sample.state is SampleState.WAITING for sample in waiting), "a sample waits and does not"
        assert not waiting or waiting[0] is scheduler.waiting.head, "the queue is out of order"
        # Forks could not come earlier: the prompt was not there. Who was at its last position is not preempted for
        # others, and still runs if a mask was late for that.
        heads = [sample for sample in waiting if not sample.index or sample.timings.admitted]
        if heads:
            going_on = np.maximum(rows.target, rows.launched + 1) < rows.limit
            equals = going_on & (rows.rank == heads[0].rank)
            assert rows.order[equals].max(initial=-1) < heads[0].order, "a younger sample overtook the queue's head"

    def _check_lanes(self) -> None:
        """Lanes are dense, agree with lane_of_row, and hold the running rows that are neither ready nor prefilling."""
        scheduler = self._scheduler
        rows, lanes = scheduler.rows, scheduler.batch.lanes
        index = lanes.index
        assert (lanes.lane_of_row[index] == np.arange(lanes.count)).all(), "lane_of_row disagrees"
        assert (lanes.lane_of_row >= 0).sum() == lanes.count
        held = scheduler.batch.held
        late = [scheduler.batch.row_of[sample] for sample in held.late]
        at_limit = np.flatnonzero((rows.order >= 0) & (rows.launched == rows.limit)).tolist()
        running = set(np.flatnonzero(rows.order >= 0).tolist())
        away = [*scheduler.batch.ready, *scheduler.batch.prefilling, *held.paused, *(set(late) & running)]
        assert not set(away) & set(index.tolist())
        assert running - set(at_limit) == {*away, *index.tolist()} - set(at_limit), "a running row is nowhere"

    def _check_counters(self) -> None:
        """launched - confirmed = the row's positions in flight; positions stay within the limit and the blocks."""
        rows = self._scheduler.rows
        in_flight = np.zeros(len(rows.held), np.int64)
        for plan in self._in_flight:
            in_flight[plan.lane_rows] += 1
            in_flight[plan.chunks[:, 0]] += plan.chunks[:, 2]
        assert (rows.launched - rows.confirmed == in_flight).all(), "launched - confirmed is not what is in flight"
        assert (rows.launched <= rows.limit).all(), "a step too many"
        running = rows.order >= 0
        assert (rows.launched <= rows.held * rows.block_size)[running].all(), "a position without a block"
