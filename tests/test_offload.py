"""Offload to host memory in an engine: what was evicted comes back, and outputs are those of a roomy cache."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import pytest
import torch
from engines import MODES, running
from families import ids
from watching import PATIENCE, Turns, make_handles, quiet, wait_until

from twostroke import EngineDead, SamplingParams
from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.cache.copy_costs import CopyCosts
from twostroke.cache.offload import HostBlocks
from twostroke.device.cpu import CpuDevice
from twostroke.model.decoder import Decoder

every_mode = pytest.mark.parametrize("mode", MODES)
ROOM = 1 << 22
"""Bytes that hold all blocks of these tests."""


@pytest.fixture
def every_copy_pays(monkeypatch):
    """Leave nothing to the clock."""
    monkeypatch.setattr(CopyCosts, "pays", lambda self, copies: True)


def greedy(max_tokens=30, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def tokens(outputs):
    return [output.token_ids for output in outputs]


def samples_of(output):
    return [sample.token_ids for sample in output.outputs]


def settled(engine):
    """Wait until nothing runs; no block of the device, and no slot of the host, is lost."""
    quiet(engine)
    tier = engine._parts.scheduler.pool.tier
    used, free = tier.slots.all()
    assert sorted([*used, *free]) == list(range(tier.num_slots))
    return engine.stats()


def roomy(model, prompts, params, **options):
    with running("sync", model, prefix_cache=False, block_size=4, **options) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.stats().preemptions == 0
    return tokens(outputs)


@every_mode
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.usefixtures("every_copy_pays")
def test_preempted_samples_come_back_from_the_host(saved, family, mode):
    directory, _ = saved(family)
    prompts = [ids(17 + n, seed=n) for n in range(5)]
    plain = roomy(directory, prompts, greedy())
    with running(mode, directory, block_size=4, num_blocks=32, max_step_tokens=40, offload_bytes=ROOM) as engine:
        tight = engine.generate(prompts, greedy())
        stats = settled(engine)
    assert tokens(tight) == plain
    assert stats.preemptions > 0
    assert 0 < stats.returned_blocks <= stats.offloaded_blocks
    assert stats.host_hit_tokens == 4 * stats.returned_blocks


@every_mode
@pytest.mark.parametrize("family", ["mistral", "qwen3_hybrid", "gemma3_text"])
@pytest.mark.usefixtures("every_copy_pays")
def test_the_last_windows_come_back(saved, family, mode):
    """Of a first turn that others have pushed out of the cache, the second finds what its windows see."""
    directory, _ = saved(family)
    first, others = ids(30), [ids(66, seed=n) for n in range(1, 5)]
    options = dict(block_size=4, num_blocks=100, max_rows=2, max_step_tokens=16, offload_bytes=ROOM)
    with running(mode, directory, **options) as engine:
        history = [*first, *engine.generate([first], greedy())[0].token_ids]
        for other in others:
            engine.generate([other], greedy(4))
        turn = engine.generate([[*history, 7, 8]], greedy())[0]
        stats = settled(engine)
    assert turn.cached_tokens == (len(history) - 1) // 4 * 4
    assert stats.host_hit_tokens > 0 or family == "mistral", "the cache has room for five small samples"
    assert [turn.token_ids] == roomy(directory, [[*history, 7, 8]], greedy())


@every_mode
@pytest.mark.usefixtures("every_copy_pays")
def test_seeded_samples_come_back(mode):
    prompts = [ids(17 + n, seed=n) for n in range(5)]
    params = [SamplingParams(temperature=0.9, seed=n, max_tokens=30, ignore_eos=True, n=1 + n % 2) for n in range(5)]
    with running("sync", block_size=4, prefix_cache=False) as engine:
        plain = [samples_of(output) for output in engine.generate(prompts, params)]
    with running(mode, block_size=4, num_blocks=32, max_step_tokens=40, offload_bytes=ROOM) as engine:
        tight = [samples_of(output) for output in engine.generate(prompts, params)]
        stats = settled(engine)
    assert tight == plain
    assert stats.preemptions > 0
    assert stats.returned_blocks > 0


@every_mode
@pytest.mark.usefixtures("every_copy_pays")
def test_a_second_tier_for_the_prefix_cache(mode):
    """The device's cache holds one of three conversations at a time."""
    talks = [ids(41, seed=n) for n in range(3)]
    with running(mode, block_size=4, num_blocks=20, offload_bytes=ROOM) as engine:
        first = engine.generate(talks[:1], greedy(4))
        engine.generate(talks[1:2], greedy(4))
        engine.generate(talks[2:], greedy(4))
        again = engine.generate(talks[:1], greedy(4))
        stats = settled(engine)
    assert tokens(first) == tokens(again)
    assert again[0].cached_tokens == 40
    assert stats.host_hit_tokens == 40
    assert stats.host_blocks >= 20


