"""The host tier on a paper device: what goes to the host, what comes back, and who waits for which copy.

The paper device makes copies as late as it may, so a step that does not wait for one reads or writes the wrong tokens.
"""

import pytest
from workshop import Workshop
from workshops import every_depth, finish, turn_until

from twostroke.request import FinishReason, SampleState
from twostroke.scheduler.policy import make_policy

every_lag = pytest.mark.parametrize("lag", [0, 2, 1000])
"""Polls after which a copy is made that nobody waits for."""


def stats(shop):
    return shop.scheduler.stats()


@every_depth
@every_lag
def test_f19_a_preempted_sample_comes_back_from_the_host(depth, lag):
    shop = Workshop(depth=depth, lag=lag, host_slots=20, block_size=4, usable_blocks=14)
    for _ in range(2):
        shop.submit(17, 35)
    finish(shop)
    after = stats(shop)
    assert after.preemptions > 0
    assert 0 < after.returned_blocks <= after.offloaded_blocks
    assert after.host_hit_tokens == 4 * after.returned_blocks


@every_depth
@every_lag
@pytest.mark.parametrize("slots", [1, 2, 5, 40])
def test_a_second_tier_for_prefixes(depth, lag, slots):
    """Turns of three conversations that do not fit into the device's cache together, in hosts of all sizes."""
    shop = Workshop(depth=depth, lag=lag, host_slots=slots, block_size=4, usable_blocks=12)
    talks = [[n] * 13 for n in range(3)]
    for _ in range(3):
        for number, talk in enumerate(talks):
            sample = shop.submit(talk, 6)
            shop.drain()
            talks[number] = [*sample.tokens.tolist(), 7]
            assert stats(shop).host_blocks <= slots
    shop.check_all()
    if slots == 40:
        assert stats(shop).host_hit_tokens > 60
        assert shop.samples[-1].cached_tokens == (shop.samples[-1].prompt_len - 2) // 4 * 4


@every_depth
def test_the_chains_end_is_overwritten_first(depth):
    """What is left of a chain on a host that is too small is its beginning."""
    shop = Workshop(depth=depth, host_slots=3, block_size=4, usable_blocks=6)
    shop.submit([1] * 21, 2)
    shop.drain()
    shop.submit([2] * 21, 2)
    shop.drain()
    shop.submit([2] * 21, 2)
    finish(shop)
    again = shop.submit([2] * 21, 1)
    finish(shop)
    assert again.cached_tokens == 20


@every_depth
@pytest.mark.parametrize("leaves", ["returns", "cancelled"])
def test_who_was_preempted_has_its_slots_until_it_returns_or_ends(depth, leaves):
    """Those that took its place end, and are evicted for it in turn: they are saved over nothing that is awaited."""
    policy = make_policy("priority", None)
    shop = Workshop(depth=depth, host_slots=24, block_size=4, usable_blocks=26, max_rows=2, policy=policy)
    low = [shop.submit([n] * 41, 10, ignore_eos=True) for n in (1, 2)]
    turn_until(shop, lambda: all(shop.known_outputs(sample) for sample in low))
    shop.submit([3] * 41, 10, priority=1, ignore_eos=True)
    shop.submit([4] * 41, 10, priority=1, ignore_eos=True)
    turn_until(shop, lambda: stats(shop).preemptions == 2)
    if leaves == "cancelled":
        for sample in low:
            shop.cancel(sample)
    finish(shop)
    assert stats(shop).returned_blocks >= 20 or leaves == "cancelled"
    shop.submit([5] * 101, 1)
    shop.submit([6] * 101, 1)
    finish(shop)
    shop.submit([5] * 97, 1)
    finish(shop)
    assert shop.samples[-1].cached_tokens == 96, "nobody is awaited any more"


@every_depth
def test_others_run_while_blocks_are_on_their_way(depth):
    """The sample that comes back sits steps out, and no step waits for its copy."""
    shop = Workshop(depth=depth, lag=6, host_slots=40, block_size=4, usable_blocks=20)
    shop.submit([5] * 33, 1)
    shop.drain()
    shop.submit([6] * 78, 1)
    shop.drain()
    shop.submit([7] * 3, 30)
    turn_until(shop, lambda: stats(shop).running == 1)
    first = len(shop.plans)
    back = shop.submit([5] * 33, 1)
    finish(shop)
    assert back.cached_tokens == 32
    loading = next(n for n, plan in enumerate(shop.plans) if len(plan.loads))
    row = shop.plans[loading].joins["row"][0]
    begun = next(n for n, plan in enumerate(shop.plans) if n >= loading and row in plan.chunks[:, 0])
    assert loading >= first
    assert begun - loading >= 6
    assert all(plan.num_lanes for plan in shop.plans[loading:begun])
    assert all(plan.after < plan.step for plan in shop.plans[loading + 1 : begun])


@every_depth
@every_lag
def test_with_nothing_else_to_run_the_device_waits(depth, lag):
    shop = Workshop(depth=depth, lag=lag, host_slots=40, block_size=4, usable_blocks=20)
    shop.submit([5] * 33, 1)
    shop.drain()
    shop.submit([6] * 78, 1)
    shop.drain()
    back = shop.submit([5] * 33, 2)
    plan = shop.launch()
    assert len(plan.loads) == 8
    assert (plan.after, plan.chunks[0, 1]) == (plan.step, 32)
    finish(shop)
    assert back.cached_tokens == 32


