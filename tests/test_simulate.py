"""The simulator: exact in cases that can be done by hand, and true to the engine's own loops."""

from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import NOTHING, TEN_MS, VARYING, arrival, feed, gaps_of, machine

from twostroke import InvalidConfig
from twostroke.bench.floor import Cost
from twostroke.loop import AsyncLoop, SyncLoop
from twostroke.plan import StepOutput
from twostroke.simulate.clock import Clock
from twostroke.simulate.cluster import simulate
from twostroke.simulate.measures import Measures
from twostroke.simulate.settings import Settings
from twostroke.simulate.step_time import StepTime, Work, decode_work
from twostroke.simulate.traffic import Traffic

# By hand


def test_one_request_under_the_asynchronous_loop() -> None:
    """The host's work hides behind the steps, but for the first."""
    replica, measures = machine()
    feed(replica, [arrival(1.0, prompt=20, outputs=3)])
    assert measures.first[0] == pytest.approx(1.011)
    assert gaps_of(measures) == pytest.approx([0.010, 0.010])
    assert measures.finished[0] == pytest.approx(1.031)
    assert (replica.clock.busy, replica.scheduler.stats().steps) == (pytest.approx(0.030), 3)


def test_one_request_under_the_synchronous_loop() -> None:
    replica, measures = machine(loop="sync")
    feed(replica, [arrival(1.0, prompt=20, outputs=3)])
    assert measures.first[0] == pytest.approx(1.011)
    assert gaps_of(measures) == pytest.approx([0.011, 0.011])
    assert measures.finished[0] == pytest.approx(1.033)


@pytest.mark.parametrize(("loop", "steps"), [("async", 3), ("sync", 2)])
def test_a_stop_is_not_foreseen(loop: str, steps: int) -> None:
    """Under the asynchronous loop a row that stopped takes part in one step more, whose token nobody sees."""
    replica, measures = machine(loop=loop)
    feed(replica, [arrival(0.0, prompt=5, outputs=2, max_tokens=10)])
    assert (measures.outputs[0], len(gaps_of(measures))) == (2, 1)
    assert replica.scheduler.stats().steps == steps


def test_a_prompt_in_chunks_and_a_request_that_waits_for_a_row() -> None:
    replica, measures = machine(max_rows=1, max_step_tokens=16, loop="sync")
    feed(replica, [arrival(0.0, prompt=40, outputs=1), arrival(0.0, prompt=16, outputs=2)])
    assert measures.first.tolist() == pytest.approx([0.033, 0.044]), "three chunks, then one"
    assert measures.finished.tolist() == pytest.approx([0.033, 0.055])


def test_an_idle_machine_begins_with_the_next_arrival() -> None:
    replica, measures = machine()
    feed(replica, [arrival(0.0, 5, 1), arrival(7.0, 5, 1, number=1)])
    assert measures.first.tolist() == pytest.approx([0.011, 7.011])


def test_what_comes_during_a_step_is_planned_after_it() -> None:
    replica, measures = machine(loop="sync")
    feed(replica, [arrival(0.0, 5, 3), arrival(0.005, 5, 1, number=1)])
    assert measures.first.tolist() == pytest.approx([0.011, 0.022])


def test_a_repeated_prompt_is_found_in_the_cache_and_takes_less_time() -> None:
    per_token = StepTime(Cost(0, 0, 1.0, 0.0), 1.0, 1000.0)
    replica, measures = machine(per_token)
    feed(replica, [arrival(0.0, 64, 1), arrival(10.0, 64, 1)])
    assert measures.times_to_first_token().tolist() == pytest.approx([0.064, 0.016])
    assert replica.scheduler.stats().prefix_hit_tokens == 48
    replica, measures = machine(per_token, prefix_cache=False)
    feed(replica, [arrival(0.0, 64, 1), arrival(10.0, 64, 1)])
    assert measures.times_to_first_token().tolist() == pytest.approx([0.064, 0.064])


