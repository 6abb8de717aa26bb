"""Forks on a paper device: what they share, what is copied for them, and who waits for whom."""

import numpy as np
from workshop import Workshop
from workshops import every_depth, finish

from twostroke.request import FinishReason, SampleState


def prompt_positions(shop):
    return sum(len(plan.prompt_tokens) for plan in shop.plans)


def copies(shop):
    return np.concatenate([plan.block_copies for plan in shop.plans])


@every_depth
def test_forks_share_full_blocks_and_get_a_copy_of_the_last(depth):
    """18 tokens in blocks of 8: two full ones are shared, the third is copied, and the last token computed again."""
    shop = Workshop(depth=depth, prefix_cache=False, windows=(0, 0), block_size=8)
    shop.submit(18, 8, n=4)
    while len(shop.scheduler.batch.row_of) < 4:
        shop.turn()
    assert shop.scheduler.pool.sharers.sum() == 2 * 2 * 3
    assert shop.scheduler.stats().free_blocks == 256 - 2 * (2 + 4)
    finish(shop)
    assert prompt_positions(shop) == 18 + 3
    assert copies(shop).shape == (2 * 3, 2)
    assert len(set(copies(shop)[:, 0].tolist())) == 2
    assert shop.scheduler.stats().preemptions == 0


@every_depth
def test_nothing_is_copied_where_the_last_token_begins_a_block(depth):
    for length in (1, 9):
        shop = Workshop(depth=depth, prefix_cache=False)
        shop.submit(length, 8, n=3)
        finish(shop)
        assert not len(copies(shop))
        assert prompt_positions(shop) == length + 2


@every_depth
def test_a_whole_last_block_is_copied_too(depth):
    """Its last token is computed again, and nobody writes a shared block."""
    shop = Workshop(depth=depth, prefix_cache=False)
    shop.submit(8, 8, n=3)
    finish(shop)
    assert len(copies(shop)) == 2
    assert prompt_positions(shop) == 8 + 2


@every_depth
def test_rows_are_kept_for_forks(depth):
    """Requests behind it do not take them while the prompt is computed."""
    shop = Workshop(depth=depth, max_rows=4, max_chunk_tokens=2)
    shop.submit(10, 20, n=3)
    others = [shop.submit(3, 20) for _ in range(3)]
    while shop.scheduler.forks.pending:
        shop.turn()
    shop.turn()
    running = [sample.state is SampleState.RUNNING for sample in shop.samples]
    assert running == [True, True, True, True, False, False]
    assert others[0].order > shop.samples[2].order
    finish(shop)


@every_depth
def test_a_request_wider_than_the_batch(depth):
    shop = Workshop(depth=depth, max_rows=3)
    shop.submit(10, 6, n=9)
    shop.submit(5, 6)
    finish(shop)


@every_depth
def test_if_the_first_sample_is_cancelled_the_next_computes_the_prompt(depth):
    for turns in range(5):
        shop = Workshop(depth=depth, max_chunk_tokens=4, prefix_cache=False)
        first = shop.submit(12, 6, n=3)
        for _ in range(turns):
            shop.turn()
        shop.cancel(first)
        finish(shop)
        reasons = [sample.finish_reason for sample in shop.samples]
        assert reasons == [FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.LENGTH]


@every_depth
def test_a_sample_that_waits_for_the_prompt_can_be_cancelled(depth):
    shop = Workshop(depth=depth, max_chunk_tokens=4)
    shop.submit(12, 6, n=3)
    shop.turn()
    assert shop.scheduler.stats().waiting == 2
    shop.cancel(shop.samples[1])
    assert shop.scheduler.stats().waiting == 1
    assert shop.scheduler.forks.promised == 1
    finish(shop)


@every_depth
def test_bad_logits_of_the_first_sample_hurt_no_other(depth):
    shop = Workshop(depth=depth)
    first = shop.submit(10, 6, n=3, nan_at=0)
    for fork in shop.samples[1:]:
        del shop.device.nan_at[fork.seed]
    finish(shop)
    assert first.finish_reason is FinishReason.ERROR


@every_depth
def test_f18_forks_and_others_are_preempted_and_come_back(depth):
    shop = Workshop(depth=depth, block_size=2, usable_blocks=14, max_rows=6)
    for _ in range(3):
        shop.submit(7, 9, n=3, stop_token_ids=range(5))
    finish(shop)
    assert shop.scheduler.stats().preemptions > 0
    assert sum(sample.preemptions for sample in shop.samples if sample.index) > 0


@every_depth
def test_an_heir_begins_no_earlier_than_its_request(depth):
    """The first sample ends before it has begun, while others drain: the next one waits outside in its place."""
    for hold_first in (True, False):
        shop = Workshop(depth=depth, max_rows=1)
        running = shop.submit(10, 20)
        shop.turn()
        early = [] if hold_first else [shop.submit(10, 6, n=3)]
        if not hold_first:
            shop.cancel(early[0])
        quiet = shop.hold(drain=True)
        if hold_first:
            early = [shop.submit(10, 6, n=3)]
            shop.cancel(early[0])
        while not quiet:
            shop.turn()
        assert running.state is SampleState.FINISHED
        assert [sample.timings.admitted for sample in shop.samples[1:]] == [None] * 3
        assert shop.scheduler.stats().waiting == 2
        shop.cancel(shop.samples[2])
        assert shop.scheduler.stats().waiting == 1
        shop.release()
        finish(shop)
        assert shop.samples[3].finish_reason is FinishReason.LENGTH


@every_depth
def test_an_heir_of_a_request_that_has_begun_goes_on_while_others_drain(depth):
    shop = Workshop(depth=depth, max_rows=1, max_step_tokens=4)
    first = shop.submit(10, 6, n=2)
    shop.turn()
    assert first.timings.admitted is not None
    shop.cancel(first)
    quiet = shop.hold(drain=True)
    shop.submit(5, 3)
    while not quiet:
        shop.turn()
    assert [sample.state is SampleState.FINISHED for sample in shop.samples] == [True, True, False]
    shop.release()
    finish(shop)


@every_depth
def test_abandon_reports_every_sample_once(depth):
    shop = Workshop(depth=depth, max_rows=2)
    shop.submit(10, 6, n=4)
    shop.submit(10, 6, n=4)
    shop.turn()
    assert shop.scheduler.abandon().finished == shop.samples
    assert not shop.scheduler.forks.pending
    assert not shop.scheduler.forks.promised
