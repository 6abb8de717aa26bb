"""What copies between device and host cost, and what computing costs: learned from times that follow a law.

The law is what a model of 8B may take on an H200, for blocks of 4 tokens in place of 16.
"""

from __future__ import annotations

from itertools import chain, repeat

import pytest
from workshop import Workshop
from workshops import every_depth, finish, turn_until

from twostroke.cache.copy_costs import RETRY_EVERY, CopyCosts
from twostroke.scheduler.policy import make_policy

COPY = 42e-6
"""Seconds per block."""

BEGIN = 150e-6
"""Seconds of every transfer: it is queued while the stream's clock runs."""

TOKEN = 88e-6
"""Seconds per prompt token."""

SHORTEST = 0.007
"""Seconds of a step of few tokens."""


def known(token=TOKEN, copy=COPY):
    """Costs that know what steps and copies take."""
    costs = CopyCosts(block_size=4)
    costs.observe_step(0, 200, 200 * token)
    observe(costs, 64, 64 * copy)
    return costs


def observe(costs, blocks, seconds):
    """Learn from so many copies there, and from as many back."""
    costs.observe_saves(blocks, seconds)
    costs.observe_loads(blocks, seconds)


def retried(costs, blocks, times, copies=2):
    """What is copied all the same, of so many times."""
    return [number for number in range(1, times + 1) if costs.worthwhile(blocks, copies)]


def test_copies_pay_until_both_times_are_known():
    costs = CopyCosts(block_size=16)
    assert costs.pays(2)
    observe(costs, 10, 100.0)
    assert costs.pays(2)
    costs.observe_step(4, 20, 1.0)  # what the lanes take alone is not known
    assert costs.pays(2)
    costs.observe_step(0, 20, 1.0)
    assert not costs.pays(1)


@pytest.mark.parametrize("lanes", [0, 8])
def test_what_takes_less_pays(lanes):
    """A prompt token takes 1 ms, so a block of 16 takes 16."""
    costs = CopyCosts(block_size=16)
    for _ in range(5):
        costs.observe_step(lanes, 0, 0.5)
        costs.observe_step(lanes, 100, 0.1 + (0.5 if lanes else 0))
        observe(costs, 4, 4 * 0.010)
    assert costs.pays(1)
    assert not costs.pays(2)
    assert costs.worthwhile(70, 1) == 70
    assert costs.save_seconds == pytest.approx(0.010)
    assert costs.compute_seconds == pytest.approx(0.016)


def test_both_ways_have_their_times():
    costs = known()
    for _ in range(10):
        costs.observe_saves(100, 100 * 0.01)
    assert not costs.pays(2)
    assert costs.pays(1)
    assert costs.load_seconds == pytest.approx(COPY)
    assert costs.copies_per_step < 5


def test_what_does_not_pay_is_tried_again_soon_and_then_seldom():
    costs = known(copy=9.0)
    early = [1, 2, 4, 8, 16, 32]
    assert retried(costs, 50, 3 * RETRY_EVERY) == [*early, RETRY_EVERY, 2 * RETRY_EVERY, 3 * RETRY_EVERY]
    assert retried(costs, 50, 40, copies=1) == early, "another question"


def test_a_few_blocks_are_tried():
    """As many as a step has time for, so that a slow way does not hold up anybody for long."""
    costs = known(copy=0.0004)
    for _ in range(40):
        costs.observe_step(8, 0, 0.004)
    assert costs.worthwhile(1000, 2) == 5
    assert costs.worthwhile(3, 2) == 3


def test_a_hiccup_changes_nothing():
    costs = known()
    observe(costs, 1, 1.0)
    assert costs.save_seconds < 1.1 * COPY
    observe(costs, 100, 1.0)
    assert costs.pays(2)


def test_a_slow_beginning_is_forgotten_at_once():
    costs = known(copy=1.0)
    assert not costs.pays(1)
    observe(costs, 2, copies(2))
    assert costs.pays(2)


def test_copies_that_become_slow_do_not_pay_any_more():
    costs = known()
    for _ in range(12):
        assert costs.worthwhile(50, 2)
        observe(costs, 50, 50 * 0.01)
        if not costs.pays(1):
            break
    assert not costs.pays(1)
    for _ in range(20):
        observe(costs, 50, 50 * 0.01)
    assert costs.save_seconds == pytest.approx(0.01, rel=0.2)


def test_many_small_transfers_say_less_than_a_large_one():
    """A cache that is full evicts a block now and then; each takes mostly what it takes to begin."""
    costs = known()
    for _ in range(500):
        observe(costs, 1, copies(1))
    assert costs.save_seconds < 2 * COPY < copies(1) / 2


