"""The planner: makes each step out of what is known when it is launched."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from ..cache_groups import CacheGroups
from ..logprob_record import MAX_SCORES
from ..plan import NO_COPIES, NO_LEDGER, Feature, Plan, max_shared_blocks
from ..request import Sample, SampleState
from .admission import Admission
from .batch import Batch
from .draft import Draft
from .forks import Forks
from .ledgers import ledger_words
from .queue import Queue
from .step_costs import StepCosts

LAST = (math.inf, 0)
"""Behind every rank and order."""


def as_index(rows: Collection[int]) -> np.ndarray:
    """Row numbers as an array, intp [K]."""
    return np.fromiter(rows, np.intp, len(rows))


class Planner:
    """Fills a step: decoding rows first, then the prompts that have begun, then samples from the queue.

    It gives out blocks, and takes them from those of the last ranks where the others would stand still.

    Args:
        batch: the samples that have rows.
        waiting: those that have none, in the order in which they get one.
        forks: which of them begin with the prompt of another.
        groups: of the cache.
        max_step_tokens: see `Scheduler`.
        max_model_len: most tokens of a sample.
        takes_rows: see `Policy`.
        costs: see `Scheduler`.
        max_ledger_words: most words of the ledgers that open in one plan.

    Attributes:
        preemptions: since the start.
    """

    def __init__(
        self,
        batch: Batch,
        waiting: Queue,
        forks: Forks,
        *,
        groups: CacheGroups,
        max_step_tokens: int,
        max_model_len: int,
        takes_rows: bool,
        costs: StepCosts | None,
        max_ledger_words: int,
    ) -> None:
        self.batch = batch
        self.rows, self.pool, self.lanes = batch.rows, batch.pool, batch.lanes
        self.tier = batch.pool.tier
        self.waiting = waiting
        self.forks = forks
        self.takes_rows = takes_rows
        self.costs = costs
        self.max_step_tokens = max_step_tokens
        self.max_chunk_tokens = groups.max_chunk_tokens
        shared = max_shared_blocks(max_step_tokens, max_model_len, groups.block_size)
        self._admission = Admission(
            batch,
            forks,
            groups,
            max_shared_blocks=len(groups.windows) * shared,
            max_ledger_words=max_ledger_words,
        )
        self.preemptions = 0

    def plan(self) -> Plan | None:
        """The next step, which counts as launched from now on; None if nothing can run before a commit."""
        draft = Draft()
        if self.tier is not None:
            self.tier.begin(self.batch.launched_step + 1)
        self.batch.held.pause()
        if self.takes_rows and self.waiting:
            self._make_room()  # before anything is drafted for those whom it may preempt
        self._settle_lanes(draft)
        self._fill_prompts(draft)
        if self.tier is not None and not self.lanes.count and not draft.prompt_tokens:
            self._await_arrival(draft)
        if not self.lanes.count and not draft.prompt_tokens:
            return None
        self.rows.launched[self.lanes.index] += 1
        self.batch.launched_step += 1
        held = self.batch.held.positions(self.lanes.index, draft)
        features = self.rows.features.union | Feature.HELD if len(held) else self.rows.features.union
        transfer = NO_COPIES, NO_COPIES
        if self.tier is not None:
            self.pool.save_ahead()
            transfer = self.tier.pop_transfer()
        step, deltas = self.batch.launched_step, self.lanes.pop_deltas()
        plan = draft.plan(step, self.lanes.plan_rows, deltas, features, held, transfer)
        self.batch.held.launched(plan)
        return plan

    def _make_room(self) -> None:
        """Preempt samples that the queue's head outranks, the last first, if it does not fit but for them.

        What will come back anyhow is waited for.
        """
        rows, batch, sample = self.rows, self.batch, self.waiting.head
        if sample is None or sample in batch.row_of or rows.rank[rows.order >= 0].max(initial=-np.inf) <= sample.rank:
            return
        seats = (
            self.forks.rows_for(sample) + len(batch.draining) + len(batch.releases) + int(np.count_nonzero(rows.ending))
        )
        missing = self._admission.fit(sample).needed - self.pool.available - self._coming_blocks()
        ledgers = rows.coming_ledgers() if ledger_words(sample) else 1
        victims = []
        for row in reversed(self._going_on()):
            if (seats > 0 and missing <= 0 and ledgers > 0) or rows.rank[row] <= sample.rank:
                break
            victims.append(row)
            seats += 1
            ledgers += rows.ledger[row] != NO_LEDGER
            missing -= self.pool.count_unshared(rows.own_blocks(row)) + int(rows.reserved[row])
        if seats > 0 and missing <= 0 and ledgers > 0:
            for row in victims:
                self._preempt(row)

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
            ready = as_index(self.batch.ready)
            due = np.concatenate([due, ready[rows.launched[ready] == rows.event_at[ready]]])
        if len(due):
            self._claim_blocks(due, draft)
        if self.batch.ready:
            self._join_ready()

    def _claim_blocks(self, claims: np.ndarray, draft: Draft) -> None:
        """Give a block of each group to each row of `claims`, or to the best ranks; the others sit out."""
        if (blocks := self._roll(claims)) is None:
            self._slide_claims(claims)
            groups = self.rows.num_groups
            if groups * len(claims) > self.pool.available:
                claims = self._ration(claims)
            blocks = self.pool.take(groups * len(claims))
        if len(claims):
            self._order(blocks, draft)
            draft.add_blocks(self.rows.add_blocks(claims, blocks))

    def _roll(self, claims: np.ndarray) -> np.ndarray | None:
        """The blocks for `claims` if each row needs none but for full groups: where there is a window, one slides out.

        That is the steady state of rows longer than the windows; None for all others, and where blocks are too few.
        """
        needed = self.rows.num_full_groups * len(claims)
        if not len(self.rows.sliding) or needed > self.pool.available or (out := self.rows.roll(claims)) is None:
            return None
        return np.concatenate([self.pool.take(needed), out])

    def _slide_claims(self, claims: np.ndarray) -> None:
        """Give back what `claims` do not look into from the edge on at which they stand."""
        rows = self.rows
        if len(rows.sliding):
            # NOTE: what a prompt slides off before it is published, nobody can find any more.
            published = claims[rows.confirmed[claims] >= rows.target[claims]]
            self.batch.slide(published, rows.launched[published])

    def _order(self, blocks: np.ndarray, draft: Draft) -> None:
        """Let the step, which writes to `blocks`, int32 [n], run after the transfers that use them."""
        if self.tier is not None:
            draft.hold_back(self.tier.newest(blocks))

    def _ration(self, claims: np.ndarray) -> np.ndarray:
        """The rows of `claims` that get a block although there are too few, best rank first.

        What samples that ended, or that wait for their last token, will give back, at most, is worth waiting for.
        Beyond that the running samples of the last ranks are preempted until the rest can be served.
        """
        self.batch.slide(claims, self.rows.launched[claims])
        claims, groups = self.rows.ranked(claims), self.rows.num_groups
        coming = self._coming_blocks()
        candidates = self._going_on()
        while groups * len(claims) > self.pool.available + coming:
            victim = candidates.pop()
            self._preempt(victim)
            claims = claims[claims != victim]
        served = min(len(claims), self.pool.available // groups)
        for row in claims[served:].tolist():
            self.lanes.leave(row)
            self.batch.ready[row] = None
        return claims[:served]

    def _coming_blocks(self) -> int:
        """Blocks that samples which have launched their last step, or ended, will give back, at most."""
        return self.batch.releases.blocks + self.rows.count_blocks(self.rows.ending)

    def _going_on(self) -> list[int]:
        """The running rows with positions left to launch, best rank first."""
        rows = self.rows
        return rows.ranked(np.flatnonzero((rows.order >= 0) & (rows.launched < rows.limit))).tolist()

    def _join_ready(self) -> None:
        """Ready rows that have a place for their next position take lanes, best rank first."""
        rows = self.rows
        for row in rows.ranked(as_index(self.batch.ready)).tolist():
            if rows.launched[row] < rows.event_at[row]:
                del self.batch.ready[row]
                self.lanes.join(row)

    def _fill_prompts(self, draft: Draft) -> None:
        """Give what the step has room for to prompts, best rank first: those that have begun, and those that wait."""
        rows, prefilling = self.rows, self.batch.prefilling
        if prefilling:
            for row in rows.ranked(as_index(prefilling)).tolist():
                self._admit(draft, before=(rows.rank[row], rows.order[row]))
                if self._budget(draft) <= 0:
                    return
                # NOTE: it may have been preempted for who was just admitted.
                if row in prefilling and self._room(rows.samples[row], draft) and self._has_arrived(row):
                    self._launch_chunk(row, draft)
        self._admit(draft)

    def _has_arrived(self, row: int) -> bool:
        """Whether all that `row` found is on the device."""
        return self.tier is None or self.tier.is_done(int(self.rows.arrival[row]))

    def _await_arrival(self, draft: Draft) -> None:
        """Nothing else is left to run: launch the first of the rows whose blocks are on their way; the device waits."""
        for row in self.rows.ranked(as_index(self.batch.prefilling))[:1].tolist():
            self._launch_chunk(row, draft)

    def _admit(self, draft: Draft, before: tuple[float, int] = LAST) -> None:
        """Admit samples from the head of the queue, as far as they fit and go before `before`, a rank and an order."""
        while self.rows.free and self.waiting and self._budget(draft) > 0:
            sample = self.waiting.head
            assert sample is not None
            if (sample.rank, sample.order) > before or sample in self.batch.row_of:
                return
            if not self._place(sample, draft):
                return

    def _place(self, sample: Sample, draft: Draft) -> bool:
        """Give `sample` a row, and the promise of blocks for all its tokens; False if it does not fit."""
        if not self._room(sample, draft) or (fit := self._admission.fitting(sample, draft)) is None:
            return False
        self.waiting.pop()
        row = self._admission.join(sample, fit, draft)
        if self._has_arrived(row):
            self._launch_chunk(row, draft)
        for group, source in enumerate(fit.start.copied):
            draft.add_copy(source, int(self.rows.blocks[group, row, fit.start.positions // self.rows.block_size]))
        return True

    def _launch_chunk(self, row: int, draft: Draft) -> None:
        """Launch as many of the row's known tokens as the step and the chunk limit have room for."""
        rows = self.rows
        start, target = int(rows.launched[row]), int(rows.target[row])
        sample = rows.samples[row]
        if row in self.batch.held.jumped:
            del self.batch.held.jumped[row]
            draft.add_row(row, sample, target, start)
        room = max(start, sample.scored) - start + self._room(sample, draft)
        end = min(start + min(self._budget(draft), self.max_chunk_tokens, room), target)
        if len(rows.sliding):
            self._slide(row)
        missing = rows.num_groups * (rows.blocks_of(end) - int(rows.held[row]))
        if missing:
            rows.reserved[row] -= missing
            blocks = self.pool.take_reserved(missing)
            self._order(blocks, draft)
            draft.add_blocks(rows.extend_blocks(row, blocks))
        if not self._has_arrived(row):
            draft.hold_back(int(rows.arrival[row]))
        self._score(sample, row, start, end, draft)
        draft.add_chunk(row, start, rows.tokens[row, start:end], samples=end == target)
        rows.launched[row] = end
        if end == target:
            del self.batch.prefilling[row]
            if target < rows.limit[row]:
                self.batch.ready[row] = None

    def _slide(self, row: int) -> None:
        """Give back what the chunks to come do not look into, and promise as much as they need."""
        rows = self.rows
        self.batch.slide(np.array([row]), rows.launched[[row]])
        needed = rows.missing(row, rows.blocks_of(int(rows.target[row])))
        self.pool.unreserve(int(rows.reserved[row]))
        self.pool.reserve(needed)
        rows.reserved[row] = needed

    def _score(self, sample: Sample, row: int, start: int, end: int, draft: Draft) -> None:
        """Score the positions of a chunk that are not yet, but for the last of the prompt: no token is next there."""
        first, last = max(start, sample.scored), min(end, sample.prompt_len - 1)
        if first < last:
            draft.add_scores(row, first - start, self.rows.tokens[row, first + 1 : last + 1])
            sample.scored = last

    def _room(self, sample: Sample, draft: Draft) -> int:
        """Positions of `sample` that the step can score; without limit if there are none to score."""
        unscored = sample.scored < sample.prompt_len - 1
        return MAX_SCORES - draft.num_scores if unscored else self.max_step_tokens

    def _budget(self, draft: Draft) -> int:
        """Tokens that the step has left for prompts."""
        budget = self.max_step_tokens - self.lanes.count
        if self.costs is not None and self.lanes.count:
            budget = min(budget, self.costs.prompt_tokens)
        return budget - draft.prompt_tokens

    def preempt_all(self) -> None:
        """Send everybody back to the queue who has positions left to launch."""
        for row in self._going_on():
            self._preempt(row)

    def _preempt(self, row: int) -> None:
        """Send the row's sample back to the queue; it keeps the row until its tokens in flight are there."""
        sample = self.batch.preempt(row)
        sample.state = SampleState.WAITING
        sample.preemptions += 1
        self.preemptions += 1
        self.waiting.push(sample)
        self.batch.drain()
