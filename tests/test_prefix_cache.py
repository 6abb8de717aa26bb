"""The prefix cache under the scheduler: what is shared, when it may be, what goes first, and what must never be shared.

The paper device keeps the tokens that every block really holds, and the workshop holds each hit against them.
"""

import numpy as np
import pytest
from paper_device import oracle
from workshop import Workshop

from twostroke.cache.block_pool import BlockPool, BlockRun
from twostroke.cache.prefix_cache import PrefixCache
from twostroke.device.layout import input_capacity, pack
from twostroke.request import FinishReason, SampleState

every_depth = pytest.mark.parametrize("depth", [1, 2, 3])
PROMPT = [7 * i % 97 for i in range(200)]


def finish(shop: Workshop) -> None:
    shop.drain()
    shop.check_all()


def after(prompt, max_tokens=3, **config) -> Workshop:
    """A workshop in which a sample with `prompt` has come and gone."""
    shop = Workshop(**config)
    shop.submit(prompt, max_tokens)
    finish(shop)
    return shop


# -- What is found


@every_depth
@pytest.mark.parametrize("length", [3, 4, 5, 15, 16, 17, 64])
def test_f02_f05_f07_f17_the_same_prompt_twice(depth, length):
    """All full blocks but one that holds the last token: that is computed again, and samples."""
    shop = after(PROMPT[:length], depth=depth)
    second = shop.submit(PROMPT[:length], 3)
    finish(shop)
    expected = (length - 1) // 4 * 4
    assert (second.cached_tokens, shop.hits[second]) == (expected, expected)
    chunks = [plan.chunks.tolist() for plan in shop.plans if len(plan.joins)]
    assert chunks[1] == [[0, expected, length - expected, 1]]
    assert shop.scheduler.stats().prefix_hit_tokens == expected
    assert shop.samples[0].cached_tokens == 0


@every_depth
def test_f01_a_hit_shortens_the_step(depth):
    """465 tokens, 256 of them cached: 209 are computed."""
    shop = after(PROMPT[:1] * 257, depth=depth, block_size=16, max_model_len=600, max_step_tokens=512)
    shop.submit(PROMPT[:1] * 256 + [5] * 209, 2)
    finish(shop)
    assert shop.plans[-2].chunks.tolist() == [[0, 256, 209, 1]]


@every_depth
def test_another_beginning_is_another_content(depth):
    """The same tokens after others, and the same tokens shifted, are not the same block."""
    shop = after([1] * 4 + [2] * 8 + [3], depth=depth)
    others = [shop.submit(prompt, 2) for prompt in ([5] * 4 + [2] * 8 + [3], [2] * 8 + [3], [1] * 3 + [2] * 9 + [3])]
    finish(shop)
    assert [sample.cached_tokens for sample in others] == [0, 0, 0]


@every_depth
def test_two_samples_share_blocks_while_both_run(depth):
    shop = Workshop(depth=depth, usable_blocks=16)
    first = shop.submit(PROMPT[:33], 12)
    for _ in range(depth + 1):
        shop.turn()
    before = shop.scheduler.stats().free_blocks
    second = shop.submit(PROMPT[:33], 12)
    shop.launch()
    assert first.state is second.state is SampleState.RUNNING
    assert before - shop.scheduler.stats().free_blocks <= 2
    assert shop.scheduler.pool.sharers.sum() == 8
    finish(shop)
    assert second.cached_tokens == 32


@every_depth
def test_the_next_turn_of_a_conversation_finds_prompt_and_output(depth):
    """All but the last token, whose position was never computed."""
    shop = after(PROMPT[:10], 14, depth=depth)
    history = shop.samples[0].tokens.tolist()
    second = shop.submit([*history, 1, 2, 3], 9)
    finish(shop)
    assert second.cached_tokens == (len(history) - 1) // 4 * 4 == 20


@every_depth
def test_f16_a_preempted_sample_finds_its_own_blocks(depth):
    """Block 16, prompt 34, 35 new tokens, 2 requests, 7 blocks: one is preempted, and not all of it is recomputed."""
    shop = Workshop(depth=depth, block_size=16, usable_blocks=7)
    _, younger = shop.submit(34, 35), shop.submit(34, 35)
    finish(shop)
    assert younger.preemptions == 1
    assert shop.hits[younger] >= 16
    assert younger.cached_tokens == 0, "of the first admission"


