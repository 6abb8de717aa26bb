"""The scheduler: which tokens run next, and what becomes of those that ran."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..cache.block_pool import BlockPool
from ..cache.host_tier import HostTier
from ..cache_groups import CacheGroups
from ..errors import InvalidRequest
from ..held_input import HeldInput
from ..logprob_record import NO_RECORDS
from ..plan import LEDGER_FEATURES, Flag, Plan, StepOutput
from ..request import FinishReason, Sample, SampleState
from .audit import Audit
from .batch import Batch
from .committed import NOTHING, Committed
from .forks import Forks
from .gate import Gate
from .held import Constraints
from .lanes import Lanes
from .planner import Planner
from .policies.first_come import FirstCome
from .policy import Policy
from .prefixes import Prefixes
from .queue import Queue
from .rows import NO_TOKENS, RowTable
from .stats import SchedulerStats
from .step_costs import StepCosts
from .weight_versions import WeightVersions

_TOKEN, _STOP, _ERROR = int(Flag.TOKEN), int(Flag.STOP), int(Flag.ERROR)

FIRST_COME = FirstCome()

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

    Samples are admitted strictly in the order of their ranks (`Policy`), and of those with positions left to launch the
    one of the last rank is preempted first. So of all that run the first always gets on, and whoever heads the queue
    will have the whole cache if need be: every sample ends, in any cache that holds the largest one.

    Args:
        max_rows: rows of the device's batch state; row `max_rows` is the dummy row.
        max_step_tokens: most tokens of a step. No more rows than this are used at a time.
        max_model_len: most tokens of a sample, prompt and output.
        block_size: positions of a block. num_blocks: blocks of the cache, with the dummy block.
        windows: of each cache group; 0 sees all.
        max_chunk_tokens: most tokens of one prompt chunk; None is no limit but the step's.
        prefix_cache: rows that begin with the same tokens share blocks.
        tier: keeps on the host what the prefix cache evicts; None for nothing.
        policy: in which order samples get rows, and lose them.
        costs: how many prompt tokens may go beside decoding rows; None is no limit but the step's.
        constraints: of samples whose rows are held; None if there are no such requests.
        num_ledgers: ledgers on the device. max_ledger_words: most words of those that open in one plan.
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
        windows: tuple[int, ...] = (0,),
        max_chunk_tokens: int | None = None,
        prefix_cache: bool = True,
        tier: HostTier | None = None,
        policy: Policy = FIRST_COME,
        costs: StepCosts | None = None,
        constraints: Constraints | None = None,
        num_ledgers: int = 0,
        max_ledger_words: int = 0,
        debug: bool = False,
    ) -> None:
        num_rows = min(max_rows, max_step_tokens)
        self.max_step_tokens = max_step_tokens
        self.max_model_len = max_model_len
        self.num_ledgers = num_ledgers
        self.groups = CacheGroups(windows, block_size, min(max_chunk_tokens or max_step_tokens, max_step_tokens))
        self.rows = RowTable(num_rows, max_model_len, self.groups, num_ledgers)
        self.pool = BlockPool(num_blocks, block_size, self.groups.reaches(), tier)
        self.prefixes = Prefixes(self.rows, self.pool, enabled=prefix_cache)
        self.batch = Batch(self.rows, self.pool, Lanes(num_rows, dummy_row=max_rows), self.prefixes, constraints)
        self.waiting = Queue()
        self.forks = Forks(self.batch)
        self._planner = Planner(
            self.batch,
            self.waiting,
            self.forks,
            groups=self.groups,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            takes_rows=policy.takes_rows,
            costs=costs,
            max_ledger_words=max_ledger_words,
        )
        self._costs = costs
        self._policy = policy
        self.gate = Gate(self.waiting)
        self.weights = WeightVersions(self.batch, self.waiting)
        self._arrivals = 0
        self._stalled = False
        self._audit = Audit(self) if debug else None

    # -- Commands ------------------------------------------------------------------------------------------------

    def submit(self, sample: Sample) -> None:
        """Queue `sample`.

        Raises:
            InvalidRequest: it could never end here, since it outgrows the row table or the cache, or there are no
                ledgers.
        """
        length = sample.prompt_len + sample.request.max_tokens
        blocks = self.groups.blocks(length - 1)
        if length > self.max_model_len or blocks > self.pool.total:
            raise InvalidRequest(
                f"prompt and max_tokens={sample.request.max_tokens} make {length} tokens in {blocks} blocks; there are "
                f"max_model_len={self.max_model_len} and {self.pool.total} usable blocks"
            )
        if sample.request.terms.needs_ledger and not self.num_ledgers:
            features = sample.request.terms.features & LEDGER_FEATURES
            raise InvalidRequest(f"{features!r} needs a ledger, but num_ledgers=0")
        sample.order, sample.rank = self._arrivals, self._policy.rank(sample)
        self._arrivals += 1
        if not self.forks.submit(sample):
            self.gate.push(sample)

    def cancel(self, sample: Sample) -> Committed:
        """End `sample` with the tokens confirmed so far; does nothing if it has ended already."""
        return self._end_by_command(sample, FinishReason.CANCELLED)

    def finish(self, sample: Sample, count: int) -> Committed:
        """End `sample` by a stop, with its first `count` output tokens; does nothing if it has ended already."""
        ended = self._end_by_command(sample, FinishReason.STOP)
        if ended.finished:
            sample.tokens = sample.tokens[: sample.prompt_len + count]
        return ended

    def expire(self, sample: Sample) -> Committed:
        """End `sample` for having waited its `queue_timeout`; does nothing if it has begun to run."""
        if sample.state is SampleState.FINISHED or sample.timings.admitted is not None:
            return NOTHING
        seconds = sample.request.params.queue_timeout
        self._end(sample, FinishReason.ERROR, f"queue_timeout={seconds} s went by before it could begin to run")
        return Committed([sample], [], NO_TOKENS)

    def abandon(self, reason: FinishReason = FinishReason.CANCELLED, error: str | None = None) -> Committed:
        """End every sample that has not ended, oldest first."""
        every = {*self.batch.row_of, *self.waiting, *self.gate.outside, *self.forks.pending_samples()}
        samples = sorted(every, key=lambda sample: sample.order)
        for sample in samples:
            self._end(sample, reason, error)
        return Committed(samples, [], NO_TOKENS)

    def stream(self, sample: Sample) -> Committed:
        """Let commits hand over the tokens of `sample` from now on; the result hands over its output so far.

        A sample that is streamed already, or has ended, gets nothing: no token is handed over twice.
        """
        if sample in self.batch.streaming or sample.state is SampleState.FINISHED:
            return NOTHING
        self.batch.streaming.add(sample)
        if (row := self.batch.row_of.get(sample)) is not None:
            self.rows.streaming[row] = True
        output = self.batch.known_tokens(sample)[sample.prompt_len :]
        if row is not None and (jump := self.batch.held.forced.get(row)):  # a commit will hand them over
            output = output[: jump.known - sample.prompt_len]
        return Committed([], [sample] * len(output), output)

    def reset_prefix_cache(self) -> None:
        """Use nothing again that was computed before; rows in use keep their blocks, but publish none of them."""
        self.prefixes.stop()
        self.batch.releases.forget_keys()
        self.pool.forget()

    def hold(self, name: str, *, drain: bool, on_quiet: Callable[[], None]) -> None:
        """Plan nothing from now on, or with `drain` only what has begun, until `release`.

        `on_quiet` is called as soon as no step is in flight and, with `drain`, all that had begun has ended; or if the
        hold is released before that.
        """
        self.gate.hold(name, drain=drain, on_quiet=on_quiet)

    def release(self, name: str) -> None:
        """Take back a hold; does nothing if there is none."""
        self.gate.release(name)

    def change_weights(self, *, recompute: bool) -> int:
        """Steps planned from now on run with new weights; return their version.

        What was computed before is found by nobody any more. Samples that run keep what they have, or, with
        `recompute`, have it computed anew; tokens that are in flight stay theirs in any case.
        """
        self.weights.advance()
        self.reset_prefix_cache()
        if recompute:
            self._planner.preempt_all()
        return self.weights.current

    def empty_cache(self) -> None:
        """Let go of all that the cache holds; samples that run have it computed anew."""
        self.reset_prefix_cache()
        self._planner.preempt_all()

    @property
    def has_work(self) -> bool:
        """True while a sample that may run has not ended, or something waits for the commit of a step.

        False if nothing can run before a mask has come: that is told of by a command.
        """
        if not self.gate.is_open:
            if self.gate.is_awaited(begun=self._has_begun_some):
                return True
            if self.gate.is_shut:
                return False
        return not self._stalled and bool(self.waiting or self.rows.running or self.batch.releases)

    @property
    def _has_begun_some(self) -> bool:
        """While the gate is not open: whether anything that has begun is left."""
        return bool(self.waiting or self.rows.running or self.batch.draining)

    @property
    def begun(self) -> int:
        """Of all samples that were submitted, how many wait no longer to begin: they have begun, or ended before."""
        return self.batch.begun

    def observe(self, lanes: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from the time of a step that was done; see `StepCosts` and `CopyCosts`."""
        if self._costs is not None:
            self._costs.observe(lanes, prompt_tokens, seconds)
        if self.pool.tier is not None:
            self.pool.tier.costs.observe_step(lanes, prompt_tokens, seconds)

    def stats(self) -> SchedulerStats:
        pool, steps = self.pool, self.batch.launched_step + 1
        waiting = len(self.waiting) + len(self.gate) + self.forks.pending
        counts = pool.free, pool.cache.idle, self.prefixes.hit_tokens, self._planner.preemptions, steps
        tier = pool.tier
        host = (tier.used, tier.offloaded, tier.returned, self.prefixes.host_hit_tokens) if tier else (0, 0, 0, 0)
        return SchedulerStats(waiting, self.rows.running, *counts, *host)

    def on_begun(self, tell: Callable[[Sample], None]) -> None:
        """Let `tell` be called with each sample that is counted in `begun`, on the loop's thread."""
        self.batch.on_begun = tell

    def on_late_masks(self, wake: Callable[[Callable[[Scheduler], Any]], None]) -> None:
        """Let `wake` leave the command that is due when a mask comes too late for its step."""
        self.batch.held.wake = wake

    def mask_came(self, sample: Sample) -> None:
        """A mask that was too late for its step is there."""
        self.batch.held.mask_came(sample)

    def unhold(self, plan: Plan, patience: float) -> HeldInput:
        """What the second part of `plan` needs; see `HeldRows.unhold`."""
        return self.batch.held.unhold(plan, patience)

    def plan(self) -> Plan | None:
        """The next step, which counts as launched from now on; None if nothing can run before a commit."""
        if not self.gate.is_open:
            in_flight = self.batch.launched_step > self.batch.committed_step
            self.gate.settle(in_flight=in_flight, begun=self._has_begun_some)
            if self.gate.is_shut:
                return None
        plan = self._planner.plan()
        self._stalled = plan is None and bool(self.batch.held.late)
        if plan is not None and self._audit is not None:
            self._audit.planned(plan)
        return plan

    # -- Committing ----------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, output: StepOutput) -> Committed:
        """Take the output of the oldest step in flight.

        Raises:
            RuntimeError: the step is not the next one to commit, or its output contradicts the plan.
        """
        batch = self.batch
        if plan.step != batch.committed_step + 1 or plan.step > batch.launched_step:
            raise RuntimeError(
                f"step {plan.step} committed after {batch.committed_step}, launched {batch.launched_step}"
            )
        self._stalled = False
        sampled = self.rows.confirm(plan)
        if not len(sampled) == len(output.tokens) == len(output.flags):
            raise RuntimeError(f"step {plan.step}: {len(output.tokens)} outputs for {len(sampled)} sampled positions")
        batch.committed_step = plan.step
        # NOTE: dead rows are written to like all others: nobody reads them, and a mask would cost more.
        self.rows.write_tokens(sampled, output.tokens)
        handed = self.rows.streamed(sampled, output)
        if batch.held.forced:
            handed = batch.held.hand_over(plan, sampled, output.flags, *handed)
        scored: tuple[list[Sample], np.ndarray] = ([], NO_RECORDS)
        finished: list[Sample] = []
        if len(plan.scores):
            scored = self.rows.scored(plan, output)
            finished = self._end_badly_scored(*scored)
        if len(sampled) > plan.num_lanes:
            lived = output.flags[plan.num_lanes :] != 0  # those of late rows are 0, and will be computed again
            prompts, flags = sampled[plan.num_lanes :][lived], output.flags[plan.num_lanes :][lived]
            self.rows.stamp_first_tokens(prompts)
            self.prefixes.publish_prompts(prompts, flags)
            self._release_forks(prompts)
            batch.slide_prompts(prompts)
        finished += self._end_flagged(sampled, output.flags)
        if batch.held.late:
            batch.held.committed(plan)
        if batch.draining:
            batch.drain()
        batch.return_releases()
        if self._audit is not None:
            self._audit.committed(plan)
        return Committed(finished, *handed, *scored)

    def _release_forks(self, rows: np.ndarray) -> None:
        """The prompts of `rows`, intp [S], are computed: samples that waited for that join the queue."""
        for sample in self.rows.samples[rows].tolist():
            if sample is not None:
                for fork in self.forks.release(sample):
                    self.waiting.push(fork)

    def _end_badly_scored(self, samples: list[Sample], scores: np.ndarray) -> list[Sample]:
        """End the samples whose prompt had bad logits; what was computed of it is of no use to anybody."""
        bad = np.flatnonzero(np.isnan(scores["logprob"])).tolist()
        ended = list(dict.fromkeys(samples[place] for place in bad))
        for sample in ended:
            self.rows.publishes[self.batch.row_of[sample]] = False
            self._end(sample, FinishReason.ERROR, BAD_LOGITS)
        return ended

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
                # The position is confirmed, but gave no token; those that were forced behind it do not count.
                drop = self.rows.known(row) - int(self.rows.confirmed[row])
                self._end(sample, FinishReason.ERROR, self.batch.held.failure(sample) or BAD_LOGITS, drop=drop, bad=1)
            elif flag & _TOKEN:
                self._end(sample, FinishReason.STOP if flag & _STOP else FinishReason.LENGTH)
            elif sample in self.batch.held.late:
                continue
            else:
                raise RuntimeError(f"row {row} lives, but the device says that it is dead")
            finished.append(sample)
        return finished

    # -- Ending --------------------------------------------------------------------------------------------------

    def _end_by_command(self, sample: Sample, reason: FinishReason) -> Committed:
        if sample.state is SampleState.FINISHED or sample.order < 0:  # or it was refused, and is cancelled all the same
            return NOTHING
        self._end(sample, reason)
        return Committed([sample], [], NO_TOKENS)

    def _end(self, sample: Sample, reason: FinishReason, error: str | None = None, drop: int = 0, bad: int = 0) -> None:
        """End `sample` with its known tokens but the last `drop`; row and blocks return when no step uses them.

        `bad` as in `Prefixes.publish`.
        """
        tokens = self.batch.known_tokens(sample)
        sample.tokens = tokens[: len(tokens) - drop]
        self.batch.leave(sample, bad)
        waited = sample.state is SampleState.WAITING and not self.forks.is_pending(sample)
        if (heir := self.forks.ended(sample)) is not None:
            heir.score_prompt()
            self.waiting.push(heir)
        sample.chain.clear()
        self.weights.mark_end(sample)
        sample.state, sample.finish_reason, sample.error = SampleState.FINISHED, reason, error
        if waited:
            self.gate.count_out(sample)
        if sample.timings.admitted is None:
            self.batch.count_begun(sample)
        sample.timings.finished = time.perf_counter()
