"""The planner: makes each step out of what is known when it is launched."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np

from ..plan import Plan, max_shared_blocks
from ..request import Sample, SampleState
from .batch import Batch
from .draft import Draft
from .forks import Forks, put_back
from .prefixes import Start


class Planner:
    """Fills a step: decoding rows first, then the prompts that have begun, then samples from the queue.

    It gives out blocks, and takes them from the youngest where the others would stand still.

    Args:
        batch: the samples that have rows.
        waiting: those that have none, in the order in which they get one.
        forks: which of them begin with the prompt of another.
        max_step_tokens, max_chunk_tokens: see `Scheduler`.
        max_model_len: most tokens of a sample.

    Attributes:
        preemptions: since the start.
    """

    def __init__(
        self,
        batch: Batch,
        waiting: OrderedDict[Sample, None],
        forks: Forks,
        *,
        max_step_tokens: int,
        max_chunk_tokens: int | None,
        max_model_len: int,
    ) -> None:
        self.batch = batch
        self.rows, self.pool, self.lanes = batch.rows, batch.pool, batch.lanes
        self.waiting = waiting
        self.forks = forks
        self.max_step_tokens = max_step_tokens
        self.max_chunk_tokens = max_step_tokens if max_chunk_tokens is None else max_chunk_tokens
        self.max_shared_blocks = max_shared_blocks(max_step_tokens, max_model_len, batch.rows.block_size)
        self.preemptions = 0

    def plan(self) -> Plan | None:
        """The next step, which counts as launched from now on; None if nothing can run before a commit."""
        draft = Draft()
        self._settle_lanes(draft)
        self._continue_prefills(draft)
        self._admit(draft)
        if not self.lanes.count and not draft.prompt_tokens:
            return None
        self.rows.launched[self.lanes.index] += 1
        self.batch.launched_step += 1
        features = self.rows.features.union
        return draft.plan(self.batch.launched_step, self.lanes.plan_rows, self.lanes.pop_deltas(), features)

    def _settle_lanes(self, draft: Draft) -> None:
        """Rows at their limit leave their lanes, rows at a block's edge get a block or sit out, ready rows join."""
        rows, index = self.rows, self.lanes.index
        due = index[rows.launched[index] == rows.event_at[index]]
        if not len(due) and not self.batch.ready:
            return
        ended = rows.launched[due] == rows.limit[due]
        if np.count_nonzero(ended):
            for row in due[ended].tolist():
                self.lanes.leave(row)
            due = due[~ended]
        if self.batch.ready:
            ready = np.fromiter(self.batch.ready, np.intp, len(self.batch.ready))
            due = np.concatenate([due, ready[rows.launched[ready] == rows.event_at[ready]]])
        self._claim_blocks(due, draft)
        self._join_ready()

    def _claim_blocks(self, claims: np.ndarray, draft: Draft) -> None:
        """Give a block to each row of `claims`, or, if there are too few, to the oldest; the others sit out."""
        if len(claims) > self.pool.available:
            claims = self._ration(claims)
        if len(claims):
            draft.add_blocks(self.rows.add_blocks(claims, self.pool.take(len(claims))))

    def _ration(self, claims: np.ndarray) -> np.ndarray:
        """The rows of `claims` that get a block although there are too few, oldest first.

        What samples that ended, or that wait for their last token, will give back, at most, is worth waiting for.
        Beyond that the youngest running samples are preempted until the rest can be served.
        """
        claims = claims[np.argsort(self.rows.order[claims])]
        ending = (self.rows.launched == self.rows.limit) & (self.rows.order >= 0)
        coming = self.batch.releases.blocks + int(self.rows.held[ending].sum())
        while len(claims) > self.pool.available + coming:
            victim = int(np.where(ending, -1, self.rows.order).argmax())
            self._preempt(victim)
            claims = claims[claims != victim]
        served = min(len(claims), self.pool.available)
        for row in claims[served:].tolist():
            self.lanes.leave(row)
            self.batch.ready[row] = None
        return claims[:served]

    def _join_ready(self) -> None:
        """Ready rows that have a place for their next position take lanes, oldest first."""
        rows = self.rows
        for row in sorted(self.batch.ready, key=lambda row: rows.order[row]):
            if rows.launched[row] < rows.event_at[row]:
                del self.batch.ready[row]
                self.lanes.join(row)

    def _continue_prefills(self, draft: Draft) -> None:
        if not self.batch.prefilling:
            return
        for row in list(self.batch.prefilling):
            if not self._budget(draft):
                return
            self._launch_chunk(row, draft)

    def _admit(self, draft: Draft) -> None:
        """Give rows, and the promise of blocks for all their tokens, to the samples at the head of the queue."""
        while self.waiting and self.rows.free and self._budget(draft):
            sample = next(iter(self.waiting))
            # NOTE: without headroom a preempted sample would be admitted and preempted again at the next block's edge.
            available = self.pool.available - (self.rows.running if sample.preemptions else 0)
            if sample in self.batch.row_of or available < 1 or not self.forks.has_row(sample):
                return
            start = self.forks.start(sample) or self.batch.prefixes.find(sample)
            own = self.rows.blocks_of(len(sample.tokens)) - len(start.blocks)
            idle = self.pool.cache.count_idle(start.chain) if start.source is None else 0
            if available < own + idle or draft.shared_blocks + len(start.blocks) > self.max_shared_blocks:
                return
            del self.waiting[sample]
            row = self._join(sample, start, own, draft)
            self.pool.reserve(own)
            self._launch_chunk(row, draft)
            if start.copied is not None:
                draft.add_copy(start.copied, int(self.rows.blocks[0, row, len(start.blocks)]))

    def _join(self, sample: Sample, start: Start, own: int, draft: Draft) -> int:
        """Give `sample` a row that begins at `start`, and is promised `own` blocks more."""
        row = self.batch.join(sample, len(start.blocks) + own)
        self.batch.prefixes.begin(row, sample, start)
        draft.add_join(row, sample, start.positions)
        if start.blocks:
            shared = self._share(start)
            draft.add_shared_blocks(self.rows.extend_blocks(row, shared), shared.shape[1])
        if sample.timings.admitted is None:
            sample.timings.admitted = time.perf_counter()
        self.forks.admitted(sample)
        return row

    def _share(self, start: Start) -> np.ndarray:
        if start.source is None:
            return self.pool.share(start.chain, start.blocks)
        return self.pool.share_used(start.blocks)

    def _launch_chunk(self, row: int, draft: Draft) -> None:
        """Launch as many of the row's known tokens as the step and the chunk limit have room for."""
        rows = self.rows
        start, target = int(rows.launched[row]), int(rows.target[row])
        end = min(start + self._budget(draft), start + self.max_chunk_tokens, target)
        missing = self.rows.blocks_of(end) - int(rows.held[row])
        if missing:
            draft.add_blocks(rows.extend_blocks(row, self.pool.take_reserved(missing)))
        draft.add_chunk(row, start, rows.tokens[row, start:end], samples=end == target)
        rows.launched[row] = end
        if end == target:
            del self.batch.prefilling[row]
            if target < rows.limit[row]:
                self.batch.ready[row] = None

    def _budget(self, draft: Draft) -> int:
        """Tokens that the step has left for prompts."""
        return self.max_step_tokens - self.lanes.count - draft.prompt_tokens

    def _preempt(self, row: int) -> None:
        """Send the row's sample back to the queue; it keeps the row until its tokens in flight are there."""
        sample = self.batch.preempt(row)
        sample.state = SampleState.WAITING
        sample.preemptions += 1
        self.preemptions += 1
        put_back(self.waiting, sample)
        self.batch.drain()
