"""The pool of free blocks."""

import numpy as np
import pytest

from twostroke.cache.block_pool import BlockPool, BlockRun
from twostroke.plan import DUMMY_BLOCK


def test_hands_out_every_block_once_and_never_the_dummy():
    pool = BlockPool(6, 4)
    blocks = np.concatenate([pool.take(2), pool.take(3)])
    assert blocks.dtype == np.int32
    assert sorted(blocks.tolist()) == [1, 2, 3, 4, 5]
    assert DUMMY_BLOCK not in blocks
    assert (pool.free, pool.available) == (0, 0)


def test_takes_back_what_it_gave():
    pool = BlockPool(6, 4)
    first, second = pool.take(2), pool.take(3)
    pool.give(first)
    assert pool.free == 2
    assert np.array_equal(np.sort(pool.take(2)), np.sort(first))
    pool.give(second)
    assert pool.free_blocks().shape == (3,)


def test_what_it_gives_is_a_copy():
    pool = BlockPool(4, 4)
    blocks = pool.take(2)
    kept = blocks.copy()
    pool.give(blocks[:1])
    pool.give(blocks[1:])
    pool.take(3)[:] = 99
    assert np.array_equal(blocks, kept)
    assert pool.free == 0


def test_a_reservation_lowers_available_until_it_is_taken_or_undone():
    pool = BlockPool(6, 4)
    pool.reserve(4)
    assert (pool.free, pool.reserved, pool.available) == (5, 4, 1)
    assert pool.take_reserved(3).shape == (3,)
    assert (pool.free, pool.reserved, pool.available) == (2, 1, 1)
    pool.unreserve(1)
    assert (pool.free, pool.reserved, pool.available) == (2, 0, 2)


def test_promised_blocks_are_not_given_to_others():
    pool = BlockPool(6, 4)
    pool.reserve(4)
    with pytest.raises(RuntimeError, match="2 blocks to take, 1 available"):
        pool.take(2)
    with pytest.raises(RuntimeError, match="2 blocks to reserve, 1 available"):
        pool.reserve(2)


def test_refuses_to_lose_count():
    pool = BlockPool(4, 4)
    with pytest.raises(RuntimeError, match="unreserve"):
        pool.take_reserved(1)
    blocks = pool.take(1)
    pool.give(blocks)
    with pytest.raises(RuntimeError, match="given back"):
        pool.give(blocks)


@pytest.mark.parametrize("shared", [False, True])
def test_many_runs_come_back_together_as_they_do_one_by_one(shared):
    """Published or not, twice the same content, and with `shared` one block in two of the runs."""
    pools = [BlockPool(12, 4) for _ in range(2)]
    for together, pool in enumerate(pools):
        a, b, c = pool.take(3), pool.take(4), pool.take(2)
        if shared:
            pool.share_used(a[:1])
            b[0], spare = a[0], b[:1].copy()
            pool.give(spare)
        pool.cache.publish([b"0", b"1", b"2"], [a[0], a[1], b[2]])
        runs = [BlockRun(a, [b"0", b"1"]), BlockRun(b, [b"0", b"1", b"2"]), BlockRun(c, []), BlockRun(a[:0], [])]
        for part in [runs] if together else [[run] for run in runs]:
            pool.give_runs(part)
        assert pool.free == 11
        assert not pool.sharers.any()
    first, second = pools
    assert sorted(first.free_blocks()) == sorted(second.free_blocks()) == list(range(1, 12))
    assert first.cache.idle_blocks() == second.cache.idle_blocks()
    with pytest.raises(RuntimeError, match="given back"):
        second.give_runs(runs)


def test_a_pool_without_usable_blocks_has_none_to_take():
    assert BlockPool(1, 4).available == 0
