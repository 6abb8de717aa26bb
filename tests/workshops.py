"""What the tests of the scheduler on a paper device share."""

from collections.abc import Callable

import pytest
from workshop import Workshop

from twostroke.plan import Plan

every_depth = pytest.mark.parametrize("depth", [1, 2, 3])


def finish(shop: Workshop) -> None:
    shop.drain()
    shop.check_all()


def turn_until(shop: Workshop, condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        shop.turn()
    raise AssertionError("it never came")


def lanes_of(plans: list[Plan]) -> list[int]:
    return [plan.num_lanes for plan in plans]


def positions_of(plans: list[Plan], row: int) -> int:
    """Positions that `plans` compute for `row`."""
    return sum((plan.lane_rows == row).sum() + plan.chunks[plan.chunks[:, 0] == row, 2].sum() for plan in plans)


def f19(depth: int) -> Workshop:
    """Block 16, prompt 34, 35 new tokens, 2 requests, 7 blocks: one of them must be preempted."""
    shop = Workshop(depth=depth, block_size=16, usable_blocks=7)
    shop.submit(34, 35)
    shop.submit(34, 35)
    return shop
