"""The scheduler: which tokens run next, and what becomes of those that ran."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np

from ..cache.block_pool import BlockPool
from ..errors import InvalidRequest
from ..plan import Flag, Plan, StepOutput, max_shared_blocks
from ..request import FinishReason, Sample, SampleState
from .audit import Audit
from .committed import NOTHING, Committed
from .draft import Draft
from .lanes import Lanes
from .prefixes import Prefixes
from .releases import Release, Releases
from .rows import NO_TOKENS, RowTable
from .stats import SchedulerStats

_TOKEN, _STOP, _ERROR = int(Flag.TOKEN), int(Flag.STOP), int(Flag.ERROR)

BAD_LOGITS = "the logits held a NaN or an infinity, or left no token to sample"


class Scheduler:
    """Makes the plan of each step, and commits its output. One thread calls it; it knows nothing of devices.

    A sample's way:

        submit --> waiting --> prefilling --> ready --> in a lane --> finished
                      ^                        ^ |         |
                      |                        | +---------+   a lane's row that must wait for a block becomes ready
                      +-- preempted (from any of the three)

    Steps overlap: while step N runs, `plan` makes step N + 1 out of what is known, which is all but the tokens.
    A sample that finishes at the commit of step N may be part of step N + 1; what it had returns to its pool when the
    newest step that was launched by then is committed (`Releases`).

    Samples are admitted strictly in the order of arrival, and of those with positions left to launch the youngest is
    preempted first; so all of these are older than every waiting sample, and the oldest always gets on. `waiting` stays
    sorted by age because new samples go to its back and preempted ones to its front.

    Args:
        max_rows: rows of the device's batch state; row `max_rows` is the dummy row.
        max_step_tokens: most tokens of a step. No more rows than this are used at a time.
        max_model_len: most tokens of a sample, prompt and output.
        block_size: positions of a block. num_blocks: blocks of each of `num_groups` cache groups, with the dummy block.
        max_chunk_tokens: most tokens of one prompt chunk; None is no limit but the step's.
        prefix_cache: rows that begin with the same tokens share blocks.
        debug: check the invariants after every plan and commit; slow.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_step_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        num_groups: int = 1,
        max_chunk_tokens: int | None = None,
        prefix_cache: bool = True,
        debug: bool = False,
    ) -> None:
        num_rows = min(max_rows, max_step_tokens)
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.max_chunk_tokens = max_step_tokens if max_chunk_tokens is None else max_chunk_tokens
        self.max_model_len = max_model_len
        self.rows = RowTable(num_rows, max_model_len, block_size, num_groups)
        self.pool = BlockPool(num_blocks, block_size, num_groups)
        self.prefixes = Prefixes(self.rows, self.pool.cache, enabled=prefix_cache)
        self.max_shared_blocks = max_shared_blocks(max_step_tokens, max_model_len, block_size)
        self.lanes = Lanes(num_rows, dummy_row=max_rows)
        self.releases = Releases()
        self.launched_step = self.committed_step = -1
        self.waiting: OrderedDict[Sample, None] = OrderedDict()
        # Dictionaries without values are sets that remember the order in which their rows came.
        self.prefilling: dict[int, None] = {}
        self.ready: dict[int, None] = {}
        self.draining: dict[int, None] = {}
        self.row_of: dict[Sample, int] = {}
        self._streaming: set[Sample] = set()
        self._arrivals = 0
        self._preemptions = 0
        self._audit = Audit(self) if debug else None

    # -- Commands ------------------------------------------------------------------------------------------------

    def submit(self, sample: Sample) -> None:
        """Queue `sample`.

        Raises:
            InvalidRequest: it could never end here, since it outgrows the row table or the cache.
        """
        length = sample.prompt_len + sample.request.max_tokens
        blocks = self.rows.blocks_of(length - 1)
        if length > self.max_model_len or blocks > self.pool.total:
            raise InvalidRequest(
                f"prompt and max_tokens={sample.request.max_tokens} make {length} tokens in {blocks} blocks; there are "
                f"max_model_len={self.max_model_len} and {self.pool.total} usable blocks"
            )
        sample.order = self._arrivals
        self._arrivals += 1
        self.waiting[sample] = None

    def cancel(self, sample: Sample) -> Committed:
        """End `sample` with the tokens confirmed so far; does nothing if it has ended already."""
        return self._end_by_command(sample, FinishReason.CANCELLED)

    def finish(self, sample: Sample, count: int) -> Committed:
        """End `sample` by a stop, with its first `count` output tokens; does nothing if it has ended already."""
        ended = self._end_by_command(sample, FinishReason.STOP)
        if ended.finished:
            sample.tokens = sample.tokens[: sample.prompt_len + count]
        return ended

    def abandon(self, reason: FinishReason = FinishReason.CANCELLED, error: str | None = None) -> Committed:
        """End every sample that has not ended, oldest first."""
        samples = sorted({**self.row_of, **self.waiting}, key=lambda sample: sample.order)
        for sample in samples:
            self._end(sample, reason, error)
        return Committed(samples, [], NO_TOKENS)

    def stream(self, sample: Sample) -> Committed:
        """Let commits hand over the tokens of `sample` from now on; the result hands over its output so far.

        A sample that is streamed already, or has ended, gets nothing: no token is handed over twice.
        """
        if sample in self._streaming or sample.state is SampleState.FINISHED:
            return NOTHING
        self._streaming.add(sample)
        if (row := self.row_of.get(sample)) is not None:
            self.rows.streaming[row] = True
        output = self._known_tokens(sample)[sample.prompt_len :]
        return Committed([], [sample] * len(output), output)

    def reset_prefix_cache(self) -> None:
        """Use nothing again that was computed before; rows in use keep their blocks, but publish none of them."""
        self.prefixes.stop()
        self.releases.forget_chains()
        self.pool.forget()

    @property
    def has_work(self) -> bool:
        """True while a sample has not ended or something waits for the commit of a step."""
        return bool(self.waiting or self.rows.running or self.releases)

    def stats(self) -> SchedulerStats:
        pool, steps = self.pool, self.launched_step + 1
        counts = pool.free, pool.cache.idle, self.prefixes.hit_tokens, self._preemptions, steps
        return SchedulerStats(len(self.waiting), self.rows.running, *counts)

    # -- Planning ------------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, which counts as launched from now on; None if nothing can run before a commit."""
        draft = Draft()
        self._settle_lanes(draft)
        self._continue_prefills(draft)
        self._admit(draft)
        if not self.lanes.count and not draft.prompt_tokens:
            return None
        self.rows.launched[self.lanes.index] += 1
        self.launched_step += 1
        plan = draft.plan(self.launched_step, self.lanes.plan_rows, self.lanes.pop_deltas())
        if self._audit is not None:
            self._audit.planned(plan)
        return plan

    def _settle_lanes(self, draft: Draft) -> None:
        """Rows at their limit leave their lanes, rows at a block's edge get a block or sit out, ready rows join."""
        rows, index = self.rows, self.lanes.index
        due = index[rows.launched[index] == rows.event_at[index]]
        if not len(due) and not self.ready:
            return
        ended = rows.launched[due] == rows.limit[due]
        if np.count_nonzero(ended):
            for row in due[ended].tolist():
                self.lanes.leave(row)
            due = due[~ended]
        if self.ready:
            ready = np.fromiter(self.ready, np.intp, len(self.ready))
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
        coming = self.releases.blocks + int(self.rows.held[ending].sum())
        while len(claims) > self.pool.available + coming:
            victim = int(np.where(ending, -1, self.rows.order).argmax())
            self._preempt(victim)
            claims = claims[claims != victim]
        served = min(len(claims), self.pool.available)
        for row in claims[served:].tolist():
            self.lanes.leave(row)
            self.ready[row] = None
        return claims[:served]

    def _join_ready(self) -> None:
        """Ready rows that have a place for their next position take lanes, oldest first."""
        rows = self.rows
        for row in sorted(self.ready, key=lambda row: rows.order[row]):
            if rows.launched[row] < rows.event_at[row]:
                del self.ready[row]
                self.lanes.join(row)

    def _continue_prefills(self, draft: Draft) -> None:
        if not self.prefilling:
            return
        for row in list(self.prefilling):
            if not self._budget(draft):
                return
            self._launch_chunk(row, draft)

    def _admit(self, draft: Draft) -> None:
        """Give rows, and the promise of blocks for all their tokens, to the samples at the head of the queue."""
        while self.waiting and self.rows.free and self._budget(draft):
            sample = next(iter(self.waiting))
            # NOTE: without headroom a preempted sample would be admitted and preempted again at the next block's edge.
            available = self.pool.available - (self.rows.running if sample.preemptions else 0)
            if sample in self.row_of or available < 1:
                return
            found = self.prefixes.find(sample)
            chain = sample.chain[: len(found)]
            blocks = self.rows.blocks_of(len(sample.tokens))
            needed = blocks - len(found) + self.pool.cache.count_idle(chain)
            if available < needed or draft.shared_blocks + len(found) > self.max_shared_blocks:
                return
            del self.waiting[sample]
            row = self._join(sample, blocks, len(found), draft)
            if found:
                draft.add_shared_blocks(self.rows.extend_blocks(row, self.pool.share(chain, found)), len(found))
            self.pool.reserve(blocks - len(found))
            self._launch_chunk(row, draft)

    def _join(self, sample: Sample, blocks: int, found: int, draft: Draft) -> int:
        row = self.rows.admit(sample, blocks, sample in self._streaming)
        self.row_of[sample] = row
        self.prefilling[row] = None
        draft.add_join(row, sample, self.prefixes.begin(row, sample, found))
        if sample.timings.admitted is None:
            sample.timings.admitted = time.perf_counter()
        return row

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
            del self.prefilling[row]
            if target < rows.limit[row]:
                self.ready[row] = None

    def _budget(self, draft: Draft) -> int:
        """Tokens that the step has left for prompts."""
        return self.max_step_tokens - self.lanes.count - draft.prompt_tokens

    def _preempt(self, row: int) -> None:
        """Send the row's sample back to the queue; it keeps the row until its tokens in flight are there."""
        sample = self.rows.samples[row]
        # Steps that are queued still use these blocks, but on the compute stream, before whoever gets them next.
        self.pool.give(*self._withdraw(row))
        self.rows.suspend(row)
        sample.state = SampleState.WAITING
        sample.preemptions += 1
        self._preemptions += 1
        self.waiting[sample] = None
        self.waiting.move_to_end(sample, last=False)
        self.draining[row] = None
        self._drain()

    # -- Committing ----------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, output: StepOutput) -> Committed:
        """Take the output of the oldest step in flight.

        Raises:
            RuntimeError: the step is not the next one to commit, or its output contradicts the plan.
        """
        if plan.step != self.committed_step + 1 or plan.step > self.launched_step:
            raise RuntimeError(f"step {plan.step} committed after {self.committed_step}, launched {self.launched_step}")
        sampled = self.rows.confirm(plan)
        if not len(sampled) == len(output.tokens) == len(output.flags):
            raise RuntimeError(f"step {plan.step}: {len(output.tokens)} outputs for {len(sampled)} sampled positions")
        self.committed_step = plan.step
        # NOTE: dead rows are written to like all others: nobody reads them, and a mask would cost more.
        self.rows.write_tokens(sampled, output.tokens)
        streamed, tokens = self.rows.streamed(sampled, output)
        if len(sampled) > plan.num_lanes:
            self.rows.stamp_first_tokens(sampled[plan.num_lanes :])
            self.prefixes.publish_prompts(sampled[plan.num_lanes :], output.flags[plan.num_lanes :])
        finished = self._end_flagged(sampled, output.flags)
        if self.draining:
            self._drain()
        self._return_releases()
        if self._audit is not None:
            self._audit.committed(plan)
        return Committed(finished, streamed, tokens)

    def _end_flagged(self, sampled: np.ndarray, flags: np.ndarray) -> list[Sample]:
        """End the samples whose flags say so; rows whose sample has ended before are skipped."""
        finished: list[Sample] = []
        ended = flags != _TOKEN
        if not np.count_nonzero(ended):
            return finished
        for place in np.flatnonzero(ended).tolist():
            row, flag = int(sampled[place]), int(flags[place])
            if not self.rows.alive[row]:
                continue
            sample = self.rows.samples[row]
            if flag & _ERROR:
                # The position is confirmed, but gave no token.
                self._end(sample, FinishReason.ERROR, BAD_LOGITS, drop=1)
            elif flag & _TOKEN:
                self._end(sample, FinishReason.STOP if flag & _STOP else FinishReason.LENGTH)
            else:
                raise RuntimeError(f"row {row} lives, but the device says that it is dead")
            finished.append(sample)
        return finished

    def _drain(self) -> None:
        """Preempted samples whose steps in flight are all committed take their tokens along and leave their rows."""
        rows = self.rows
        for row in [r for r in self.draining if rows.launched[r] == rows.confirmed[r]]:
            sample = rows.samples[row]
            sample.tokens = rows.known_tokens(row)
            del self.draining[row], self.row_of[sample]
            rows.end(row)
            rows.free_row(row)

    # -- Ending --------------------------------------------------------------------------------------------------

    def _end_by_command(self, sample: Sample, reason: FinishReason) -> Committed:
        if sample.state is SampleState.FINISHED:
            return NOTHING
        self._end(sample, reason)
        return Committed([sample], [], NO_TOKENS)

    def _known_tokens(self, sample: Sample) -> np.ndarray:
        row = self.row_of.get(sample)
        return sample.tokens if row is None else self.rows.known_tokens(row)

    def _end(self, sample: Sample, reason: FinishReason, error: str | None = None, drop: int = 0) -> None:
        """End `sample` with its known tokens but the last `drop`; row and blocks return when no step uses them."""
        tokens = self._known_tokens(sample)
        sample.tokens = tokens[: len(tokens) - drop]
        if (row := self.row_of.pop(sample, None)) is not None:
            self._retire(row, drop)
        self.waiting.pop(sample, None)
        self._streaming.discard(sample)
        sample.chain.clear()
        sample.state, sample.finish_reason, sample.error = SampleState.FINISHED, reason, error
        sample.timings.finished = time.perf_counter()

    def _retire(self, row: int, bad: int) -> None:
        blocks, chain = self._withdraw(row, bad)
        self.draining.pop(row, None)
        self.rows.end(row)
        self.releases.push(Release(self.launched_step, row, blocks, chain))
        self._return_releases()

    def _withdraw(self, row: int, bad: int = 0) -> tuple[np.ndarray, list[bytes]]:
        """Take `row` out of everything that plans read; returns its blocks, int32 [G, n], and their published chain."""
        self.lanes.leave(row)
        self.ready.pop(row, None)
        self.prefilling.pop(row, None)
        self.pool.unreserve(int(self.rows.reserved[row]))
        self.rows.reserved[row] = 0
        chain = self.prefixes.publish(row, bad)
        return self.rows.pop_blocks(row), chain

    def _return_releases(self) -> None:
        while (release := self.releases.pop(self.committed_step)) is not None:
            self.pool.give(release.blocks, release.chain)
            self.rows.free_row(release.row)