def test_a_priority_takes_the_place_of_what_runs() -> None:
    def first_of_the_second(priority: int) -> tuple[float, int]:
        replica, measures = machine(max_rows=1, policy="priority")
        feed(replica, [arrival(0.0, 5, 200), arrival(0.5, 5, 1, number=1, priority=priority)])
        return measures.times_to_first_token()[1], replica.scheduler.stats().preemptions

    assert first_of_the_second(1)[0] < 0.05 < 1 < first_of_the_second(0)[0]
    assert (first_of_the_second(1)[1], first_of_the_second(0)[1]) == (1, 0)


def test_preempted_samples_come_back_and_their_gap_is_told_once() -> None:
    """Fixture F19: two samples that outgrow the cache together."""
    replica, measures = machine(num_blocks=8, max_rows=2)
    feed(replica, [arrival(0.0, 34, 35), arrival(0.0, 34, 35, number=1)])
    assert replica.scheduler.stats().preemptions >= 1
    assert measures.outputs.tolist() == [35, 35]
    assert len(gaps_of(measures)) == 68
    assert max(gaps_of(measures)) > 0.05, "the one that waited"
    assert sum(gaps_of(measures)) == pytest.approx(sum(measures.finished) - sum(measures.first))


def test_who_cannot_be_taken_is_refused_and_nobody_else() -> None:
    replica, measures = machine(num_blocks=5, max_waiting=2, max_rows=1)
    feed(replica, [arrival(0.0, 60, 30), arrival(0.0, 300, 1), *(arrival(0.0, 5, 3, number=n) for n in range(9))])
    assert measures.refused == 2 + 7, "two are too long, and only two may wait"
    assert measures.outputs.tolist() == [3, 3]


def test_a_bound_on_prompts_is_learned_from_simulated_times() -> None:
    def longest_gap(**bound: float) -> float:
        replica, measures = machine(StepTime(Cost(0, 0, 1.0, 0.0), 1.0, 1e4, per_step=0.01), **bound)
        many = [arrival(0.2, 200, 1, number=n) for n in range(1, 9)]
        feed(replica, [arrival(0.0, 5, 200), *many])
        return max(gaps_of(measures))

    assert longest_gap(max_prompt_ms=10.0) < 0.025 < 0.1 < longest_gap()


# The step's time


def test_a_roofline_is_that_of_products_plus_that_of_attention() -> None:
    """Each takes the root of both squares, which is due to reading and computing as the squares are."""
    time = StepTime(Cost(weight_bytes=300, kv_bytes=2, token_flop=50.0, attention_flop=1.0), 10.0, 100.0)
    assert time.roofline(decode_work(80, 0)) == pytest.approx((30 * 30 / 50, 40 * 40 / 50))
    assert time.roofline(Work(tokens=0, positions=60, pairs=500)) == pytest.approx((30 + 12 * 12 / 13, 5 * 5 / 13))
    assert time.roofline(Work(tokens=80, positions=60, pairs=500)) == pytest.approx((18 + 144 / 13, 32 + 25 / 13))
    nothing = StepTime(Cost(0, 0, 0.0, 0.0), 10.0, 100.0)
    assert nothing.roofline(decode_work(8, 50)) == (0.0, 0.0)


def test_a_roofline_has_no_jump_where_reading_and_computing_are_alike() -> None:
    time = StepTime(Cost(weight_bytes=1e10, kv_bytes=0, token_flop=1e10, attention_flop=0.0), 4e12, 7e14)
    slower = replace(time, compute_factor=1.5)
    seconds = [slower.seconds(decode_work(lanes, 0)) for lanes in range(1, 400)]
    assert all(before < after < 1.02 * before for before, after in pairwise(seconds))


def test_what_reads_and_what_computes_are_stretched_apart() -> None:
    cost = Cost(weight_bytes=300, kv_bytes=2, token_flop=50.0, attention_flop=1.0)
    time = StepTime(cost, 10.0, 100.0, read_factor=2.0, compute_factor=3.0, per_step=5.0)
    assert time.seconds(decode_work(80, 0)) == pytest.approx(2 * 18 + 3 * 32 + 5)


def test_a_chunk_reads_its_row_once_and_attends_to_all_before() -> None:
    """Steps of known work: chunks of 16 and 4 after each other, then a decode step."""
    seen = []

    class Watched(StepTime):
        def seconds(self, work: Work) -> float:
            seen.append(work)
            return 0.01

    replica, _ = machine(Watched(NOTHING, 1.0, 1.0), max_step_tokens=16, loop="sync")
    feed(replica, [arrival(0.0, 20, 2)])
    assert seen == [Work(16, 16, 136), Work(4, 20, 17 + 18 + 19 + 20), Work(1, 21, 21)]


