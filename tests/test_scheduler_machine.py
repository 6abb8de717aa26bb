"""The scheduler as a state machine: whatever users do and whenever, everything ends, and every output is the oracle's.

The scheduler audits itself after every plan and commit, the paper device objects to impossible plans, and the workshop
to rows and blocks that are reused too early.
"""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from workshop import Workshop

from twostroke.request import FinishReason, SampleState
from twostroke.scheduler.policy import make_policy
from twostroke.scheduler.step_costs import StepCosts


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.shop = None
        self.now = 0.0

    @initialize(
        depth=st.integers(1, 4),
        max_rows=st.integers(1, 5),
        max_step_tokens=st.integers(1, 12),
        max_chunk_tokens=st.none() | st.integers(1, 8),
        block_size=st.integers(1, 4),
        usable_blocks=st.integers(3, 12),
        windows=st.sampled_from([(0,), (0, 0), (1,), (5,), (0, 3), (4, 0, 1), (2, 6)]),
        prefix_cache=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "shortest"]),
        bounded=st.booleans(),
        host_slots=st.sampled_from([0, 0, 1, 3, 20]),
        lag=st.integers(0, 6),
        ahead=st.sampled_from([1, 4, 100]),
    )
    def open(self, policy, bounded, host_slots, prefix_cache, **config):
        costs = StepCosts(limit=5.0) if bounded else None
        config |= {"host_slots": host_slots if prefix_cache else 0, "prefix_cache": prefix_cache}
        self.shop = Workshop(max_model_len=32, policy=make_policy(policy, 10.0), costs=costs, **config)

    @rule(
        length=st.integers(1, 12),
        family=st.none() | st.integers(0, 1),
        turn_of=st.none() | st.integers(0, 30),
        output=st.integers(1, 20),
        stops=st.integers(0, 12),
        min_tokens=st.integers(0, 20),
        nan_at=st.none() | st.integers(0, 6),
        streamed=st.booleans(),
        n=st.integers(1, 4),
        priority=st.integers(-2, 2),
        later=st.integers(0, 5),
        gap=st.none() | st.integers(1, 4),
    )
    def submit(self, length, family, turn_of, output, stops, min_tokens, nan_at, streamed, n, priority, later, gap):
        """A prompt of its own, one of a family with the same beginning, or the next turn of an earlier sample."""
        limits = self.shop.limits
        longest = min(limits.cache_positions, limits.max_model_len - 1)
        prompt = length = min(length, longest)
        if family is not None:
            prompt = [family] * (length // 2) + [3 + (i % 2) for i in range(length - length // 2)]
        if turn_of is not None and self.shop.samples:
            prompt = [*self.shop.samples[turn_of % len(self.shop.samples)].tokens.tolist(), *range(length)][:longest]
            length = len(prompt)
        output = min(output, limits.cache_positions + 1 - length, limits.max_model_len - length)
        self.now += later
        params = dict(stop_token_ids=range(stops), min_tokens=min(min_tokens, output), n=n, priority=priority)
        if gap is not None:
            params["max_thinking_tokens"] = gap  # every so many tokens a mask
        sample = self.shop.submit(prompt, output, nan_at=nan_at, at=self.now, **params)
        if streamed:
            self.shop.stream(sample)

    @precondition(lambda self: self.shop.samples)
    @rule(which=st.integers(0, 30))
    def cancel(self, which):
        sample = self.shop.samples[which % len(self.shop.samples)]
        ended = sample.state is SampleState.FINISHED
        assert self.shop.cancel(sample).finished == ([] if ended else [sample])
        assert ended or sample.finish_reason is FinishReason.CANCELLED

    @precondition(lambda self: self.shop.samples)
    @rule(which=st.integers(0, 30))
    def expire(self, which):
        sample = self.shop.samples[which % len(self.shop.samples)]
        begun = sample.state is SampleState.FINISHED or sample.timings.admitted is not None
        assert self.shop.expire(sample).finished == ([] if begun else [sample])

    @rule(lanes=st.integers(0, 5), prompt_tokens=st.integers(0, 12), seconds=st.floats(0, 9))
    def observe(self, lanes, prompt_tokens, seconds):
        self.shop.scheduler.observe(lanes, prompt_tokens, seconds)

    @precondition(lambda self: self.shop.samples)
    @rule(which=st.integers(0, 30), dropped=st.integers(0, 4))
    def finish(self, which, dropped):
        sample = self.shop.samples[which % len(self.shop.samples)]
        ended = sample.state is SampleState.FINISHED
        count = max(0, self.shop.known_outputs(sample) - dropped)
        assert self.shop.finish(sample, count).finished == ([] if ended else [sample])

    @precondition(lambda self: self.alive())
    @rule(which=st.integers(0, 30))
    def stream(self, which):
        alive = self.alive()
        self.shop.stream(alive[which % len(alive)])

    @rule(slow=st.booleans())
    def slow_down(self, slow):
        """Masks come late from now on, or are there at once."""
        self.shop.masks.slow = slow

    @rule()
    def think(self):
        self.shop.masks.think()

    @rule()
    def reset(self):
        self.shop.reset()

    @rule(recompute=st.booleans())
    def change_weights(self, recompute):
        self.shop.change_weights(recompute=recompute)

    @rule(drain=st.booleans())
    def pause(self, drain):
        """Until nothing of what has begun is left, or in flight; new samples wait meanwhile."""
        begun = {sample.request for sample in self.shop.samples if sample.timings.admitted is not None}
        fresh = [sample for sample in self.alive() if sample.request not in begun]
        quiet = self.shop.hold(drain=drain)
        while not quiet:
            self.shop.masks.think()
            self.shop.turn()
        assert not self.shop.in_flight
        assert not drain or self.shop.scheduler.stats().running == 0
        steps = len(self.shop.plans)
        self.shop.turn()
        assert len(self.shop.plans) == steps
        if not drain:
            self.shop.empty_cache()
            assert self.shop.scheduler.stats().running == 0
        assert all(sample.timings.admitted is None for sample in fresh)

    @rule()
    def resume(self):
        self.shop.release()

    def alive(self):
        return [sample for sample in self.shop.samples if sample.state is not SampleState.FINISHED]

    @rule(turns=st.integers(1, 8))
    def turn(self, turns):
        for _ in range(turns):
            self.shop.turn()

    @precondition(lambda self: len(self.shop.in_flight) < self.shop.depth)
    @rule()
    def launch(self):
        self.shop.launch()

    @precondition(lambda self: self.shop.in_flight)
    @rule()
    def commit(self):
        self.shop.commit()

    def teardown(self):
        if self.shop is not None:
            self.shop.release()
            self.shop.drain()
            self.shop.check_all()


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
test_scheduler_machine = SchedulerMachine.TestCase
