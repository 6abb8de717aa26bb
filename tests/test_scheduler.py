"""The scheduler on a paper device: lengths, prompts, plans, admission, what it costs; each fault that lives here."""

import pickle

import numpy as np
import pytest
from calls import count_calls
from paper_device import oracle
from workshop import Workshop
from workshops import every_depth, f19, finish, lanes_of, positions_of

from twostroke.errors import InvalidRequest
from twostroke.limits import Limits
from twostroke.plan import Flag, StepOutput
from twostroke.request import FinishReason, Request, Sample
from twostroke.sampling_params import SamplingParams
from twostroke.scheduler.scheduler import Scheduler

# -- Length, stop, error


@every_depth
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_a18_exactly_max_tokens_and_no_step_too_many(depth, max_tokens):
    shop = Workshop(depth=depth)
    sample = shop.submit(5, max_tokens)
    finish(shop)
    assert len(sample.output) == max_tokens
    assert sample.finish_reason is FinishReason.LENGTH
    assert positions_of(shop.plans, 0) == 5 + max_tokens - 1
    assert len(shop.plans) == max_tokens


@every_depth
def test_a19_a_stop_costs_at_most_the_steps_in_flight(depth):
    shop = Workshop(depth=depth)
    sample = shop.submit(3, 60, stop_token_ids=range(30))
    finish(shop)
    assert sample.finish_reason is FinishReason.STOP
    assert len(shop.plans) <= len(sample.output) + depth - 1


@every_depth
def test_min_tokens_reach_the_device(depth):
    shop = Workshop(depth=depth)
    sample = shop.submit(3, 60, stop_token_ids=range(30), min_tokens=20)
    finish(shop)
    assert len(sample.output) >= 20


@every_depth
@pytest.mark.parametrize("nan_at", [0, 4])
def test_bad_logits_end_that_sample_alone(depth, nan_at):
    shop = Workshop(depth=depth)
    bad, good = shop.submit(6, 20, nan_at=nan_at), shop.submit(6, 20)
    shop.stream(bad)
    shop.stream(good)
    finish(shop)
    assert bad.finish_reason is FinishReason.ERROR
    assert "NaN" in bad.error
    assert len(bad.output) == nan_at
    assert len(good.output) == 20


def test_stop_on_the_last_token_is_a_stop():
    shop = Workshop()
    first = oracle(shop.submit(3, 1).request)[0][0]
    shop = Workshop()
    sample = shop.submit(3, 1, stop_token_ids=[first])
    finish(shop)
    assert sample.finish_reason is FinishReason.STOP


# -- Chunks and budget


@every_depth
def test_b05_a_prompt_beyond_the_budget_is_chunked(depth):
    shop = Workshop(depth=depth, max_step_tokens=48, max_rows=4)
    sample = shop.submit(100, 5)
    finish(shop)
    assert [plan.chunks.tolist() for plan in shop.plans[:3]] == [[[0, 0, 48, 0]], [[0, 48, 48, 0]], [[0, 96, 4, 1]]]
    assert len(sample.output) == 5


@every_depth
def test_a29_a_step_that_samples_nothing(depth):
    shop = Workshop(depth=depth, max_step_tokens=8)
    shop.submit(20, 2)
    plan = shop.launch()
    assert len(plan.sampling_chunks()) == 0
    assert shop.commit()[:3] == ([], [], pytest.approx(np.empty(0)))
    finish(shop)


def test_lanes_come_before_prompts_and_prompts_in_the_order_of_arrival():
    shop = Workshop(depth=2, max_step_tokens=10, max_rows=8)
    for length in (2, 3, 9, 9):
        shop.submit(length, 20)
    finish(shop)
    chunks = [plan.chunks.tolist() for plan in shop.plans[:4]]
    assert chunks[0] == [[0, 0, 2, 1], [1, 0, 3, 1], [2, 0, 5, 0]]
    assert chunks[1] == [[2, 5, 4, 1], [3, 0, 4, 0]]
    assert chunks[2] == [[3, 4, 5, 1]]
    assert lanes_of(shop.plans[:4]) == [0, 2, 3, 4]


