"""What a cancel or a finish gives back, and when; committing at once and with steps in flight."""

import pickle

import pytest
from paper_device import oracle
from workshop import Workshop
from workshops import every_depth, f19, finish

from twostroke.request import FinishReason, SampleState


@every_depth
@pytest.mark.parametrize("turns", range(8))
def test_a17_cancel_at_every_moment(depth, turns):
    shop = Workshop(depth=depth, usable_blocks=20, block_size=4, max_step_tokens=6, max_rows=3)
    victim = shop.submit(10, 10)
    for _ in range(3):
        shop.submit(5, 8)
    for _ in range(turns):
        shop.turn()
    assert shop.cancel(victim).finished == [victim]
    assert shop.cancel(victim).finished == []
    assert victim.finish_reason is FinishReason.CANCELLED
    finish(shop)


@every_depth
@pytest.mark.parametrize("dropped", [0, 1, 3])
def test_a_finish_from_outside_at_every_moment(depth, dropped):
    """Before admission, in each chunk, decoding with steps in flight, and when it has ended by itself."""
    counts = set()
    for turns in range(16):
        shop = Workshop(depth=depth, usable_blocks=20, block_size=4, max_step_tokens=6, max_rows=3)
        victim = shop.submit(10, 8)
        shop.stream(victim)
        for _ in range(3):
            shop.submit(5, 8)
        for _ in range(turns):
            shop.turn()
        ended = victim.state is SampleState.FINISHED
        count = max(0, shop.known_outputs(victim) - dropped)
        assert shop.finish(victim, count).finished == ([] if ended else [victim])
        assert shop.finish(victim, 0).finished == []
        assert victim.finish_reason is (FinishReason.LENGTH if ended else FinishReason.STOP)
        finish(shop)
        counts.add((ended, count))
    assert {(True, 8 - dropped), (False, 0), (False, 7 - dropped)} <= counts


@every_depth
@pytest.mark.parametrize("moment", ["token in flight", "waiting", "prefilling again"])
def test_a_finish_from_outside_of_a_preempted_sample(depth, moment):
    """It has more tokens than the stop string leaves it, and no row, or a row that computes them anew."""
    shop = Workshop(depth=depth, block_size=16, usable_blocks=7, max_chunk_tokens=12)
    older, younger = shop.submit(34, 35), shop.submit(34, 35)
    while not shop.scheduler.stats().preemptions:
        shop.turn()
    if moment != "token in flight":
        while younger in shop.scheduler.batch.row_of:
            shop.turn()
    if moment == "prefilling again":
        while younger.state is SampleState.WAITING:
            shop.turn()
        assert shop.scheduler.batch.row_of[younger] in shop.scheduler.batch.prefilling
    count = shop.known_outputs(younger) - 2
    assert count > 0
    assert shop.finish(younger, count).finished == [younger]
    finish(shop)
    assert len(older.output) == 35


def test_a12_what_a_finished_sample_had_rests_until_its_last_step_is_committed():
    shop = Workshop(depth=2, usable_blocks=8, block_size=4, max_rows=1)
    stop = oracle(shop.submit(4, 9).request)[0][2]
    shop = Workshop(depth=2, usable_blocks=8, block_size=4, max_rows=1)
    first = shop.submit(4, 9, stop_token_ids=[stop])
    second = shop.submit(4, 2)
    while first.state is not SampleState.FINISHED:
        shop.launch()
        if len(shop.in_flight) == 2:
            shop.commit()
    assert first.finish_reason is FinishReason.STOP
    assert len(shop.in_flight) == 1
    assert shop.scheduler.stats().free_blocks < 8
    assert shop.launch() is None  # the only row is still used by the step in flight
    shop.commit()
    assert shop.scheduler.stats().free_blocks == 8
    assert shop.launch().chunks.tolist() == [[0, 0, 4, 1]]
    finish(shop)
    assert len(second.output) == 2


def test_a12_synchronous_release_is_at_once():
    shop = Workshop(depth=1, usable_blocks=8, block_size=4)
    sample = shop.submit(4, 9)
    shop.turn()
    shop.turn()
    shop.cancel(sample)
    assert shop.scheduler.stats().free_blocks == 8
    finish(shop)


