"""`offload` and `prefix` on the CPU with a tiny model: every case does what it says."""

import time

import pytest

from twostroke import Engine
from twostroke.bench import offload, prefix
from twostroke.bench.offline_workloads import MAX_STEP_TOKENS
from twostroke.bench.options import BenchOptions
from twostroke.cache.copy_costs import CopyCosts
from twostroke.cache.offload import HostBlocks
from twostroke.errors import InvalidConfig
from twostroke.model.decoder import Decoder

every_loop = pytest.mark.parametrize("loop", ["sync", "async"])
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""Layers, keys and values, heads, size of a head, positions, bytes, of the tiny model."""


@pytest.fixture
def every_copy_pays(monkeypatch):
    monkeypatch.setattr(CopyCosts, "pays", lambda self, copies: True)


def run_prefix(loop: str, repetitions: int = 1, say=lambda line: None):
    """Prompts of 13 blocks, of which the cache holds two."""
    load = prefix.Load("tiny", "cpu", "float32", prompts=4, prompt=200, block_bytes=BLOCK_BYTES)
    return prefix.run_load(load, loop, BenchOptions(repetitions=repetitions, max_step_tokens=256), say)


def test_the_block_size_is_that_of_the_model() -> None:
    with Engine("tiny", device="cpu", num_blocks=2) as engine:
        assert engine._parts.forward.attention.block_bytes == BLOCK_BYTES


@every_loop
@pytest.mark.usefixtures("every_copy_pays")
def test_preempted_requests_come_back_or_are_computed_again(loop: str) -> None:
    load = offload.Load("tiny", "cpu", "float32", requests=3, prompt=50, tokens=100, block_bytes=BLOCK_BYTES)
    runs = offload.run_load(load, loop, BenchOptions(repetitions=1, max_step_tokens=32), lambda line: None)
    assert [run.case for run in runs] == ["recompute", "offload"]
    for run in runs:
        hits = run.extra["host_hit_tokens"]
        assert hits == 16 * run.extra["returned_blocks"]
        assert hits >= 3 * 48 if run.case == "offload" else not hits, "not all came back"
        assert run.tokens == 600
        assert 0 < run.extra["preempting_s"] < run.seconds
        assert run.extra["preempting_s"] + run.extra["rest_s"] == pytest.approx(run.seconds)


@pytest.mark.parametrize(("tokens", "step_tokens"), [(20, 32), (80, 32), (200, 3)])
def test_requests_that_end_before_all_are_preempted_are_refused_at_once(tokens: int, step_tokens: int) -> None:
    """30 steps for the prompts of both kinds; with 20 tokens, the first has ended before the last has begun."""
    load = offload.Load("tiny", "cpu", "float32", requests=4, prompt=100, tokens=tokens, block_bytes=BLOCK_BYTES)
    with pytest.raises(InvalidConfig, match=f"max_step_tokens={step_tokens}"):
        offload.run_load(load, "async", BenchOptions(repetitions=1, max_step_tokens=step_tokens), lambda line: None)


def test_the_requests_of_the_benchmark_are_long_enough() -> None:
    offload.Load().check(MAX_STEP_TOKENS)


@every_loop
@pytest.mark.usefixtures("every_copy_pays")
def test_a_first_token_after_a_miss_and_both_hits(loop: str) -> None:
    runs = run_prefix(loop, repetitions=2)
    assert [run.case for run in runs] == ["miss", "miss", "hit", "hit", "host hit", "host hit"]
    assert all(0 < run.extra["first_token_ms"] <= run.extra["longest_ms"] for run in runs)
    assert [run.extra["cached_tokens"] for run in runs] == [0, 0, 192, 192, 192, 192]
    assert [run.extra["returned_tokens"] for run in runs] == [0, 0, 0, 0, 192, 192]


@every_loop
def test_prompts_come_back_although_copies_are_slow_at_first(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel is compiled, or memory allocated: whatever number of blocks is new takes long."""
    forward, save, seen = Decoder.forward, HostBlocks.save, set()

    def slow_step(self, step, attention):
        time.sleep(0.0005 * len(step.input_ids))
        return forward(self, step, attention)

    def slow_at_first(self, blocks, slots):
        if len(slots) not in seen:
            time.sleep(0.1)
        seen.add(len(slots))
        save(self, blocks, slots)

    monkeypatch.setattr(Decoder, "forward", slow_step)
    monkeypatch.setattr(HostBlocks, "save", slow_at_first)
    *_, hit = run_prefix(loop)
    assert len(seen) > 2
    assert hit.extra["returned_tokens"] == 192
    save, load, compute = (hit.extra[f"block_{name}_us"] for name in ("save", "load", "compute"))
    assert 0 < save + load < compute


def test_what_the_engine_computes_again_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyCosts, "worthwhile", lambda self, blocks, copies: 0)
    said: list[str] = []
    *_, computed = run_prefix("async", say=said.append)
    assert (computed.case, computed.extra["returned_tokens"]) == ("host hit", 0)
    assert "2 of 2 host hits were computed again" in said[-1]
