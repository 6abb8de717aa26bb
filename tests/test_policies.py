"""Whose turn it is: first come, priority, shortest prompt; and that nobody waits for ever, whoever comes meanwhile."""

import pytest
from engines import MODES, running
from hypothesis import given, settings
from hypothesis import strategies as st
from watching import PATIENCE, wait_until
from workshop import Workshop
from workshops import every_depth, finish

from twostroke import InvalidRequest, SamplingParams
from twostroke.scheduler.policies.first_come import FirstCome
from twostroke.scheduler.policies.priority import Priority
from twostroke.scheduler.policies.shortest_prompt import ShortestPrompt

LEAD = 10.0
"""Seconds that a level of priority is worth."""


def order_of_turns(shop: Workshop) -> list[int]:
    """Run until the end; return the numbers of the samples in the order of their first admission."""
    finish(shop)
    return sorted(range(len(shop.samples)), key=lambda number: shop.samples[number].timings.admitted)


def one_row(policy, **config) -> Workshop:
    return Workshop(max_rows=1, policy=policy, **config)


# Order


def test_first_come_heeds_neither_priority_nor_length():
    shop = one_row(FirstCome())
    for priority, length in ((0, 9), (2, 1), (1, 5)):
        shop.submit(length, 3, priority=priority)
    assert order_of_turns(shop) == [0, 1, 2]


def test_the_more_urgent_goes_first_and_equals_in_their_order():
    shop = one_row(Priority(LEAD))
    for priority in (0, 1, 0, 2, 1, -1):
        shop.submit(5, 3, priority=priority)
    assert order_of_turns(shop) == [3, 1, 4, 0, 2, 5]


def test_the_shorter_prompt_goes_first_and_equals_in_their_order():
    shop = one_row(ShortestPrompt(LEAD))
    for length in (9, 5, 7, 5, 8):
        shop.submit(length, 3)
    assert order_of_turns(shop) == [1, 3, 2, 4, 0]


def test_a_long_prompt_that_has_begun_gives_way_to_a_shorter_one():
    """Its chunks would fill every step; with first come the short one waits for the last of them."""
    for policy, expected in ((ShortestPrompt(LEAD), 1), (FirstCome(), 5)):
        shop = Workshop(policy=policy, max_step_tokens=8)
        shop.submit(40, 3)
        shop.turn()
        short = shop.submit(4, 1)
        while short.timings.admitted is None:
            shop.turn()
        assert len(shop.plans) - 1 == expected
        finish(shop)


# Preemption


@every_depth
def test_the_more_urgent_takes_a_row(depth):
    shop = one_row(Priority(LEAD), depth=depth)
    low = shop.submit(5, 30)
    for _ in range(8):
        shop.turn()
    high = shop.submit(5, 3, priority=1)
    finish(shop)
    assert (low.preemptions, high.preemptions) == (1, 0)
    assert shop.finals == [high, low]


@every_depth
def test_the_more_urgent_takes_blocks_from_the_last_rank_only(depth):
    shop = Workshop(depth=depth, policy=Priority(LEAD), block_size=4, usable_blocks=9, prefix_cache=False)
    samples = [shop.submit(10, 3 + priority, priority=priority) for priority in (1, 0, 2)]
    shop.turn()
    high = shop.submit(11, 1, priority=3)
    finish(shop)
    assert [sample.preemptions for sample in (*samples, high)] == [0, 1, 0, 0]


@every_depth
def test_a_prompt_that_fills_the_steps_is_no_obstacle(depth):
    shop = Workshop(depth=depth, policy=Priority(LEAD), max_step_tokens=4)
    shop.submit(60, 2)
    shop.turn()
    high = shop.submit(4, 2, priority=1)
    for _ in range(2 + depth):
        shop.turn()
    assert high in shop.finals
    finish(shop)


@every_depth
def test_nobody_is_preempted_by_an_equal_or_for_nothing(depth):
    shop = Workshop(depth=depth, policy=Priority(LEAD), block_size=4, usable_blocks=10, prefix_cache=False)
    first = shop.submit(20, 6, priority=2)  # 5 blocks, 7 in the end
    low = shop.submit(4, 8)
    shop.turn()
    shop.submit(5, 1, priority=0)  # an equal
    shop.submit(24, 1, priority=1)  # 6 blocks: more than the low one has
    while first not in shop.finals:
        shop.turn()
        assert low.preemptions == 0 or first in shop.finals
    finish(shop)