@every_depth
def test_a_cancelled_sample_leaves_its_blocks_to_others(depth):
    shop = Workshop(depth=depth)
    first = shop.submit(PROMPT[:20], 60)
    for _ in range(16):
        shop.turn()
    shop.cancel(first)
    shop.drain()
    assert len(first.output) >= 12
    second = shop.submit([*first.tokens.tolist(), 5], 3)
    finish(shop)
    assert second.cached_tokens == (len(first.tokens) - 1) // 4 * 4


@every_depth
def test_groups_hit_together(depth):
    shop = after(PROMPT[:21], depth=depth, windows=(0, 0, 0))
    second = shop.submit(PROMPT[:21], 4)
    finish(shop)
    assert second.cached_tokens == 20
    deltas = next(plan for plan in shop.plans if plan.joins["length"].any()).block_deltas
    assert (np.bincount(deltas[:, 0]) == 6).all()


def test_without_the_cache_nothing_is_shared():
    shop = after(PROMPT[:33], prefix_cache=False)
    second = shop.submit(PROMPT[:33], 3)
    finish(shop)
    stats = shop.scheduler.stats()
    assert (second.cached_tokens, stats.cached_blocks, stats.prefix_hit_tokens) == (0, 0, 0)


# -- When


def test_a_block_is_not_found_before_its_step_is_committed():
    shop = Workshop(depth=3)
    shop.submit(PROMPT[:33], 9)
    shop.launch()
    second = shop.submit(PROMPT[:33], 9)
    shop.launch()
    assert shop.hits[second] == 0
    shop.commit()
    third = shop.submit(PROMPT[:33], 9)
    shop.launch()
    assert shop.hits[third] == 32
    finish(shop)


@every_depth
def test_a_prompt_in_chunks_is_found_once_a_token_vouches_for_it(depth):
    shop = Workshop(depth=depth, max_chunk_tokens=8, max_step_tokens=64)
    shop.submit(PROMPT[:24], 9)
    for _ in range(2):
        shop.launch()
        shop.commit()
    assert shop.scheduler.stats().cached_blocks == 0
    assert shop.scheduler.pool.cache.known_blocks() == []
    shop.launch()
    shop.commit()
    assert len(shop.scheduler.pool.cache.known_blocks()) == 6
    finish(shop)


@every_depth
def test_f06_a_hit_is_looked_up_when_the_sample_is_admitted(depth):
    """What was cached when the sample came is evicted while it waits, by the one before it."""
    shop = after(PROMPT[:9], 1, depth=depth, usable_blocks=8, max_rows=1)
    shop.submit([5] * 25, 8)  # all 8 blocks
    waiting = shop.submit(PROMPT[:9], 3)
    finish(shop)
    assert waiting.cached_tokens == 0


def test_a_sample_that_waits_is_hashed_once():
    shop = Workshop(depth=1, usable_blocks=25, block_size=4)
    shop.submit(PROMPT[:40], 40)  # 20 blocks in the end
    shop.turn()
    hashed = []
    cache = shop.scheduler.pool.cache
    plain = cache._hash
    cache._hash = lambda data: hashed.append(data) or plain(data)
    shop.submit(PROMPT[:40] + [1] * 58, 2)
    for _ in range(10):
        shop.turn()
        assert shop.scheduler.stats().waiting == 1
    assert len(hashed) == 11
    finish(shop)


# -- What must not be shared


@every_depth
@pytest.mark.parametrize("chunk", [None, 8])
def test_c04_a_prompt_with_bad_logits_is_not_published(depth, chunk):
    shop = Workshop(depth=depth, max_chunk_tokens=chunk)
    bad = shop.submit(PROMPT[:33], 5, nan_at=0)
    shop.drain()
    assert bad.finish_reason is FinishReason.ERROR
    assert shop.scheduler.stats().cached_blocks == 0
    good = shop.submit(PROMPT[:33], 5)
    finish(shop)
    assert good.cached_tokens == 0


