"""Admission: what a waiting sample needs to get a row, and how it begins there."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from ..cache.block_pool import BlockRun
from ..cache_groups import CacheGroups
from ..plan import DUMMY_BLOCK
from ..request import Sample
from .batch import Batch
from .draft import Draft
from .forks import Forks
from .ledgers import ledger_words
from .prefixes import Start


class Fit(NamedTuple):
    """What a waiting sample would take: its start, at most how many blocks of its own, and free ones needed."""

    start: Start
    own: int
    needed: int


class Admission:
    """Finds where a sample may begin, and lets it begin there.

    Args:
        batch: the samples that have rows.
        forks: which of those that wait begin with the prompt of another.
        groups: of the cache.
        max_shared_blocks: most blocks that rows may begin with in one plan, in all groups.
        max_ledger_words: most words of the ledgers that open in one plan.
    """

    def __init__(
        self, batch: Batch, forks: Forks, groups: CacheGroups, *, max_shared_blocks: int, max_ledger_words: int
    ) -> None:
        self._batch = batch
        self._rows, self._pool, self._tier = batch.rows, batch.pool, batch.pool.tier
        self._forks = forks
        self._spans = groups.spans()
        self._max_shared_blocks = max_shared_blocks
        self._max_ledger_words = max_ledger_words

    def fitting(self, sample: Sample, draft: Draft) -> Fit | None:
        """What `sample` takes, if there is all of it, and room in the plan; else None."""
        if self._pool.available < 1 or self._forks.rows_for(sample) < 1 or not self._has_ledger(sample, draft):
            return None
        fit = self.fit(sample)
        if self._pool.available < fit.needed:
            return None
        return fit if draft.shared_blocks + fit.start.num_blocks <= self._max_shared_blocks else None

    def fit(self, sample: Sample) -> Fit:
        """What a waiting sample would take.

        NOTE: without headroom, a block for each running row, a preempted sample would be admitted and preempted again
        at the next block's edge.
        """
        headroom = self._rows.num_groups * self._rows.running if sample.preemptions else 0
        if (start := self._forks.start(sample)) is not None:
            own = self._own(sample, start)
            return Fit(start, own, own + headroom)
        start = self._batch.prefixes.find(sample)
        own, taken = self._own(sample, start), start.num_returning
        taken += sum(self._pool.cache.count_idle(run.keys) for run in start.runs)
        if own + taken > self._pool.total:  # what it shares and its chunks fit one by one, but not together
            start, taken = self._batch.prefixes.nothing(), 0
            own = self._own(sample, start)
        return Fit(start, own, own + taken + headroom)

    def join(self, sample: Sample, fit: Fit, draft: Draft) -> int:
        """Give `sample` a row that begins at its start, and is promised the blocks of its own; return the row."""
        start, row = fit.start, self._batch.join(sample, fit.own)
        if self._tier is not None:
            self._tier.slots.let_go(sample)
        self._batch.prefixes.begin(row, sample, start)
        draft.add_join(row, sample, start.positions, int(self._rows.ledger[row]))
        self._share(row, start, draft)
        if sample.timings.admitted is None:
            sample.timings.admitted = time.perf_counter()
            self._batch.count_begun(sample)
        self._forks.admitted(sample)
        self._pool.reserve(fit.own)
        return row

    def _own(self, sample: Sample, start: Start) -> int:
        """The most blocks that the row of `sample` has at once beside those that it shares, until it decodes."""
        blocks = self._rows.blocks_of(len(sample.tokens)) - start.positions // self._rows.block_size
        return sum(min(blocks, span) for span in self._spans)

    def _has_ledger(self, sample: Sample, draft: Draft) -> bool:
        """Whether there is a ledger for `sample`, and room in the plan to open it; also if it needs none."""
        words = ledger_words(sample)
        return not words or (bool(self._rows.free_ledgers) and draft.ledger_words + words <= self._max_ledger_words)

    def _share(self, row: int, start: Start, draft: Draft) -> None:
        """Let `row` have the blocks that it begins with, and note when all of them are there."""
        count = start.positions // self._rows.block_size
        if not count:
            return
        for run in start.runs:
            if start.source is None:
                self._pool.share(run)
            else:
                self._pool.share_used(run.blocks)
        self._bring_back(start.runs)
        draft.add_shared_blocks(self._rows.share_blocks(row, count, start.runs))
        if self._tier is not None:
            self._rows.arrival[row] = self._tier.arrival(self._rows.own_blocks(row))

    def _bring_back(self, runs: list[BlockRun]) -> None:
        """Load what a row found on the host into blocks of its own."""
        if self._tier is None:
            return
        places = [(run, place) for run in runs for place in np.flatnonzero(run.blocks == DUMMY_BLOCK).tolist()]
        if not places:
            return
        keys = [run.keys[place] for run, place in places]
        self._tier.fix(keys)
        blocks = self._pool.take(len(keys))
        for (run, place), block in zip(places, blocks, strict=True):
            run.blocks[place] = block
        self._tier.load(keys, blocks)
        self._pool.cache.publish(keys, blocks.tolist())
