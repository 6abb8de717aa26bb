"""Held rows in the scheduler: what becomes of a row whose mask comes too late, and of those around it."""

from __future__ import annotations

import pytest
from workshop import Workshop

from twostroke.request import SampleState


def late(shop: Workshop, prompt: int, output: int, *, after: int, gap: int = 1):
    """A sample whose masks come late once it has `after` tokens, and which has just become late."""
    sample = shop.submit(prompt, output, max_thinking_tokens=gap)
    while shop.known_outputs(sample) < after:
        shop.turn()
    shop.masks.slow = True
    while sample not in shop.scheduler.batch.held.late:
        assert sample.state is not SampleState.FINISHED
        shop.turn()
    return sample


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_late_row_computes_its_position_again(depth, after):
    """A30: with the same tokens as if the mask had been there."""
    shop = Workshop(depth=depth)
    late(shop, 6, 12, after=after)
    shop.drain()
    shop.check_all()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("how", ["cancel", "preempt"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_row_that_leaves_before_it_has_done_so_keeps_what_it_published(depth, how, after):
    """F14: the cache knew its prompt's blocks, which went back as if it did not, so others wrote into them."""
    shop = Workshop(depth=depth, block_size=2)
    sample = late(shop, 6, 12, after=after)
    while shop.turn():
        pass
    shop.masks.think()
    shop.masks.slow = False
    while shop._news:  # the mask has come, and the position waits to be computed again
        shop._news.pop(0)(shop.scheduler)
    if how == "cancel":
        shop.cancel(sample)
    else:
        shop.scheduler._planner.preempt_all()
    again = shop.submit(sample.request.prompt.tolist(), 4)
    shop.drain()
    shop.check_all()
    assert shop.hits[again] == (4 if after else 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("after", [3, 6, 9])
def test_a_mask_that_was_not_used_before_a_preemption_is_used_after_it(depth, after):
    """A30, C42: a constraint says from which token on it must be asked again as soon as it has filled a mask."""
    shop = Workshop(depth=depth)
    sample = late(shop, 6, 20, after=after, gap=3)
    shop.masks.think()
    shop.scheduler._planner.preempt_all()
    assert sample.state is SampleState.WAITING
    shop.masks.slow = False
    shop.drain()
    shop.check_all()
    assert sample.preemptions == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_position_that_is_computed_again_after_an_update_is_of_the_new_weights(depth):
    shop = Workshop(depth=depth)
    sample = shop.submit(6, 12, max_thinking_tokens=1)
    while shop.known_outputs(sample) < 3:
        shop.turn()
    shop.masks.slow = True
    shop.launch()
    shop.change_weights(recompute=False)
    shop.drain()
    shop.check_all()
    assert [version for version, _ in sample.weight_versions()] == [0, 1]


def test_a_preempted_row_samples_after_its_blocks_went_to_another():
    """With three steps in flight, the step that writes to those blocks is queued before the row's second part."""
    shop = Workshop(depth=3, max_rows=2, max_step_tokens=2, block_size=1, usable_blocks=5, prefix_cache=False)
    shop.submit(2, 4, n=3, max_thinking_tokens=1)
    shop.drain()
    shop.check_all()
    assert shop.scheduler.stats().preemptions