def test_the_clock_overlaps_and_waits() -> None:
    clock = Clock(host=1.0)
    clock.launch(5.0)  # 1 to 6
    clock.launch(5.0)  # launched at 2, runs 6 to 11
    clock.wait()
    assert clock.now == 6.0
    clock.launch(0.5)
    clock.wait()
    clock.wait()
    assert (clock.now, clock.busy) == (11.5, 10.5)


def test_gap_percentiles_count_each_gap_as_often_as_it_was() -> None:
    measures = Measures()
    measures.gap(3.0, 1)
    measures.gap(1.0, 98)
    measures.gap(2.0, 1)
    assert measures.gap_percentiles(50, 98, 99, 100) == [1.0, 1.0, 2.0, 3.0]
    assert np.isnan(Measures().gap_percentiles(50)).all()


# Against the engine's loops


class PaperInbox:
    """Arrivals as commands; who blocks on it is taken to the next one."""

    def __init__(self, replica, arrivals) -> None:
        self.replica, self.left, self.open = replica, deque(arrivals), True

    def take(self, *, block: bool):
        if block and self.left:
            self.replica.clock.rest(self.left[0].time)
        elif block:
            self.open = False
        due = []
        while self.left and self.left[0].time <= self.replica.clock.now:
            due.append(self.left.popleft())
        return [lambda _, one=one: self.replica.submit(one) for one in due]


class PaperRunner:
    """Launches and waits on the replica's clock; notes every plan and commit."""

    def __init__(self, replica, log) -> None:
        self.replica, self.log = replica, log

    def launch(self, plan, slot) -> None:
        self.replica._launch(plan)
        self.log.append((plan.step, plan.lane_rows.tolist(), plan.chunks.tolist()))

    def complete(self, unhold) -> None: ...

    def rest(self) -> None: ...

    def wait(self, plan, slot) -> StepOutput:
        self.replica.clock.wait()
        self.replica.in_flight.popleft()
        self.log.append(self.replica.clock.now)
        rows = plan.sampled_rows()
        return StepOutput(np.zeros(len(rows), np.int32), self.replica._flags(plan, rows))


def logged(replica) -> list:
    """Let a replica note what `PaperRunner` notes."""
    log, launch, commit = [], replica._launch, replica._commit

    def noted_launch(plan) -> None:
        launch(plan)
        log.append((plan.step, plan.lane_rows.tolist(), plan.chunks.tolist()))

    def noted_commit(plan, seconds) -> None:
        commit(plan, seconds)
        log.append(replica.clock.now)

    replica._launch, replica._commit, replica.shortcut = noted_launch, noted_commit, None
    return log


@pytest.mark.parametrize(("loop", "slots"), [("sync", 2), ("async", 2), ("async", 3)])
def test_turns_are_those_of_the_engines_own_loops(loop: str, slots: int) -> None:
    arrivals = list(Traffic(requests=60, rate=150.0, prompt_tokens=(1, 60), output_tokens=(1, 50), seed=3))
    options = {"max_rows": 6, "max_step_tokens": 40, "num_blocks": 20, "loop": loop, "slots": slots}
    real, _ = machine(VARYING, **options)
    log: list = []
    kind = SyncLoop if loop == "sync" else AsyncLoop
    kind(real.scheduler, PaperRunner(real, log), range(slots), PaperInbox(real, arrivals), lambda _: None).run()
    simulated, _ = machine(VARYING, **options)
    own = logged(simulated)
    feed(simulated, arrivals)
    assert own == log
    assert simulated.scheduler.stats().preemptions > 0


# What is kept whatever happens


