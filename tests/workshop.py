"""A workshop: a scheduler and a device made of paper, and the books of who may use what."""

from collections import deque
from collections.abc import Callable

import numpy as np
from paper_device import VOCAB, EveryCopyPays, PaperDevice, PaperLink, oracle
from paper_masks import PaperConstraints

from twostroke.cache.copy_costs import CopyCosts
from twostroke.cache.host_tier import HostTier
from twostroke.limits import Limits
from twostroke.plan import Plan, StepOutput
from twostroke.request import FinishReason, Request, Sample, SampleState
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.policy import Policy
from twostroke.scheduler.scheduler import FIRST_COME, Committed, Scheduler
from twostroke.scheduler.step_costs import StepCosts


def _block(block: int) -> tuple[str, int]:
    """A block among the things that are used, of which rows are plain numbers."""
    return "block", block


class Workshop:
    """A scheduler, a paper device and the steps in flight between them; keeps its own books of who may use what.

    With depth 1 every step is committed before the next plan, as the synchronous loop does; with depth 2, one step is
    in flight while the next is planned; and so on.
    """

    def __init__(
        self,
        *,
        depth: int = 2,
        max_rows: int = 8,
        max_step_tokens: int = 64,
        max_model_len: int = 256,
        block_size: int = 4,
        usable_blocks: int = 256,
        windows: tuple[int, ...] = (0,),
        max_chunk_tokens: int | None = None,
        prefix_cache: bool = True,
        policy: Policy = FIRST_COME,
        costs: StepCosts | None = None,
        host_slots: int = 0,
        lag: int = 0,
        ahead: int = 1 << 30,
        copy_costs: CopyCosts | None = None,
    ) -> None:
        self.depth = depth
        self.link = PaperLink(lag)
        copy_costs = copy_costs or EveryCopyPays(block_size)
        tier = HostTier(host_slots, usable_blocks + 1, ahead, copy_costs, self.link)
        self.masks = PaperConstraints(VOCAB)
        self._news: list[Callable[[Scheduler], object]] = []
        self.scheduler = Scheduler(
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=usable_blocks + 1,
            windows=windows,
            max_chunk_tokens=max_chunk_tokens,
            prefix_cache=prefix_cache,
            tier=tier if host_slots else None,
            policy=policy,
            costs=costs,
            constraints=self.masks,
            debug=True,
        )
        self.scheduler.on_late_masks(self._news.append)
        self.device = PaperDevice(
            max_rows=max_rows,
            max_len=max_model_len,
            block_size=block_size,
            num_blocks=usable_blocks + 1,
            windows=windows,
        )
        chunk = self.scheduler.groups.max_chunk_tokens
        self.limits = Limits(
            VOCAB,
            max_model_len,
            block_size,
            usable_blocks,
            windows=windows,
            max_chunk_tokens=chunk,
            priorities=True,
        )
        self.link.device = self.device
        self.num_rows = min(max_rows, max_step_tokens)
        self.in_flight: deque[tuple[Plan, StepOutput]] = deque()
        self.plans: list[Plan] = []
        self.samples: list[Sample] = []
        self.finals: list[Sample] = []
        self.streams: dict[Sample, list[int]] = {}
        self.cuts: dict[Sample, int] = {}
        self.expired: set[Sample] = set()
        self._user_of_row: dict[int, Sample] = {}
        self._row_of: dict[Sample, int] = {}
        self._owners: dict[tuple[str, int], set[Sample]] = {}
        self.hits: dict[Sample, int] = {}  # shared positions of each sample's last admission
        self._quarantine: dict[object, int] = {}  # block or row -> step that must be committed before it is used again

    # -- Commands

    def submit(
        self, prompt: int | list[int], max_tokens: int, *, nan_at: int | None = None, at: float = 0.0, **params
    ) -> Sample:
        """Submit a prompt of its own, of so many tokens, or a given one, at a moment that policies see."""
        seed = (len(self.samples) + 1) << 29  # both words of the seed are used
        if isinstance(prompt, int):
            prompt = [(seed // 7919 + 31 * i) % VOCAB for i in range(prompt)]
        params = SamplingParams(max_tokens=max_tokens, seed=seed, **params)
        request = Request.create(str(len(self.samples)), prompt, params, 0, self.limits)
        samples = [Sample(request, index) for index in range(request.terms.samples)]
        for sample in samples:
            sample.timings.submitted = at
            if nan_at is not None:
                self.device.nan_at[sample.seed] = nan_at
            self.scheduler.submit(sample)
        self.samples += samples
        return samples[0]

    def cancel(self, sample: Sample) -> Committed:
        before = self._running_rows()
        return self._take(self.scheduler.cancel(sample), before)

    def expire(self, sample: Sample) -> Committed:
        before = self._running_rows()
        committed = self._take(self.scheduler.expire(sample), before)
        if committed.finished:
            self.expired.add(sample)
        return committed

    def known_outputs(self, sample: Sample) -> int:
        return len(self.scheduler.batch.known_tokens(sample)) - sample.prompt_len

    def finish(self, sample: Sample, count: int) -> Committed:
        """End `sample` after `count` output tokens, as a stop string does."""
        before = self._running_rows()
        committed = self._take(self.scheduler.finish(sample, count), before)
        if committed.finished:
            self.cuts[sample] = count
        return committed

    def stream(self, sample: Sample) -> None:
        self.streams.setdefault(sample, [])
        self._take(self.scheduler.stream(sample), self._running_rows())

    def reset(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.device.epoch += 1

    def hold(self, *, drain: bool) -> list[bool]:
        """Close the gate; the list gets an entry when it is quiet."""
        quiet: list[bool] = []
        self.scheduler.hold("test", drain=drain, on_quiet=lambda: quiet.append(True))
        return quiet

    def release(self) -> None:
        self.scheduler.release("test")

    def change_weights(self, *, recompute: bool) -> None:
        self.device.version = self.scheduler.change_weights(recompute=recompute)
        self.device.epoch += 1

    def empty_cache(self) -> None:
        self.scheduler.empty_cache()
        self.device.epoch += 1

    # -- Steps

    def turn(self) -> bool:
        """Plan and launch a step, commit what the depth says; False if nothing was planned and nothing in flight.

        As the loops do, it plans nothing while all slots are taken: what was launched by itself is committed first.
        """
        if len(self.in_flight) == self.depth:
            self.commit()
            return True
        plan = self.launch()
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.commit()
            return True
        return plan is not None

    def launch(self) -> Plan | None:
        while self._news:
            self._news.pop(0)(self.scheduler)
        plan = self.scheduler.plan()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_work, "nothing in flight, nothing planned, but work is left"
            return None
        self._check_reuse(plan)
        self.link.queue(plan)
        self.in_flight.append((plan, self.device.run(plan)))
        self.plans.append(plan)
        if len(self.in_flight) == 1:
            self._complete()
        return plan

    def commit(self) -> Committed:
        before = self._running_rows()
        committed = self._take(self.scheduler.commit(*self.in_flight.popleft()), before)
        if self.in_flight:
            self._complete()
        return committed

    def _complete(self) -> None:
        """Run the second part of the oldest step in flight, if it has one."""
        plan, output = self.in_flight[0]
        if len(plan.held):
            self.device.complete(plan, output, self.scheduler.unhold(plan, patience=0))

    def drain(self, max_turns: int = 5000) -> None:
        """Turn until all is done, then check the books."""
        for _ in range(max_turns):
            if not self.turn() and not self.masks.think():
                break
        else:
            raise AssertionError("no end")
        self.check_idle()

    # -- Books

    def _running_rows(self) -> dict[Sample, list]:
        """What each running sample has: its blocks, if they are still its own, and its row."""
        return {
            sample: [*(b for b in map(_block, self.device.blocks_of(row)) if sample in self._owners.get(b, ())), row]
            for sample, row in self._row_of.items()
            if sample.state is SampleState.RUNNING
        }

    def _take(self, committed: Committed, before: dict[Sample, list]) -> Committed:
        newest = self.plans[-1].step if self.plans else -1
        for sample in committed.finished:
            assert sample not in self.finals, "reported twice"
            self.finals.append(sample)
            for thing in before.get(sample, []):
                self._quarantine[thing] = newest
        for sample, token in zip(committed.streamed, committed.tokens.tolist(), strict=True):
            self.streams[sample].append(token)
        return committed

    def _check_reuse(self, plan: Plan) -> None:
        """No living sample loses a block or a row, and what an ended one had rests until its last step is committed."""
        committed = plan.step - 1 - len(self.in_flight)
        for sample, row in self._row_of.items():
            if sample.state is SampleState.RUNNING and self._user_of_row.get(row) is sample:
                for block in map(_block, self.device.unseen(row)):
                    self._owners.get(block, set()).discard(sample)
        seeds = plan.joins["seed_low"].astype(np.uint64) | plan.joins["seed_high"].astype(np.uint64) << np.uint64(32)
        joining = [next(s for s in self.samples if s.seed == seed) for seed in seeds.tolist()]
        for sample in joining:
            self._forget(sample)  # all of them first: two may have come back with each other's row
        for record, sample in zip(plan.joins, joining, strict=True):
            row = int(record["row"])
            self._check_free(row, {self._user_of_row.get(row)}, committed)
            self.hits[sample] = int(record["length"])
            self.device.history[row] = sample.tokens[: self.hits[sample]].tolist()
            assert all(row not in p.lane_rows and row not in p.chunks[:, 0] for p, _ in self.in_flight)
            self._user_of_row[row], self._row_of[sample] = sample, row
        joined = set(plan.joins["row"].tolist())
        returning = set(plan.loads[:, 1].tolist())
        for group, row, index, block in plan.block_deltas.tolist():
            sample = self._user_of_row[row]
            found = row in joined and (index + 1) * self.limits.block_size <= self.hits[sample]
            if found and block not in returning:
                self._check_shared(group, block, index, sample, committed)
                self._owners[_block(block)].add(sample)
            else:
                if found:
                    returning.remove(block)  # others share it from now on
                    self.link.expected[plan.step, block] = sample.tokens[
                        : (index + 1) * self.limits.block_size
                    ].tolist()
                self._check_free(_block(block), self._owners.get(_block(block), set()), committed)
                self._owners[_block(block)] = {sample}
        for row in [*plan.lane_rows.tolist(), *plan.chunks[:, 0].tolist()]:
            assert self._user_of_row[row].state is SampleState.RUNNING, "a step for a sample that does not run"

    def _forget(self, sample: Sample) -> None:
        """A preempted sample comes back: what it had in its last life is not its own."""
        for owners in self._owners.values():
            owners.discard(sample)
        self._user_of_row = {row: user for row, user in self._user_of_row.items() if user is not sample}

    def _check_free(self, thing: object, users: set[Sample | None], committed: int) -> None:
        assert not any(user and user.state is SampleState.RUNNING for user in users), f"{thing} is in use"
        assert self._quarantine.pop(thing, -1) <= committed, f"{thing} is given out while a step may use it"

    def _check_shared(self, group: int, block: int, index: int, sample: Sample, committed: int) -> None:
        """A shared block was written after the very tokens that the sample has, by a committed step since a reset."""
        device, size = self.device, self.limits.block_size
        expected = sample.tokens[: (index + 1) * size].tolist()
        coming = [tokens for (_, loaded), tokens in self.link.expected.items() if loaded == block]
        if coming:
            assert coming[-1] == expected, "a shared block is about to hold other tokens"
            return
        assert device.group_of[block] == group, "a shared block is of another group"
        assert device.cache[block].tolist() == expected[-size:], "a shared block holds other tokens"
        assert device.prefixes[block] == expected, "a shared block was written after other tokens"
        assert index * size + size < len(sample.tokens), "the last token must be computed"
        assert device.written[block] <= committed, "a block was shared before its step was committed"
        # A request that runs goes on with what it has, and its forks are part of it.
        epoch = device.epoch_of[block]
        assert epoch == device.epoch or sample.index, "a block was shared across a reset"

    def check_idle(self) -> None:
        scheduler, stats = self.scheduler, self.scheduler.stats()
        assert not scheduler.has_work
        assert (stats.waiting, stats.running, stats.free_blocks) == (0, 0, self.limits.usable_blocks)
        held = scheduler.batch.held
        assert (held.count, held.paused, held.late, held._followers) == (0, {}, {}, {})
        assert scheduler.pool.reserved == 0
        assert sorted(scheduler.rows.free) == list(range(self.num_rows))
        assert len(self.finals) == len(self.samples)

    def check_output(self, sample: Sample) -> None:
        """The sample's output is the oracle's; of a cancelled one, its beginning."""
        expected, reason = oracle(sample.request, self.device.nan_at.get(sample.seed), sample.seed, self.device.widest)
        output = sample.output.tolist()
        if sample in self.cuts:
            assert (output, sample.finish_reason) == (expected[: self.cuts[sample]], FinishReason.STOP)
            assert len(output) == self.cuts[sample]
        elif sample in self.expired:
            assert (output, sample.finish_reason, sample.timings.admitted) == ([], FinishReason.ERROR, None)
        elif sample.finish_reason is FinishReason.CANCELLED:
            assert output == expected[: len(output)]
        else:
            assert (output, sample.finish_reason) == (expected, reason)
        versions = [version for version, count in sample.weight_versions() for _ in range(count)]
        assert versions == [self.device.version_of[sample.seed, index] for index in range(len(output))]
        assert sample.state is SampleState.FINISHED
        assert not sample.chain, "an ended sample keeps digests"
        assert (sample.error is not None) == (sample.finish_reason is FinishReason.ERROR)
        if sample in self.streams:
            streamed = self.streams[sample]
            assert (streamed[: len(output)] if sample in self.cuts else streamed) == output

    def check_all(self) -> None:
        for sample in self.samples:
            self.check_output(sample)