@every_depth
def test_a06_what_is_in_flight_when_a_row_is_taken_is_kept(depth):
    shop = one_row(Priority(LEAD), depth=depth)
    low = shop.submit(5, 40)
    shop.stream(low)
    for urgent in range(3):
        for _ in range(5):
            shop.turn()
        before = shop.known_outputs(low)
        high = shop.submit(3, 2, priority=1)
        while high not in shop.finals:
            shop.turn()
        assert shop.known_outputs(low) >= before
        assert low.preemptions == urgent + 1
    finish(shop)


# Nobody starves


@pytest.mark.parametrize(
    ("policy", "slow", "quick", "lead"),
    [
        (Priority(LEAD), dict(prompt=5, priority=0), dict(prompt=5, priority=2), 2 * LEAD),
        (ShortestPrompt(1000 * LEAD), dict(prompt=5), dict(prompt=3), 2 * LEAD),
    ],
)
def test_a_sample_is_overtaken_only_by_what_comes_within_the_lead(policy, slow, quick, lead):
    """One quick one comes every second for ever, and each needs longer than that."""
    shop = one_row(policy)
    shop.submit(max_tokens=6, at=0.0, **quick)
    waiting = shop.submit(max_tokens=6, at=0.5, **slow)
    for second in range(1, 100):
        shop.submit(max_tokens=6, at=float(second), **quick)
        for _ in range(5):
            shop.turn()
    overtakers = shop.finals[: shop.finals.index(waiting)]
    assert len(overtakers) == 1 + lead
    assert all(sample.timings.submitted <= waiting.timings.submitted + lead for sample in overtakers)
    finish(shop)


@every_depth
def test_who_has_run_for_the_lead_keeps_its_row(depth):
    shop = one_row(Priority(LEAD), depth=depth)
    low = shop.submit(5, 20, at=0.0)
    shop.turn()
    for second in (LEAD + 1, LEAD + 2):
        shop.submit(5, 2, priority=1, at=second)
    finish(shop)
    assert low.preemptions == 0


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from([FirstCome(), Priority(LEAD), ShortestPrompt(1000.0)]),
    depth=st.integers(1, 3),
    usable_blocks=st.integers(6, 14),
    max_rows=st.integers(1, 4),
    arrivals=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(-1, 2), st.integers(0, 6), st.integers(0, 6)),
        min_size=2,
        max_size=14,
    ),
)
def test_a42_a43_every_sample_ends_with_its_own_output_in_a_tiny_cache(
    policy, depth, usable_blocks, max_rows, arrivals
):
    """And whoever is admitted goes before all who wait then."""
    shop = Workshop(depth=depth, policy=policy, block_size=4, usable_blocks=usable_blocks, max_rows=max_rows)
    now = 0.0
    for length, output, priority, later, turns in arrivals:
        now += later
        shop.submit(length, output, priority=priority, at=now)
        for _ in range(turns):
            joined = _admitted_by(shop)
            waiting = [sample for sample in shop.scheduler.waiting if not sample.preemptions]
            assert all((one.rank, one.order) < (other.rank, other.order) for one in joined for other in waiting), (
                "somebody was passed over"
            )
    finish(shop)


def _admitted_by(shop: Workshop) -> list:
    before = {sample for sample in shop.samples if sample.timings.admitted is not None}
    shop.turn()
    return [sample for sample in shop.samples if sample.timings.admitted is not None and sample not in before]


# In an engine


@pytest.mark.parametrize("mode", MODES)
def test_an_urgent_request_goes_between_and_changes_nobody_s_tokens(mode):
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    urgent = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, priority=1)
    with running(mode, num_blocks=16, max_rows=1, policy="priority") as engine:
        alone = [engine.generate(prompt, params)[0].token_ids for prompt, params in (([5, 6], long), ([7], urgent))]
        engine.reset_prefix_cache()
        first = engine.submit([5, 6], long)
        wait_until(lambda: engine.stats().running == 1)
        second = engine.submit([7], urgent)
        assert second.result(PATIENCE).token_ids == alone[1]
        output = first.result(PATIENCE)
        assert output.token_ids == alone[0]
        assert output.preemptions == engine.stats().preemptions == 1
        assert output.timings.finished > second.result().timings.finished


def test_priority_is_refused_where_nobody_heeds_it():
    with running("sync", num_blocks=8) as engine:
        with pytest.raises(InvalidRequest, match="priority=3 needs an engine with policy='priority'"):
            engine.submit([5], SamplingParams(priority=3))
        assert engine.generate([5], SamplingParams(priority=0, max_tokens=2))[0].token_ids
