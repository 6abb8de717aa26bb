"""Preemption by recomputation, on a paper device, committing at once and with steps in flight."""

import numpy as np
import pytest
from workshop import Workshop
from workshops import every_depth, f19, finish, positions_of

from twostroke.request import Sample, SampleState
from twostroke.scheduler.policies.priority import Priority


@every_depth
def test_f19_f16_preemption_changes_no_token(depth):
    shop = f19(depth)
    finish(shop)
    older, younger = shop.samples
    assert (older.preemptions, younger.preemptions) == (0, 1)
    assert shop.scheduler.stats().preemptions == 1
    assert len(older.output) == len(younger.output) == 35


@every_depth
def test_c07_a_readmitted_row_goes_on_with_its_output_count(depth):
    shop = f19(depth)
    finish(shop)
    joins = np.concatenate([plan.joins for plan in shop.plans])
    assert joins["outputs"].tolist()[:2] == [0, 0]
    assert joins["outputs"][2] > 0
    assert joins["max_outputs"].tolist() == [35] * 3


@every_depth
def test_a09_the_token_in_flight_of_a_preempted_sample_is_kept(depth):
    shop = f19(depth)
    while not shop.scheduler.stats().preemptions:
        shop.turn()
    younger = shop.samples[1]
    shop.stream(younger)
    while shop.in_flight:
        shop.commit()
    positions = positions_of(shop.plans, 1)
    assert len(younger.tokens) == positions + 1  # each decode position gave its token
    finish(shop)


@every_depth
@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_f03_preempted_after_its_first_token(depth, outputs):
    """It prefills again, its output too, and its next token is sampled at the end of that: no count tells a prefill."""
    shop = Workshop(depth=depth, policy=Priority(10.0), max_rows=1, max_chunk_tokens=4, prefix_cache=False)
    low = shop.submit(6, 12)
    shop.stream(low)
    shop.turn()
    while shop.known_outputs(low) < outputs:
        shop.turn()
    shop.submit(5, 3, priority=1)
    finish(shop)
    assert low.preemptions == 1
    assert len(low.output) == 12


def thrash(depth: int) -> Workshop:
    shop = Workshop(depth=depth, block_size=16, usable_blocks=33, max_rows=8, max_step_tokens=128)
    for _ in range(8):
        shop.submit(100, 100)
    finish(shop)
    return shop


def test_a05_a06_overlap_preempts_no_more_than_synchronous():
    sync, *others = (thrash(depth) for depth in (1, 2, 3))
    preemptions = sync.scheduler.stats().preemptions
    assert preemptions > 0
    for other in others:
        assert other.scheduler.stats().preemptions <= 1.25 * preemptions + 1
        assert len(other.plans) <= 1.1 * len(sync.plans) + 10


@every_depth
def test_a43_two_samples_that_miss_one_block_do_not_ping_pong(depth):
    shop = Workshop(depth=depth, block_size=4, usable_blocks=15)
    shop.submit(8, 25)  # 32 positions, 8 blocks
    shop.submit(8, 25)
    finish(shop)
    assert shop.scheduler.stats().preemptions == 1


@every_depth
def test_a43_a_preempted_sample_comes_back_only_with_headroom(depth):
    """When the first ends, its blocks would just hold the preempted third, until the second needs its next one."""
    shop = Workshop(depth=depth, block_size=2, usable_blocks=13)
    for length, max_tokens in ((2, 11), (4, 17), (5, 16)):
        shop.submit(length, max_tokens)
    finish(shop)
    assert [sample.preemptions for sample in shop.samples] == [0, 0, 1]


@every_depth
def test_a42_the_oldest_advances_in_every_step_of_a_thrash(depth):
    shop = Workshop(depth=depth, block_size=2, usable_blocks=9, max_rows=4)
    for number in range(8):
        shop.submit(1 + number % 5, 12, stop_token_ids=range(6))
    idle = 0
    for _ in range(500):
        oldest = min(
            (s for s in shop.samples if s.state is not SampleState.FINISHED), key=lambda s: s.order, default=None
        )
        if oldest is None:
            break
        before = length_of(shop, oldest)
        shop.turn()
        idle = 0 if oldest.state is SampleState.FINISHED or length_of(shop, oldest) > before else idle + 1
        assert idle <= 3 * depth
    finish(shop)


def length_of(shop: Workshop, sample: Sample) -> int:
    """Confirmed positions of a running sample, tokens of another."""
    row = shop.scheduler.batch.row_of.get(sample)
    return len(sample.tokens) if row is None else int(shop.scheduler.rows.confirmed[row])


@every_depth
def test_a_row_waits_for_blocks_that_releases_will_bring(depth):
    """The ended sample's blocks are on their way: nobody is preempted for want of them."""
    shop = Workshop(depth=depth, block_size=4, usable_blocks=5)
    shop.submit(5, 3)  # 7 positions in 2 blocks; its last step is the one before the other runs out
    longer = shop.submit(10, 8)  # 17 positions in 5 blocks; the last two must come from the first
    finish(shop)
    assert shop.scheduler.stats().preemptions == 0
    assert len(longer.output) == 8


def test_a_preempted_prefill_starts_again():
    shop = Workshop(depth=2, block_size=2, usable_blocks=12, max_step_tokens=3, max_rows=3)
    first = shop.submit(2, 22)
    second = shop.submit(18, 4)
    finish(shop)
    assert second.preemptions > 0
    assert len(first.output) == 22


@every_depth
def test_two_cache_groups_have_tables_of_their_own(depth):
    shop = Workshop(depth=depth, block_size=4, usable_blocks=14, windows=(0, 0))
    for _ in range(3):
        shop.submit(9, 10, stop_token_ids=range(5))
    finish(shop)
    deltas = np.concatenate([plan.block_deltas for plan in shop.plans])
    assert (np.bincount(deltas[:, 0]) == len(deltas) // 2).all()


@every_depth
def test_block_numbers_fit_when_a_prompt_ends_at_an_edge(depth):
    for length, max_tokens in ((15, 17), (16, 17), (17, 17), (16, 1), (17, 1), (17, 16), (16, 16)):
        shop = Workshop(depth=depth, block_size=16, usable_blocks=6)
        shop.submit(length, max_tokens)
        shop.submit(1, 20)  # keeps the steps going: 2 blocks
        finish(shop)
        blocks = sum(len(plan.block_deltas) for plan in shop.plans) - 2
        assert blocks == -(-(length + max_tokens - 1) // 16)