def test_max_chunk_tokens_leaves_room_for_others():
    shop = Workshop(max_step_tokens=12, max_chunk_tokens=4)
    shop.submit(10, 3)
    shop.submit(10, 3)
    finish(shop)
    assert shop.plans[0].chunks.tolist() == [[0, 0, 4, 0], [1, 0, 4, 0]]
    assert max(plan.chunks[:, 2].max(initial=0) for plan in shop.plans) == 4


def test_decoding_rows_fit_the_budget_with_a_token_to_spare():
    shop = Workshop(max_rows=8, max_step_tokens=3)
    for _ in range(6):
        shop.submit(4, 12)
    finish(shop)
    assert max(lanes_of(shop.plans)) == 3
    assert all(plan.num_tokens <= 3 for plan in shop.plans)
    assert all(plan.num_lanes < 3 or not len(plan.chunks) for plan in shop.plans)


def test_r17_decoding_rows_run_on_while_a_prompt_arrives():
    shop = Workshop(max_step_tokens=16)
    for _ in range(4):
        shop.submit(2, 40)
    for _ in range(4):
        shop.turn()
    shop.submit(60, 4)
    prompts = len(shop.plans)
    for _ in range(5):
        shop.turn()
    assert [(plan.num_lanes, len(plan.prompt_tokens)) for plan in shop.plans[prompts:]] == [(4, 12)] * 5
    finish(shop)


# -- Plans


def test_plans_are_immutable_and_can_be_pickled():
    shop = Workshop()
    for _ in range(3):
        shop.submit(9, 9, stop_token_ids=[1, 2])
    finish(shop)
    names = ("lane_rows", "chunks", "prompt_tokens", "joins", "block_deltas", "lane_deltas")
    for plan in shop.plans:
        copy = pickle.loads(pickle.dumps(plan))
        for name in names:
            assert not getattr(plan, name).flags.writeable
            assert np.array_equal(getattr(plan, name), getattr(copy, name))
        assert {getattr(plan, name).dtype for name in names if name != "joins"} == {np.dtype(np.int32)}


def test_a_steady_step_carries_nothing_and_shares_its_lanes():
    shop = Workshop(block_size=16)
    for _ in range(3):
        shop.submit(2, 12)
    finish(shop)
    steady = shop.plans[2:10]
    assert all(plan.lane_rows is steady[0].lane_rows for plan in steady)
    assert not any(len(plan.block_deltas) + len(plan.lane_deltas) + len(plan.joins) for plan in steady)


def test_a_leaving_rows_lane_is_taken_by_the_last_lane():
    shop = Workshop(depth=1, max_rows=4)
    samples = [shop.submit(2, 50) for _ in range(3)]
    shop.turn()
    shop.turn()
    shop.cancel(samples[0])
    plan = shop.launch()
    assert plan.lane_rows.tolist() == [2, 1]
    assert plan.lane_deltas.tolist() == [[0, 2], [2, 4]]  # row 4 is the dummy row
    for sample in samples[1:]:
        shop.cancel(sample)
    finish(shop)


def test_row_record_of_a_join():
    shop = Workshop(max_rows=3)
    params = SamplingParams(
        temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, max_tokens=7, min_tokens=2, stop_token_ids=[9, 4]
    )
    request = Request.create("a", [1, 2, 3], params, (5 << 32) | 6, shop.limits)
    shop.scheduler.submit(Sample(request))
    (record,) = shop.scheduler.plan().joins
    assert [int(record[name]) for name in ("row", "done", "last_token", "length", "outputs")] == [0, 0, 0, 0, 0]
    assert [int(record[name]) for name in ("min_outputs", "max_outputs", "top_k")] == [2, 7, 0]
    assert [float(record[name]) for name in ("temperature", "top_p", "min_p")] == pytest.approx([0.5, 0.9, 0.1])
    assert (int(record["seed_low"]), int(record["seed_high"])) == (6, 5)
    assert record["stop_ids"].tolist() == [4, 9] + [-1] * (len(record["stop_ids"]) - 2)