@every_mode
@pytest.mark.parametrize("slots", [1, 6])
@pytest.mark.usefixtures("every_copy_pays")
def test_a_host_pool_that_is_too_small(mode, slots):
    """What does not fit is computed again."""
    prompts = [ids(17 + n, seed=n) for n in range(5)]
    plain = roomy("tiny", prompts, greedy())
    with running("sync", block_size=4, num_blocks=2) as engine:
        block_bytes = engine._parts.forward.attention.block_bytes
    options = {"block_size": 4, "num_blocks": 32, "max_step_tokens": 40}
    with running(mode, offload_bytes=slots * block_bytes + 3, **options) as engine:
        tight = engine.generate(prompts, greedy())
        stats = settled(engine)
    assert tokens(tight) == plain
    assert stats.preemptions > 0
    assert stats.offloaded_blocks > stats.host_blocks == slots


@every_mode
@pytest.mark.usefixtures("every_copy_pays")
def test_a16_a17_cancelled_at_every_turn(mode):
    """One of them while its blocks are on their way back, and then again: nobody else notices."""
    talk, other = ids(41), ids(23, seed=9)
    with running(mode, block_size=4, num_blocks=20, offload_bytes=ROOM) as engine:
        expected = [engine.generate([prompt], greedy(6))[0].token_ids for prompt in (talk, other)]
        turns, returned = Turns(engine), 0
        for turn in range(8):
            engine.generate([ids(60, seed=turn + 20)], greedy(4))
            before = engine.stats().returned_blocks
            handles = make_handles(engine, [talk, other], [greedy(6), greedy(6)])
            turns.at(turn, partial(lambda handle, scheduler: scheduler.cancel(handle.sample), handles[0]))
            engine._start(handles)
            victim, mate = (handle.result(PATIENCE) for handle in handles)
            assert mate.token_ids == expected[1], f"turn {turn}"
            assert victim.token_ids == expected[0][: len(victim.token_ids)]
            settled(engine)
            returned += engine.stats().returned_blocks - before
            assert engine.generate([talk], greedy(6))[0].token_ids == expected[0], f"after turn {turn}"
    assert returned > 20


@every_mode
@pytest.mark.parametrize("act", ["reset", "weights", "recompute", "sleep"])
@pytest.mark.usefixtures("every_copy_pays")
def test_f14_what_came_before_is_not_found(mode, act):
    """After a reset, new weights or sleep the host's blocks are as gone as the device's, also while requests run."""
    talk = ids(41)
    with running(mode, block_size=4, num_blocks=20, offload_bytes=ROOM) as engine:
        plain = engine.generate([talk], greedy(6))[0]
        engine.generate([ids(60, seed=1)], greedy(4))
        assert settled(engine).host_blocks > 5
        running_on = engine.submit(ids(30, seed=2), greedy(30))
        if act == "reset":
            engine.reset_prefix_cache()
        elif act == "sleep":
            engine.sleep()
            engine.wake()
        else:
            engine.update_weights(dict(_halved(engine)), recompute=act == "recompute", partial=True)
        again = engine.generate([talk], greedy(6))[0]
        running_on.result(PATIENCE)
        assert again.cached_tokens == 0
        settled(engine)
        engine.generate([ids(60, seed=3)], greedy(4))
        third = engine.generate([talk], greedy(6))[0]
        assert third.cached_tokens == 40, "the host goes on afterwards"
        assert third.token_ids == again.token_ids
        settled(engine)
    assert (again.token_ids == plain.token_ids) == (act in ("reset", "sleep"))


def _halved(engine):
    """Other weights for an engine."""
    model = engine._parts.loaded.model
    for name, shape in model.weight_shapes().items():
        if "down_proj" in name:
            yield name, torch.full(shape, 0.01)