def test_hits_say_little_of_what_prompts_take():
    """A step that computes the end of a prompt takes as long as one that reads all weights."""
    costs = known()
    for _ in range(200):
        costs.observe_step(0, 4, SHORTEST)
    assert costs.compute_seconds < 3 * 4 * TOKEN < SHORTEST / 4


def test_copies_beside_a_step_are_done_when_it_is():
    costs = CopyCosts(block_size=16)
    assert costs.copies_per_step == 64
    observe(costs, 10, 0.010)
    costs.observe_step(8, 0, 0.040)
    assert costs.copies_per_step == 20
    for _ in range(100):
        observe(costs, 1000, 1e6)
    assert costs.copies_per_step == 1


def test_a_clock_that_stands_still():
    costs = known()
    observe(costs, 10, 0.0)
    assert costs.copies_per_step > 1000
    for _ in range(30):
        observe(costs, 50, copies(50))
    assert costs.save_seconds > COPY / 2


# -- In a scheduler ---------------------------------------------------------------------------------------------------


def copies(blocks):
    return BEGIN + blocks * COPY


class Timed(Workshop):
    """A workshop in which steps take their time."""

    def __init__(self, usable, seconds_of, **options):
        super().__init__(
            block_size=4,
            usable_blocks=usable,
            max_step_tokens=256,
            host_slots=1000,
            ahead=8 + 256 // 4 + 1,
            copy_costs=CopyCosts(block_size=4),
            **options,
        )
        self.link.seconds_of = seconds_of

    def commit(self):
        plan = self.in_flight[0][0]
        self.scheduler.observe(plan.num_lanes, len(plan.prompt_tokens), max(SHORTEST, TOKEN * len(plan.prompt_tokens)))
        return super().commit()

    def returned(self, prompt):
        """Serve a prompt; tokens of it that came back from the host."""
        before = self.scheduler.stats().host_hit_tokens
        self.submit(prompt, 1)
        self.drain()
        return self.scheduler.stats().host_hit_tokens - before


def copies_late_by(*seconds):
    """Times of transfers, of which the first take so much longer."""
    extra = chain(seconds, repeat(0.0))
    return lambda blocks: copies(blocks) + next(extra) if blocks else 0.0


@every_depth
@pytest.mark.parametrize("late", [(), (0.001,), (1.0,), (0.001, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("usable", [50, 100, 130])
def test_slow_first_copies_do_not_keep_prompts_from_the_host(depth, late, usable):
    """Each prompt of 50 blocks comes twice, then again when others have pushed it out, as in `bench prefix`."""
    shop = Timed(usable, copies_late_by(*late), depth=depth)
    for first in (0, 8):
        prompts = [[first + n] * 200 for n in range(8)]
        for prompt in prompts:
            assert [shop.returned(prompt) for _ in range(2)] == [0, 0]
        back = [shop.returned(prompt) for prompt in prompts[:5]]
    finish(shop)
    assert back == [196] * 5


@every_depth
def test_a_way_that_is_slow_for_good_holds_up_nobody(depth):
    """It is tried now and then, by a few blocks each time, also where a whole cache is evicted at once."""
    policy = make_policy("priority", 30.0)
    shop = Timed(60, lambda blocks: 0.1 * blocks, depth=depth, policy=policy)
    shop.returned([0] * 200)
    observe(shop.scheduler.pool.tier.costs, 10, 1.0)
    for n in range(1, 21):
        low = shop.submit([n] * 200, 40, priority=0)
        turn_until(shop, lambda low=low: shop.known_outputs(low) > 1)
        shop.submit([n + 40] * 200, 20, priority=2)
        shop.drain()
        assert low.preemptions
    shop.check_all()
    copied = [len(plan.saves) + len(plan.loads) for plan in shop.plans]
    assert 0 < sum(copied) < 40
    assert max(copied) <= 3


@every_depth
def test_a_few_blocks_come_back_when_that_is_tried(depth):
    """All blocks are on the host when the way there becomes slow."""
    shop = Timed(100, copies_late_by(), depth=depth)
    for n in range(4):
        shop.returned([n] * 200)
    costs = shop.scheduler.pool.tier.costs
    for _ in range(40):
        observe(costs, 50, 50 * 0.001)
    assert not costs.pays(1)
    few = 4 * costs.copies_per_step
    assert 0 < few < 100
    assert shop.returned([0] * 200) == few
    finish(shop)