@every_depth
@pytest.mark.parametrize("nan_at", range(1, 9))
def test_c04_of_a_sample_with_bad_logits_only_what_was_good_before_is_published(depth, nan_at):
    """The step that gives output `nan_at` computes position 8 + nan_at - 1, maybe the last of its block."""
    shop = Workshop(depth=depth)
    bad = shop.submit(PROMPT[:8], 20, nan_at=nan_at)
    shop.drain()
    good = shop.submit([*bad.tokens.tolist(), *[3] * 10], 5)
    finish(shop)
    assert good.cached_tokens == (8 + nan_at - 1) // 4 * 4


@every_depth
def test_a_cancelled_prefill_is_not_published(depth):
    shop = Workshop(depth=depth, max_chunk_tokens=4)
    first = shop.submit(PROMPT[:40], 5)
    for _ in range(5):
        shop.turn()
    shop.cancel(first)
    shop.drain()
    assert shop.scheduler.stats().cached_blocks == 0


@every_depth
def test_f14_after_a_reset_nothing_older_is_found(depth):
    """Not what was idle, not what runs, not what that computes later, and not what was on its way to be released."""
    shop = after(PROMPT[:33], depth=depth)
    running = shop.submit(PROMPT[:21], 20)
    ended = shop.submit([9] * 21, 60)
    for _ in range(depth + 3):
        shop.turn()
    assert shop.hits[running] == 20
    shop.cancel(ended)
    shop.reset()
    assert shop.scheduler.stats().cached_blocks == 0
    finish(shop)
    assert shop.scheduler.stats().cached_blocks == 0
    again = [shop.submit(prompt, 2) for prompt in (PROMPT[:33], [9] * 21, running.tokens.tolist())]
    finish(shop)
    assert [sample.cached_tokens for sample in again] == [0, 0, 0]
    later = shop.submit([*PROMPT[:33], 1], 2)
    finish(shop)
    assert later.cached_tokens == 32, "what came after the reset is found"


@every_depth
def test_a_preempted_sample_finds_nothing_from_before_a_reset(depth):
    shop = Workshop(depth=depth, block_size=16, usable_blocks=7)
    _, younger = shop.submit(34, 35), shop.submit(34, 35)
    while not younger.preemptions:
        shop.turn()
    shop.reset()
    finish(shop)
    assert shop.hits[younger] == 0


def test_f11_f12_digests_of_two_caches_differ():
    chains = [[], []]
    for chain in chains:
        PrefixCache(4).find(chain, np.arange(9, dtype=np.int32), 2)
    assert len(chains[0][0]) == 16
    assert chains[0][0] != chains[1][0]


# -- What goes first