@given(
    st.lists(
        st.tuples(
            *(st.floats(0, 0.3), st.integers(1, 90), st.integers(1, 40)),
            *(st.integers(0, 30), st.integers(0, 2), st.booleans()),
        ),
        max_size=20,
    ),
    st.integers(1, 3),
    st.sampled_from(["round-robin", "least-loaded", "prefix-aware"]),
    st.sampled_from(["fcfs", "priority", "shortest"]),
)
@settings(max_examples=25, deadline=None)
def test_every_request_ends_once_with_its_tokens(drawn, replicas, routing, policy) -> None:
    drawn.sort(key=lambda one: one[0])
    arrivals = []
    for number, (time, prompt, outputs, more, priority, shares) in enumerate(drawn):
        shared, level = min(prompt, 32) * shares, priority if policy == "priority" else 0
        arrivals.append(arrival(time, prompt, outputs, outputs + more, number, level, shared))
    given = Settings(max_rows=3, max_step_tokens=24, num_blocks=9, max_model_len=100, policy=policy)
    report = simulate(arrivals, given, VARYING, 0, replicas=replicas, routing=routing)
    measures = report.measures
    assert (report.requests, report.refused) == (len(arrivals), 0)
    assert measures.outputs.tolist() == [min(one.output_tokens, 100 - len(one.prompt)) for one in arrivals]
    assert report.prompt_tokens == sum(len(one.prompt) for one in arrivals)
    assert (measures.times_to_first_token() > 0).all()
    assert (np.array(measures.finished) >= np.array(measures.first)).all()
    assert sum(measures.gap_counts) == report.output_tokens - report.requests
    assert np.dot(measures.gaps, measures.gap_counts) == pytest.approx(sum(measures.finished) - sum(measures.first))


def test_the_same_input_gives_the_same_figures() -> None:
    def figures(seed: int) -> tuple:
        traffic = Traffic(requests=200, rate=80.0, prompt_tokens=(10, 90), output_tokens=(5, 60), turns=3, seed=seed)
        report = simulate(traffic, Settings(max_rows=8, num_blocks=60), VARYING, 0, replicas=2, routing="prefix-aware")
        measures = report.measures
        return measures.first.tolist(), measures.finished.tolist(), measures.gaps.tolist(), report.cached_share

    assert figures(0) == figures(0) != figures(1)


# Many replicas


def test_twice_the_replicas_serve_twice_the_rate_alike() -> None:
    def waits(replicas: int, rate: float) -> float:
        traffic = Traffic(requests=400, rate=rate, prompt_tokens=(20, 20), output_tokens=(20, 20))
        return simulate(traffic, Settings(max_rows=4), TEN_MS, 1e9, replicas=replicas).first_token_p50

    assert waits(1, 10.0) < 0.05 < 1 < waits(1, 40.0)
    assert waits(4, 40.0) < 0.05


def test_cost_counts_every_replica_from_the_first_arrival_to_the_last_token() -> None:
    report = simulate([arrival(5.0, 5, 3), arrival(6.0, 5, 1)], Settings(), TEN_MS, 1e9, replicas=2)
    assert report.seconds == pytest.approx(1.011)
    assert report.gpu_hours == pytest.approx(2 * 1.011 / 3600)
    assert report.cost_per_million(3600.0) == pytest.approx(1e6 * 2 * 1.011 / 4)
    assert report.busy_share == pytest.approx(0.040 / (2 * 1.011))


def test_an_empty_trace_has_an_empty_report() -> None:
    report = simulate([], Settings(), TEN_MS, 1e9)
    assert (report.requests, report.tokens_per_s, report.gpu_hours) == (0, 0.0, 0.0)


@pytest.mark.parametrize(("name", "value"), [("max_rows", 0), ("policy", "random"), ("slots", 99), ("patience", 3.0)])
def test_settings_are_checked_like_an_engines(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig, match=name):
        simulate([], Settings(**{name: value}), TEN_MS, 1e9)


def test_the_cache_takes_what_weights_leave() -> None:
    cost = Cost(weight_bytes=1000, kv_bytes=10, token_flop=0.0, attention_flop=0.0)
    given = Settings(max_rows=4, max_model_len=100, block_size=10)
    assert given.blocks(cost, 2000) == 10
    assert given.blocks(cost, 1e9) == 1 + 4 * 10, "no more than all rows can use"
    assert Settings(num_blocks=77).blocks(cost, 2000) == 77
    assert Settings(cache_bytes=1600).blocks(cost, 0) == 10
    with pytest.raises(InvalidConfig, match="at least 2"):
        given.blocks(cost, 1050)