@every_mode
@pytest.mark.usefixtures("every_copy_pays")
def test_random_work_in_a_tiny_cache(mode):
    """Prompts of families, samples of one prompt, priorities, cancels: every output is that of a roomy cache."""
    rng = random.Random(7)
    prompts = [ids(8 + 8 * (n % 3), seed=n % 3) + ids(rng.randint(1, 20), seed=n) for n in range(24)]
    params = [greedy(rng.randint(1, 40), n=rng.choice([1, 1, 3]), priority=rng.randint(0, 2)) for _ in prompts]
    options = {"block_size": 4, "policy": "priority"}
    with running("sync", prefix_cache=False, **options) as engine:
        plain = [samples_of(output) for output in engine.generate(prompts, params)]
    with running(mode, num_blocks=30, max_step_tokens=24, offload_bytes=ROOM, **options) as engine:
        handles = [engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        for handle in handles[::5]:
            handle.cancel()
        outputs = [samples_of(handle.result(60)) for handle in handles]
        stats = settled(engine)
    for number, (output, expected) in enumerate(zip(outputs, plain, strict=True)):
        if number % 5:
            assert output == expected, number
        else:
            assert all(a == b[: len(a)] for a, b in zip(output, expected, strict=True))
    assert stats.preemptions > 0
    assert stats.returned_blocks > 20


class TestWhatPays:
    """The decision, with the times that engines measured."""

    def work(self, mode):
        prompts = [ids(60 + n, seed=n) for n in range(4)]
        options = {"block_size": 16, "num_blocks": 12, "max_step_tokens": 64, "offload_bytes": ROOM}
        with running(mode, **options) as engine:
            for _ in range(6):
                for prompt in prompts:
                    engine.generate([prompt], greedy(4))
            return settled(engine)

    @every_mode
    def test_slow_copies_give_way_to_recomputation(self, mode, monkeypatch):
        """All but those that are tried again, at first soon: of what comes back if copies pay, a quarter at most."""
        save = HostBlocks.save

        def slow(self, blocks, slots):
            time.sleep(0.05 * len(slots))
            save(self, blocks, slots)

        monkeypatch.setattr(HostBlocks, "save", slow)
        monkeypatch.setattr("twostroke.build_host_tier.FIRST_COPIES", 4)
        stats = self.work(mode)
        assert stats.offloaded_blocks > 0
        assert stats.host_hit_tokens < 300

    @every_mode
    def test_slow_steps_give_way_to_copies(self, mode, monkeypatch):
        forward = Decoder.forward

        def slow(self, step, attention):
            time.sleep(0.0005 * len(step.input_ids))
            return forward(self, step, attention)

        monkeypatch.setattr(Decoder, "forward", slow)
        assert self.work(mode).host_hit_tokens > 800


def test_the_host_never_waits_for_a_copy(monkeypatch):
    """While a block is being saved for as long as the test likes, steps go on."""
    gate = threading.Event()
    save = HostBlocks.save
    monkeypatch.setattr(HostBlocks, "save", lambda self, *args: (gate.wait(PATIENCE), save(self, *args)))
    monkeypatch.setattr("twostroke.build_host_tier._warm_up", lambda *args: None)
    with running("async", block_size=4, num_blocks=40, max_step_tokens=16, offload_bytes=ROOM) as engine:
        engine.generate([ids(60)], greedy(2))
        handle = engine.submit(ids(60, seed=1), greedy(40))
        wait_until(lambda: engine.stats().offloaded_blocks > 0)
        before = engine.stats().steps
        wait_until(lambda: engine.stats().steps > before + 3)
        gate.set()
        handle.result(PATIENCE)
        settled(engine)


def test_an_error_of_a_copy_reaches_who_waits(monkeypatch):
    def fail(self, blocks, slots):
        raise OSError("the host is gone")

    monkeypatch.setattr("twostroke.build_host_tier._warm_up", lambda *args: None)
    monkeypatch.setattr(HostBlocks, "save", fail)
    with running("async", block_size=4, num_blocks=20, offload_bytes=ROOM) as engine:
        handles = [engine.submit(ids(60, seed=n), greedy(4)) for n in range(9)]
        with pytest.raises(EngineDead, match="the host is gone"):
            handles[-1].result(PATIENCE)


# -- The memory -------------------------------------------------------------------------------------------------------

LAYERS = [LayerSpec(4, 2, 24, 1.0), LayerSpec(4, 1, 8, 1.0, group=1), LayerSpec(2, 2, 514, 1.0)]


def make_attention(name, dtype):
    if name == "torch":
        return TorchAttention(LAYERS, 9, 3, dtype, torch.device("cpu"))
    pytest.importorskip("triton")
    from twostroke.attention.invariant_triton import InvariantTritonAttention
    from twostroke.attention.triton_backend import TritonAttention

    kind = TritonAttention if name == "triton" else InvariantTritonAttention
    return kind(LAYERS, 9, 3, dtype, torch.device("cpu"))


@pytest.mark.parametrize("name", ["torch", "triton", "invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staged", [1, 3, 100])
def test_blocks_go_to_slots_and_back(name, dtype, staged, monkeypatch):
    """Through staging buffers and slabs of all sizes, runs of neighbours and single slots, other blocks untouched."""
    attention = make_attention(name, dtype)
    monkeypatch.setattr("twostroke.cache.offload.STAGING_BYTES", staged * attention.block_bytes)
    monkeypatch.setattr("twostroke.cache.offload.SLAB_BYTES", 4 * attention.block_bytes)
    host = HostBlocks(attention, 10, attention.block_bytes, CpuDevice().host_buffer, torch.device("cpu"))
    caches = [*attention.keys, *attention.values]
    torch.manual_seed(0)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape))
    before = [cache.clone() for cache in caches]
    host.save(torch.tensor([1, 2, 8, 5, 3, 4], dtype=torch.int32), [2, 3, 4, 9, 0, 1])
    for cache in caches:
        cache[1:] = 7
    host.load([3, 9, 0, 1, 2], torch.tensor([6, 1, 2, 3, 4], dtype=torch.int32))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[0, 6, 1, 2, 3, 4]], old[[0, 2, 5, 3, 4, 1]])
        assert (cache[[5, 7, 8]] == 7).all()