def fill(pool: BlockPool, tokens: list[int]) -> BlockRun:
    """Take blocks for all of `tokens` and publish them; returns the blocks and their chain."""
    chain: list[bytes] = []
    blocks = pool.take(len(tokens) // 2)
    pool.cache.extend(chain, np.array(tokens, np.int32), len(blocks))
    pool.cache.publish(chain, blocks.tolist())
    return BlockRun(blocks, chain)


def test_r18_blank_blocks_first_then_the_least_recently_used_and_of_a_chain_its_end():
    pool = BlockPool(8, 2)
    old, new = fill(pool, [1, 1, 2, 2, 3, 3]), fill(pool, [4, 4, 5, 5])
    pool.give(*old)
    pool.give(*new)
    assert (pool.free, pool.cache.idle) == (7, 5)
    oldest_first = [*old.blocks[::-1].tolist(), *new.blocks[::-1].tolist()]
    assert pool.cache.idle_blocks() == oldest_first
    blank = pool.take(2)
    assert not set(blank.tolist()) & set(oldest_first)
    assert [int(pool.take(1)[0]) for _ in range(5)] == oldest_first
    assert pool.cache.known_blocks() == []


def test_a_hit_makes_a_chain_young_again():
    pool = BlockPool(5, 2)
    old, new = fill(pool, [1, 1, 2, 2]), fill(pool, [4, 4, 5, 5])
    pool.give(*old)
    pool.give(*new)
    pool.share(old)
    assert (pool.free, pool.cache.idle) == (2, 2)
    pool.give(*old)
    assert pool.take(2).tolist() == new.blocks[::-1].tolist()


def test_a_block_in_use_is_not_evicted():
    pool = BlockPool(4, 2)
    run = fill(pool, [1, 1, 2, 2])
    pool.share(run)
    pool.give(*run)
    assert (pool.available, pool.cache.idle) == (1, 0)
    with pytest.raises(RuntimeError, match="2 blocks to take, 1 available"):
        pool.take(2)
    pool.give(*run)
    assert pool.available == 3


def test_a_second_block_with_the_same_content_keeps_the_first_one_young():
    """Two rows compute one prompt together; the one that is known ends first, the other's end hangs on it."""
    pool = BlockPool(8, 2)
    first, second = fill(pool, [1, 1]), fill(pool, [1, 1, 2, 2])
    other = fill(pool, [8, 8])
    pool.give(*first)
    pool.give(*other)
    pool.give(*second)
    end = int(second.blocks[1])
    assert pool.cache.idle_blocks() == [int(other.blocks[0]), end, int(first.blocks[0])]


def test_a_second_block_takes_the_place_of_a_first_one_that_was_evicted():
    pool = BlockPool(4, 2)
    first, second = fill(pool, [1, 1]), fill(pool, [1, 1, 2, 2])
    pool.give(*first)
    pool.give(pool.take(1))  # evicts the first
    pool.give(*second)
    assert pool.cache.find([], np.array([1, 1, 2, 2, 0], np.int32), 2) == 2
    assert pool.cache.blocks(second.keys).tolist() == second.blocks.tolist()
    assert pool.cache.idle_blocks() == second.blocks[::-1].tolist()


def test_evicted_blocks_are_not_found():
    shop = after(PROMPT[:17], depth=2, usable_blocks=8)
    shop.submit([5] * 19, 3)  # takes the 4 blank ones, and the last 2 of the first's chain
    shop.drain()
    again = shop.submit(PROMPT[:17], 3)
    finish(shop)
    assert again.cached_tokens == 8


# -- Accounting


def test_a_hit_counts_against_what_is_free():
    """The sample's 5 blocks hang on 4 idle ones: with 2 promised to others it must wait."""
    shop = Workshop(depth=1, usable_blocks=8, max_step_tokens=4, max_rows=4)
    shop.submit(PROMPT[:17], 1)
    shop.drain()
    shop.submit([5] * 15, 2)  # a prefill in four steps: 4 blocks are promised at once
    again = shop.submit(PROMPT[:17], 1)
    shop.turn()
    assert again.state is SampleState.WAITING
    finish(shop)


def test_stats():
    shop = after(PROMPT[:16], 2, usable_blocks=20)
    stats = shop.scheduler.stats()
    assert (stats.free_blocks, stats.cached_blocks, stats.prefix_hit_tokens) == (20, 4, 0)
    shop.submit(PROMPT[:17], 9)
    shop.launch()
    stats = shop.scheduler.stats()
    assert (stats.free_blocks, stats.cached_blocks, stats.prefix_hit_tokens) == (15, 0, 16)
    finish(shop)


def test_shared_blocks_fit_a_slots_input():
    """Many long prefixes join at once, in a step with room for a token of each: no plan outgrows its slot."""
    config = dict(max_rows=40, max_step_tokens=40, block_size=1)
    shop = after(PROMPT[:100], 2, usable_blocks=6000, **config)
    for _ in range(40):
        shop.submit(PROMPT[:100], 2)
    words = np.empty(input_capacity(max_model_len=256, num_groups=1, **config), np.int32)
    finish(shop)
    assert max(len(plan.joins) for plan in shop.plans) == 4  # of at most (256 + 4 * 40) // 99
    for plan in shop.plans:
        pack(plan, words)
    assert sum(sample.cached_tokens for sample in shop.samples) == 40 * 99


def test_the_oracle_of_these_tests_depends_on_all_tokens():
    shop = Workshop()
    assert oracle(shop.submit([1, 2, 3], 8).request) != oracle(shop.submit([2, 2, 3], 8).request)