def test_row_record_keeps_the_meaning_of_numbers_beyond_its_types():
    shop = Workshop()
    params = SamplingParams(temperature=1e300, top_k=2**40, top_p=1e-300, min_tokens=2**40, max_tokens=None)
    shop.scheduler.submit(Sample(Request.create("a", [1], params, 2**64 - 1, shop.limits)))
    (record,) = shop.scheduler.plan().joins
    assert np.isfinite(record["temperature"])
    assert record["top_p"] > 0
    assert record["top_k"] == record["min_outputs"] == 2**31 - 1
    assert record["seed_low"] == record["seed_high"] == 2**32 - 1


# -- Admission


@every_depth
def test_every_sample_gets_a_turn_when_rows_are_few(depth):
    shop = Workshop(depth=depth, max_rows=2)
    for length in range(1, 9):
        shop.submit(length, 6)
    finish(shop)
    assert [sample.order for sample in sorted(shop.samples, key=lambda s: s.timings.admitted)] == list(range(8))


def test_b03_b15_what_outgrows_the_cache_is_refused_and_others_go_on():
    shop = Workshop(usable_blocks=4, block_size=4)
    wide = Limits(97, 256, 4, 1000)
    too_long = Sample(Request.create("x", [1] * 10, SamplingParams(max_tokens=8), 0, wide))
    with pytest.raises(InvalidRequest, match=r"18 tokens in 5 blocks; .* the cache has 4 usable blocks"):
        shop.scheduler.submit(too_long)
    shop.submit(10, 7)  # the last token needs no position: 16 positions in 4 blocks
    finish(shop)


def test_refuses_what_outgrows_the_row_table():
    scheduler = Scheduler(max_rows=2, max_step_tokens=8, max_model_len=16, block_size=4, num_blocks=100)
    sample = Sample(Request.create("x", [1] * 10, SamplingParams(max_tokens=7), 0, Limits(97, 64, 4, 99)))
    with pytest.raises(InvalidRequest, match=r"17 tokens.*max_model_len=16"):
        scheduler.submit(sample)


@every_depth
def test_b03_a_large_sample_at_the_head_waits_and_nobody_overtakes(depth):
    shop = Workshop(depth=depth, usable_blocks=10, block_size=4)
    first, large, small = shop.submit(20, 8), shop.submit(30, 4), shop.submit(2, 2)
    finish(shop)
    assert first.timings.finished < large.timings.admitted <= small.timings.admitted


@every_depth
def test_b06_usage_returns_to_zero_and_stays_usable(depth):
    shop = Workshop(depth=depth, usable_blocks=8, block_size=4)
    shop.submit(20, 13)
    shop.drain()
    for _ in range(3):
        shop.submit(8, 5)
    finish(shop)


def test_a39_nothing_to_do():
    shop = Workshop()
    assert not shop.scheduler.has_work
    assert shop.scheduler.plan() is None
    shop.cancel(shop.submit(3, 3))
    assert shop.scheduler.plan() is None
    finish(shop)


# -- Streaming and books


@every_depth
def test_a_stream_begun_late_misses_and_repeats_nothing(depth):
    shop = f19(depth)
    shop.stream(shop.samples[0])
    while not shop.scheduler.stats().preemptions:
        shop.turn()
    shop.stream(shop.samples[1])  # preempted, maybe with its token in flight
    shop.stream(shop.samples[1])
    finish(shop)
    assert len(shop.streams[shop.samples[1]]) == 35
    assert shop.scheduler.stream(shop.samples[1]).streamed == []


def test_timings_are_in_order():
    shop = f19(2)
    finish(shop)
    for sample in shop.samples:
        times = sample.timings
        assert times.submitted <= times.admitted <= times.first_token <= times.finished


def test_stats_count():
    shop = Workshop(depth=1, max_rows=1, usable_blocks=10, block_size=4)
    shop.submit(6, 3)
    shop.submit(6, 3)
    assert shop.turn()
    stats = shop.scheduler.stats()
    assert (stats.waiting, stats.running, stats.free_blocks, stats.preemptions, stats.steps) == (1, 1, 8, 0, 1)
    finish(shop)