@every_depth
@pytest.mark.parametrize("windows", [(5,), (4, 0, 1), (0, 9, 9)])
def test_where_there_is_a_window_a_row_goes_on_in_the_block_that_slides_out(depth, windows):
    """So only full groups take blocks; while others look for some, too, and one row's prompt is the other's."""
    shop = Workshop(depth=depth, windows=windows, block_size=4)
    samples = [shop.submit([1] * 12, 50), shop.submit([1] * 12, 41), shop.submit(7, 30)]
    finish(shop)
    assert [len(sample.output) for sample in samples] == [50, 41, 30]
    blocks = {}
    for plan in shop.plans:
        for group, row, index, block in plan.block_deltas.tolist():
            blocks[group, row, index] = block
    behind = {group: 1 + -(-(window - 1) // 4) for group, window in enumerate(windows) if window}
    for index in range(12 // 4 + max(behind.values()), 60 // 4):
        assert all(blocks[group, 0, index] == blocks[group, 0, index - back] for group, back in behind.items())


@every_depth
def test_a10_many_stops_under_block_pressure(depth):
    shop = Workshop(depth=depth, usable_blocks=24, block_size=4, max_rows=8)
    for number in range(40):
        shop.submit(1 + number * 7 % 30, 1 + number * 5 % 40, stop_token_ids=range(4))
    finish(shop)
    assert {sample.finish_reason for sample in shop.samples} == {FinishReason.STOP, FinishReason.LENGTH}


@every_depth
def test_a28_stop_and_cancel_in_one_step_report_once(depth):
    shop = Workshop(depth=depth)
    sample = shop.submit(3, 2)
    shop.launch()
    if depth > 1:
        shop.launch()
    shop.cancel(sample)
    while shop.in_flight:
        assert shop.commit().finished == []
    assert sample.finish_reason is FinishReason.CANCELLED
    finish(shop)


@every_depth
def test_r09_a_preempted_sample_runs_after_all_running_ones_are_cancelled(depth):
    shop = f19(depth)
    while not shop.scheduler.stats().preemptions:
        shop.turn()
    older, younger = shop.samples
    assert younger.state is SampleState.WAITING
    shop.cancel(older)
    finish(shop)
    assert len(younger.output) == 35


@every_depth
def test_cancel_of_a_preempted_sample_with_its_token_in_flight(depth):
    shop = f19(depth)
    while not shop.scheduler.stats().preemptions:
        shop.turn()
    shop.cancel(shop.samples[1])
    finish(shop)
    assert len(shop.samples[0].output) == 35


@every_depth
def test_abandon_ends_all_oldest_first(depth):
    shop = Workshop(depth=depth, usable_blocks=12, block_size=4, max_rows=3)
    for _ in range(6):
        shop.submit(8, 20)
    for _ in range(12):
        shop.turn()
    committed = shop.scheduler.abandon(FinishReason.ERROR, "the lights went out")
    assert committed.finished == shop.samples
    assert {sample.error for sample in shop.samples} == {"the lights went out"}
    assert len(shop.samples[0].output) > 0
    shop.finals += committed.finished
    while shop.in_flight:
        assert shop.commit().finished == []
    shop.check_idle()
    assert shop.scheduler.abandon().finished == []


@every_depth
def test_c44_a_sample_that_leaves_moves_one_lane_and_no_row(depth):
    """Whatever a row has room for: plans are the same, and nothing behind the known tokens of a row is touched."""
    plans, untouched = {}, -99
    for longest in (256, 131_072):
        shop = Workshop(depth=depth, max_model_len=longest, max_rows=4)
        table = shop.scheduler.rows
        table.tokens[:] = untouched
        for length, most in ((5, 30), (6, 4), (7, 30), (8, 9), (9, 12)):
            shop.submit(length, most)
        finish(shop)
        plans[longest] = [pickle.dumps(plan) for plan in shop.plans]
        rows = {int(record["row"]) for plan in shop.plans for record in plan.joins}
        assert sum(len(plan.joins) for plan in shop.plans) == 5, "a row was moved, or written anew"
        assert all(len(plan.lane_deltas) <= 4 for plan in shop.plans[1:])
        assert (table.tokens[sorted(rows), 9 + 30 + depth :] == untouched).all()
    assert plans[256] == plans[131_072]
