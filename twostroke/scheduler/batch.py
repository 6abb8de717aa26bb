"""The batch: the samples that have rows, and where each of them stands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..cache.block_pool import BlockPool, BlockRun
from ..cache.prefix_cache import keys_of
from ..request import Sample
from .held import Constraints, HeldRows
from .lanes import Lanes
from .prefixes import Prefixes
from .releases import Release, Releases
from .rows import RowTable


class Batch:
    """Which samples have a row, what each row is about to do, and how a row is left.

    A running row is in exactly one of `prefilling`, `ready` and the lanes, or has launched all its positions and is in
    none of them. A row whose sample was preempted is in `draining` until its steps in flight are committed.

    Attributes:
        prefilling: rows whose known tokens are not all launched, oldest first.
        ready: rows that decode next, or wait for a block to do so.
        held: those among the rows whose tokens the CPU must know before the next one is sampled.
        draining: rows of preempted samples that steps in flight still bring tokens.
        row_of: the row of each sample that has one.
        streaming: samples whose tokens are handed over as they come.
        launched_step, committed_step: newest step of each kind; -1 before the first.
        begun: samples that have begun to run, or ended before, since the start. on_begun: called with each of them.
    """

    def __init__(
        self,
        rows: RowTable,
        pool: BlockPool,
        lanes: Lanes,
        prefixes: Prefixes,
        constraints: Constraints | None = None,
    ) -> None:
        self.rows = rows
        self.pool = pool
        self.lanes = lanes
        self.prefixes = prefixes
        self.releases = Releases()
        # Dictionaries without values are sets that remember the order in which their rows came.
        self.prefilling: dict[int, None] = {}
        self.ready: dict[int, None] = {}
        self.draining: dict[int, None] = {}
        self.row_of: dict[Sample, int] = {}
        self.streaming: set[Sample] = set()
        self.launched_step = self.committed_step = -1
        self.begun = 0
        self.on_begun: Callable[[Sample], None] = lambda sample: None
        self.held = HeldRows(self, constraints)

    def known_tokens(self, sample: Sample) -> np.ndarray:
        """Prompt and confirmed output tokens of a sample with or without a row, int32, read-only."""
        row = self.row_of.get(sample)
        return sample.tokens if row is None else self.rows.known_tokens(row)

    def join(self, sample: Sample, blocks: int) -> int:
        """Give `sample` a row, which has so many `blocks` to come; return its number."""
        row = self.rows.admit(sample, blocks, sample in self.streaming)
        self.row_of[sample] = row
        self.prefilling[row] = None
        self.held.join(row, sample)
        return row

    def preempt(self, row: int) -> Sample:
        """Take the row from its sample, which keeps it only until its tokens in flight are there; return the sample."""
        sample: Sample = self.rows.samples[row]
        # Steps that are queued still use these blocks, but on the compute stream, before whoever gets them next.
        for run in self._withdraw(row):
            self.pool.give(*run)
        if self.pool.tier is not None:
            self.pool.tier.slots.keep(sample, sample.chain)
        self.rows.suspend(row)
        self.draining[row] = None
        return sample

    def drain(self) -> None:
        """Preempted samples whose steps in flight are all committed take their tokens along and leave their rows."""
        rows = self.rows
        for row in [r for r in self.draining if rows.launched[r] == rows.confirmed[r]]:
            sample = rows.samples[row]
            sample.tokens = rows.known_tokens(row)
            del self.draining[row], self.row_of[sample]
            rows.end(row)
            rows.free_row(row)

    def count_begun(self, sample: Sample) -> None:
        """The sample waits no longer to begin."""
        self.begun += 1
        self.on_begun(sample)

    def leave(self, sample: Sample, bad: int) -> None:
        """The sample has ended: what it had waits to be returned. `bad` as in `Prefixes.publish`."""
        self.streaming.discard(sample)
        self.held.forget(sample)
        if self.pool.tier is not None:
            self.pool.tier.slots.let_go(sample)
        if (row := self.row_of.pop(sample, None)) is None:
            return
        runs = self._withdraw(row, bad)
        self.draining.pop(row, None)
        self.rows.end(row)
        self.releases.push(Release(self.launched_step, row, runs))

    def return_releases(self) -> None:
        """Return what no step in flight uses any more."""
        runs: list[BlockRun] = []
        while (release := self.releases.pop(self.committed_step)) is not None:
            runs += release.runs
            self.rows.free_row(release.row)
        if runs:
            self.pool.give_runs(runs)

    def slide(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Give back the blocks of `rows`, intp [K], that nothing from `positions`, int64 [K], on looks into.

        Steps that are queued still read them, but on the compute stream, before whoever gets them next.
        """
        table = self.rows
        tables, index = table.slide(rows, positions)
        if not len(tables):
            return
        blocks = table.blocks_at(tables, index)
        groups, owners = np.divmod(tables, len(table.held))
        # A block that several rows slide off stands here several times, and each of them gives it back.
        apart = (index < table.published[owners]) | (self.pool.sharers[blocks] > 0)
        if not np.count_nonzero(apart):
            self.pool.give_blank(blocks)
            return
        self.pool.give_blank(blocks[~apart])
        for place in np.flatnonzero(apart).tolist():
            row, at = owners[place], index[place]
            chain = table.samples[row].chain[at : at + 1] if at < table.published[row] else []
            self.pool.give(blocks[place : place + 1], keys_of(chain, int(groups[place])))

    def slide_prompts(self, rows: np.ndarray) -> None:
        """Give back what `rows`, intp [K], needed to prefill, and do not look into any more.

        NOTE: what is launched beyond the confirmed positions may be taken back, see `HeldRows`.
        """
        running = rows[self.rows.order[rows] >= 0]
        self.slide(running, self.rows.confirmed[running])

    def _withdraw(self, row: int, bad: int = 0) -> list[BlockRun]:
        """Take `row` out of everything that plans read; returns its blocks, of each group."""
        self.lanes.leave(row)
        self.ready.pop(row, None)
        self.prefilling.pop(row, None)
        self.held.withdraw(row)
        self.pool.unreserve(int(self.rows.reserved[row]))
        self.rows.reserved[row] = 0
        chain = self.prefixes.publish(row, bad)
        return self.rows.pop_blocks(row, chain)