def test_tokens_of_a_sample_are_read_only_and_survive_the_row():
    shop = Workshop(max_rows=1)
    first, _ = shop.submit(3, 4), shop.submit(9, 9)
    finish(shop)
    with pytest.raises(ValueError, match="read-only"):
        first.tokens[0] = 1


def test_commit_refuses_the_wrong_step():
    shop = Workshop(depth=3)
    shop.submit(3, 9)
    shop.launch()
    shop.launch()
    later = shop.in_flight[1]
    with pytest.raises(RuntimeError, match="step 1 committed after -1"):
        shop.scheduler.commit(*later)
    first = shop.in_flight[0]
    shop.commit()
    with pytest.raises(RuntimeError, match="step 0 committed after 0"):
        shop.scheduler.commit(*first)


def test_commit_refuses_a_dead_flag_for_a_living_row():
    shop = Workshop()
    shop.submit(3, 9)
    plan = shop.launch()
    with pytest.raises(RuntimeError, match="row 0 lives"):
        shop.scheduler.commit(plan, StepOutput(np.zeros(1, np.int32), np.zeros(1, np.int32)))


def test_commit_refuses_an_output_of_another_size():
    shop = Workshop()
    shop.submit(3, 9)
    plan = shop.launch()
    with pytest.raises(RuntimeError, match="2 outputs for 1 sampled"):
        shop.scheduler.commit(plan, StepOutput(np.zeros(2, np.int32), np.ones(2, np.int32)))


def test_debug_notices_a_lost_limit():
    shop = Workshop()
    shop.submit(3, 1)
    plan = shop.launch()
    with pytest.raises(AssertionError, match="outlived"):
        shop.scheduler.commit(plan, StepOutput(np.zeros(1, np.int32), np.full(1, int(Flag.TOKEN), np.int32)))


# -- Cost


def calls_of_steady_steps(rows: int, waiting: int) -> int:
    """Python and C calls of ten steady steps; all flags are TOKEN."""
    limits = Limits(97, 2048, 512, 10_000)
    scheduler = Scheduler(
        max_rows=rows, max_step_tokens=4 * rows, max_model_len=2048, block_size=512, num_blocks=limits.usable_blocks + 1
    )
    params = SamplingParams(max_tokens=400)
    for number in range(rows + waiting):
        scheduler.submit(Sample(Request.create(str(number), [1, 2], params, 0, limits)))

    def step() -> None:
        plan = scheduler.plan()
        outputs = plan.num_lanes + len(plan.sampling_chunks())
        scheduler.commit(plan, StepOutput(np.zeros(outputs, np.int32), np.ones(outputs, np.int32)))

    for _ in range(5):
        step()
    assert scheduler.stats().waiting == waiting

    def ten_steps() -> None:
        for _ in range(10):
            step()

    return count_calls(ten_steps)


def test_neither_rows_nor_waiting_samples_cost_a_steady_step_python_work():
    calls = calls_of_steady_steps(4, 10)
    assert calls == calls_of_steady_steps(256, 10)
    assert calls == calls_of_steady_steps(4, 10_000)
    assert calls < 10 * 100


def calls_of_cancels(waiting: int) -> int:
    limits = Limits(97, 64, 16, 100)
    scheduler = Scheduler(max_rows=1, max_step_tokens=8, max_model_len=64, block_size=16, num_blocks=101)
    params = SamplingParams(max_tokens=9)
    samples = [Sample(Request.create(str(i), [1], params, 0, limits)) for i in range(waiting)]
    for sample in samples:
        scheduler.submit(sample)

    def cancel_some() -> None:
        for sample in samples[:50] + samples[-50:]:
            scheduler.cancel(sample)

    return count_calls(cancel_some)


def test_b14_a_cancel_costs_the_same_however_many_wait():
    assert calls_of_cancels(300) == calls_of_cancels(5000)
