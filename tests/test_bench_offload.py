"""`offload` and `prefix` on the CPU with a tiny model: every case does what it says."""

import pytest

from twostroke import Engine
from twostroke.bench import offload, prefix
from twostroke.bench.options import BenchOptions
from twostroke.cache.copy_costs import CopyCosts

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""Layers, keys and values, heads, size of a head, positions, bytes, of the tiny model."""


@pytest.fixture(autouse=True)
def every_copy_pays(monkeypatch):
    monkeypatch.setattr(CopyCosts, "pays", lambda self, copies: True)


def test_the_block_size_is_that_of_the_model() -> None:
    with Engine("tiny", device="cpu", num_blocks=2) as engine:
        assert engine._parts.forward.attention.block_bytes == BLOCK_BYTES


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_preempted_requests_come_back_or_are_computed_again(loop: str) -> None:
    load = offload.Load("tiny", "cpu", "float32", requests=3, prompt=50, tokens=200, block_bytes=BLOCK_BYTES)
    runs = offload.run_load(load, loop, BenchOptions(repetitions=1, max_step_tokens=32), lambda line: None)
    assert [run.case for run in runs] == ["recompute", "offload"]
    for run in runs:
        hits = run.extra["host_hit_tokens"]
        assert hits == 16 * run.extra["returned_blocks"]
        assert (hits >= 100) == (run.case == "offload")
        assert run.tokens == 1200
        assert 0 < run.extra["preempting_s"] < run.seconds
        assert run.extra["preempting_s"] + run.extra["rest_s"] == pytest.approx(run.seconds)


def test_a_first_token_after_a_miss_and_both_hits() -> None:
    load = prefix.Load("tiny", "cpu", "float32", prompts=4, prompt=200, block_bytes=BLOCK_BYTES)
    runs = prefix.run_load(load, "async", BenchOptions(repetitions=2, max_step_tokens=64), lambda line: None)
    assert [run.case for run in runs] == ["miss", "miss", "hit", "hit", "host hit", "host hit"]
    assert all(0 < run.extra["first_token_ms"] <= run.extra["longest_ms"] for run in runs)
