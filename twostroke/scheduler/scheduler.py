"""The scheduler: which tokens run next, and what becomes of those that ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cache.block_pool import BlockPool
from ..cache.host_tier import HostTier
from ..cache_groups import CacheGroups
from ..errors import InvalidRequest, counted
from ..held_input import HeldInput
from ..plan import LEDGER_FEATURES, Plan, StepOutput
from ..request import FinishReason, Sample, SampleState
from .audit import Audit
from .batch import Batch
from .commits import Commits
from .committed import NOTHING, Committed
from .endings import Endings
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

FIRST_COME = FirstCome()


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
        self._cache_positions = self.groups.positions(num_blocks - 1)
        self._costs = costs
        self._policy = policy
        self.gate = Gate(self.waiting, self.forks.has_begun)
        self.weights = WeightVersions(self.batch, self.waiting)
        self._endings = Endings(self.batch, self.gate, self.forks, self.weights)
        self._commits = Commits(self.batch, self.waiting, self.forks, self._endings)
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
        if length > self.max_model_len or length - 1 > self._cache_positions:
            blocks = self.groups.blocks(length - 1)
            raise InvalidRequest(
                f"prompt and max_tokens={sample.request.max_tokens} make {length} tokens in "
                f"{counted(blocks, 'block')}; max_model_len={self.max_model_len}, and the cache has "
                f"{counted(self.pool.total, 'usable block')}"
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
        self._endings.end(sample, FinishReason.ERROR, f"queue_timeout={seconds} s went by before it could begin to run")
        return Committed([sample], [], NO_TOKENS)

    def abandon(self, reason: FinishReason = FinishReason.CANCELLED, error: str | None = None) -> Committed:
        """End every sample that has not ended, oldest first."""
        every = {*self.batch.row_of, *self.waiting, *self.gate.outside, *self.forks.pending_samples()}
        samples = sorted(every, key=lambda sample: sample.order)
        for sample in samples:
            self._endings.end(sample, reason, error)
        self.batch.return_releases()
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
            if self.gate.is_awaited(begun=self.has_begun_some):
                return True
            if self.gate.is_shut:
                return False
        return not self._stalled and bool(self.waiting or self.rows.running or self.batch.releases)

    @property
    def has_begun_some(self) -> bool:
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
        if (tier := pool.tier) is None:
            return SchedulerStats(waiting, self.rows.running, *counts)
        host = tier.used, tier.offloaded, tier.returned, self.prefixes.host_hit_tokens
        seconds = tier.costs.save_seconds, tier.costs.load_seconds, tier.costs.compute_seconds
        return SchedulerStats(waiting, self.rows.running, *counts, *host, *seconds)

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
            self.gate.settle(in_flight=in_flight, begun=self.has_begun_some)
            if self.gate.is_shut:
                return None
        plan = self._planner.plan()
        self._stalled = plan is None and bool(self.batch.held.late)
        if plan is not None and self._audit is not None:
            self._audit.planned(plan)
        return plan

    def commit(self, plan: Plan, output: StepOutput) -> Committed:
        """Take the output of the oldest step in flight.

        Raises:
            RuntimeError: the step is not the next one to commit, or its output contradicts the plan.
        """
        self._stalled = False
        committed = self._commits.commit(plan, output)
        if self._audit is not None:
            self._audit.committed(plan)
        return committed

    def _end_by_command(self, sample: Sample, reason: FinishReason) -> Committed:
        if sample.state is SampleState.FINISHED or sample.order < 0:  # or it was refused, and is cancelled all the same
            return NOTHING
        self._endings.end(sample, reason)
        self.batch.return_releases()
        return Committed([sample], [], NO_TOKENS)