@every_depth
def test_a16_a17_cancelled_while_its_blocks_are_on_their_way(depth):
    """The blocks are given to others, who wait for the copy that still writes them."""
    shop = Workshop(depth=depth, lag=1000, host_slots=40, block_size=4, usable_blocks=20)
    shop.submit([5] * 33, 1)
    shop.drain()
    shop.submit([6] * 78, 1)
    shop.drain()
    shop.submit([7] * 3, 30)
    turn_until(shop, lambda: stats(shop).running == 1)
    back = shop.submit([5] * 33, 20)
    turn_until(shop, lambda: back.state is SampleState.RUNNING)
    assert len(shop.plans[-1].loads) == 8
    loading = shop.plans[-1].step
    shop.cancel(back)
    other = shop.submit([8] * 50, 4)
    finish(shop)
    assert back.finish_reason is FinishReason.CANCELLED
    assert other.finish_reason is FinishReason.LENGTH
    held = [plan.after for plan in shop.plans if plan.step > loading]
    assert max(held) >= loading, "nobody waited for the copy"


@every_depth
@every_lag
@pytest.mark.parametrize("how", ["reset", "weights", "recompute", "sleep"])
def test_f14_what_the_host_has_is_forgotten_with_the_cache(depth, lag, how):
    shop = Workshop(depth=depth, lag=lag, host_slots=40, block_size=4, usable_blocks=20)
    for n in (5, 6, 5):
        shop.submit([n] * 45, 9)
    turn_until(shop, lambda: stats(shop).host_blocks > 4)
    acts = {
        "reset": shop.reset,
        "weights": lambda: shop.change_weights(recompute=False),
        "recompute": lambda: shop.change_weights(recompute=True),
        "sleep": shop.empty_cache,
    }
    acts[how]()
    assert stats(shop).host_blocks == 0
    finish(shop)
    before = stats(shop).host_hit_tokens
    shop.reset()
    sample = shop.submit([5] * 45, 1)
    finish(shop)
    assert (sample.cached_tokens, stats(shop).host_hit_tokens) == (0, before)


@every_depth
@every_lag
def test_f18_forks_whose_blocks_come_back(depth, lag):
    shop = Workshop(depth=depth, lag=lag, host_slots=40, block_size=4, usable_blocks=16)
    shop.submit(18, 25, n=3)
    shop.submit(11, 20, n=2)
    finish(shop)
    assert stats(shop).preemptions > 0
    assert stats(shop).returned_blocks > 0


@every_depth
@every_lag
def test_who_is_preempted_for_a_higher_priority_loses_nothing(depth, lag):
    """Its blocks are given out in the very step that preempts it: that step waits until they are saved."""
    policy = make_policy("priority", 30.0)
    shop = Workshop(depth=depth, lag=lag, host_slots=40, block_size=4, usable_blocks=16, policy=policy)
    low = shop.submit(40, 20, priority=0)
    turn_until(shop, lambda: shop.known_outputs(low) > 8)
    shop.submit(50, 10, priority=2)
    finish(shop)
    assert low.preemptions == 1
    assert any(plan.after == plan.step and len(plan.saves) for plan in shop.plans)
    assert stats(shop).host_hit_tokens >= 40


def test_a_block_is_copied_once():
    """What came back is known to be on the host, and is not saved again when it is evicted again."""
    shop = Workshop(host_slots=40, block_size=4, usable_blocks=10)
    for n in (1, 2) * 4:
        shop.submit([n] * 33, 1)
        shop.drain()
    shop.check_all()
    assert stats(shop).offloaded_blocks == 16
    assert stats(shop).returned_blocks >= 6 * 6


def test_a_roomy_cache_copies_nothing():
    shop = Workshop(host_slots=40, block_size=4, usable_blocks=200, ahead=30)
    for n in range(4):
        shop.submit([n] * 33, 9)
    finish(shop)
    assert stats(shop).offloaded_blocks == 0
    assert all(plan.after == -1 for plan in shop.plans)


class TestRecomputation:
    """Where copies do not pay, samples are computed again."""

    @every_depth
    def test_nothing_is_copied(self, depth, monkeypatch):
        monkeypatch.setattr("paper_device.EveryCopyPays.worthwhile", lambda self, blocks, copies: 0)
        shop = Workshop(depth=depth, host_slots=40, block_size=4, usable_blocks=14)
        for _ in range(2):
            shop.submit(17, 35)
        finish(shop)
        assert stats(shop).preemptions > 0
        assert (stats(shop).offloaded_blocks, stats(shop).returned_blocks) == (0, 0)

    @every_depth
    def test_nothing_is_brought_back(self, depth, monkeypatch):
        """Then copies became slow."""
        shop = Workshop(depth=depth, host_slots=40, block_size=4, usable_blocks=14)
        for _ in range(2):
            shop.submit(17, 35)
        turn_until(shop, lambda: stats(shop).offloaded_blocks > 3)
        monkeypatch.setattr("paper_device.EveryCopyPays.worthwhile", lambda self, blocks, copies: 0)
        finish(shop)
        assert stats(shop).returned_blocks == 0
