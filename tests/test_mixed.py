"""`mixed` on the CPU with a tiny model, and its floor."""

import math
import time

import numpy as np
import pytest

from twostroke import Engine, SamplingParams, TwostrokeError
from twostroke.bench.ceilings import Ceilings
from twostroke.bench.floor import Cost, floor_of, mixed_floor, mixed_floor_steps
from twostroke.bench.mixed import Mix, Watcher, run_mix

CEILINGS = Ceilings(read_bytes_per_s=1e12, flop_per_s=1e15)
MIX = Mix(
    model="tiny", rows=4, row_prompt=5, arrivals=6, prompt=40, every=0.03, spare_rows=2, watched=2, max_model_len=2048
)


def engine_for(mix: Mix) -> Engine:
    return Engine(
        mix.model,
        device="cpu",
        max_rows=mix.rows + mix.spare_rows,
        max_step_tokens=16,
        max_model_len=mix.max_model_len,
        num_blocks=1 + 6 * mix.max_model_len // 16,
        seed=0,
    )


def test_rows_decode_while_prompts_arrive() -> None:
    with engine_for(MIX) as engine:
        run = run_mix(engine, MIX, "async", CEILINGS)
        steps = round(1e3 * run.seconds / run.ms_per_step)
        deadline = time.monotonic() + 10
        while engine.stats().running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats().running == 0, "the decoding rows are let go"
    assert run.seconds >= 5 * MIX.every
    assert abs((run.tokens - MIX.arrivals) / MIX.rows - steps) <= 5 + steps / 10, "a row gets a token from every step"
    figures = run.extra
    assert 0 < figures["inter_token_p50_ms"] <= figures["inter_token_p99_ms"] < 1e3 * run.seconds
    assert 0 < figures["first_token_p50_ms"] <= figures["first_token_p99_ms"] < 1e3 * run.seconds
    assert figures["total_tokens_per_s"] == pytest.approx((run.tokens + 6 * 40) / run.seconds)
    assert 0 < run.floor_share < 1
    assert 0 < run.gpu_active <= 1


def test_rows_that_end_too_early_are_no_result() -> None:
    mix = Mix(**{**vars(MIX), "max_model_len": 64, "every": 0.2})
    with engine_for(mix) as engine, pytest.raises(TwostrokeError, match="max_model_len=64"):
        run_mix(engine, mix, "async", CEILINGS)


def test_a_watcher_notes_every_token() -> None:
    with engine_for(MIX) as engine:
        began = time.perf_counter()
        watcher = Watcher(engine.submit([1, 2, 3], SamplingParams(max_tokens=128, ignore_eos=True)))
        watcher.join(30)
    assert len(watcher.times) == 128
    assert watcher.times == sorted(watcher.times)
    assert len(watcher.between(began, time.perf_counter())) == 128
    assert len(watcher.between(0.0, began)) == 0


def test_the_floor_of_decoding_alone_is_that_of_the_offline_workload() -> None:
    cost = Cost(weight_bytes=1000, kv_bytes=10, token_flop=50.0, attention_flop=3.0)
    mixed = mixed_floor(
        cost, rows=4, length=8, steps=5, prompts=np.zeros(0, int), read_bytes_per_s=100.0, flop_per_s=70.0
    )
    # The first step of `floor_of` takes the prompts of 7 tokens; the next one reads 8 positions of each row.
    offline = floor_of(cost, np.full(4, 7), np.full(4, 6), 100.0, 70.0)
    first = floor_of(cost, np.full(4, 7), np.full(4, 1), 100.0, 70.0)
    assert mixed.seconds == pytest.approx(offline.seconds - first.seconds)
    assert mixed.read_bytes == pytest.approx(offline.read_bytes - first.read_bytes)


def test_prompts_fill_the_time_that_reading_leaves_first() -> None:
    """Reading takes 10 s a step, decoding computes for 2 s: prompts are free up to 8 s a step, then cost their time."""
    cost = Cost(weight_bytes=1000, kv_bytes=0, token_flop=2.0, attention_flop=0.0)
    seconds = [
        mixed_floor(
            cost, rows=1, length=1, steps=10, prompts=np.array([n]), read_bytes_per_s=100.0, flop_per_s=1.0
        ).seconds
        for n in (0, 40, 41, 50)
    ]
    assert seconds[:2] == [100.0, 100.0]
    assert math.isclose(seconds[2], 102.0)
    assert math.isclose(seconds[3], 120.0)


@pytest.mark.parametrize("prompt", [0, 4_000])
def test_the_floor_of_a_time_is_the_most_steps_that_fit(prompt: int) -> None:
    cost = Cost(weight_bytes=1000, kv_bytes=10, token_flop=50.0, attention_flop=3.0)
    mixed = dict(rows=4, length=8, prompts=np.array([prompt]), read_bytes_per_s=100.0, flop_per_s=70.0)
    seconds = mixed_floor(cost, steps=37, **mixed).seconds
    most = mixed_floor_steps(seconds, cost, **mixed)
    assert mixed_floor(cost, steps=most, **mixed).seconds <= seconds
    assert mixed_floor(cost, steps=most + 1, **mixed).seconds > seconds
    assert most == 37 or prompt
