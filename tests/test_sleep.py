"""Sleep while requests wait: G11, G09; weights and cache go, and come back."""

import signal
import threading
import weakref

import pytest
import torch
from engines import running
from maintained import PROMPTS, Slow, begin, every_mode, greedy, results, tokens_of
from watching import PATIENCE, quiet

from twostroke import EngineAsleep, EngineClosed, FinishReason, NotEnoughMemory, maintenance
from twostroke.device import put_away
from twostroke.device.put_away import PutAway


class Held:
    """Holds the first step of an engine until it `goes_on`."""

    def __init__(self, engine):
        self._model, self._forward = engine.model, engine.model.forward
        self.began, self.goes_on = threading.Event(), threading.Event()

    def __enter__(self):
        self._model.forward = self._wait
        return self

    def __exit__(self, *exc):
        self.goes_on.set()
        del self._model.forward

    def _wait(self, step, attention):
        self.began.set()
        self.goes_on.wait()
        return self._forward(step, attention)


@pytest.fixture(scope="module")
def old(models):
    return tokens_of(models[0])


@every_mode
def test_g11_a_sleep_changes_nobody_s_tokens(mode, models, old):
    with running(mode, models[0], num_blocks=64) as engine, Slow(engine):
        handles = begin(engine)
        engine.sleep()
        engine.sleep()
        attention = engine._parts.forward.attention
        assert attention.keys == attention.values == []
        assert (engine.stats().running, engine.stats().waiting, engine.stats().cached_blocks) == (0, 3, 0)
        handles.append(engine.submit(PROMPTS[0], greedy()))
        with pytest.raises(EngineAsleep, match="sleeps"):
            engine.update_weights(models[1])
        with pytest.raises(EngineAsleep, match="sleeps"):
            engine.pause("drain")
        assert not engine.stats().paused
        engine.resume()
        assert not handles[-1].wait(0.02), "a sleeping engine was woken by resume"
        engine.wake()
        engine.wake()
        assert results(handles) == [*old, old[0]]
        assert [handle.result().preemptions for handle in handles] == [1, 1, 1, 0]
        quiet(engine)


@every_mode
def test_a_sleeping_engine_in_which_nothing_has_begun_has_drained(mode, models, old):
    with running(mode, models[0], num_blocks=64) as engine:
        engine.sleep()
        handle = engine.submit(PROMPTS[0], greedy())
        engine.pause("drain")
        engine.wake()
        assert not handle.wait(0.02), "a drain was ended by wake"
        engine.resume()
        assert results([handle]) == old[:1]


def test_a_sleep_that_was_interrupted_can_be_undone(models, old):
    """Ctrl-C while the caller waits for the step that runs: nothing is put away, but nothing is planned either."""
    with running("async", models[0], num_blocks=64) as engine, Held(engine) as held:
        handle = engine.submit(PROMPTS[0], greedy())
        assert held.began.wait(PATIENCE)
        threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            engine.sleep()
        held.goes_on.set()
        engine.wake()
        assert handle.result(PATIENCE).token_ids == old[0]
        quiet(engine)


def test_a_pause_outlives_a_sleep(models, old):
    with running("async", models[0], num_blocks=64) as engine:
        engine.pause()
        engine.sleep()
        handle = engine.submit(PROMPTS[0], greedy())
        engine.wake()
        assert not handle.wait(0.02)
        engine.resume()
        assert handle.result(PATIENCE).token_ids == old[0]


def test_g09_memory_that_is_gone_is_an_error_with_numbers_and_waking_can_be_tried_again(models, old, monkeypatch):
    with running("async", models[0], num_blocks=64) as engine:
        handle = engine.submit(PROMPTS[0], greedy())
        engine.sleep()
        for room, failing in ((10, None), (1 << 40, "allocate")):
            with monkeypatch.context() as patch:
                patch.setattr(put_away, "free_bytes", lambda device, room=room: room)
                if failing:
                    patch.setattr(engine._parts.forward.attention, failing, _out_of_memory)
                with pytest.raises(NotEnoughMemory, match=r"weights and cache need \d+ bytes"):
                    engine.wake()
        assert not handle.done
        engine.wake()
        assert handle.result(PATIENCE).token_ids == old[0]


@every_mode
def test_closing_a_sleeping_engine_frees_what_it_put_away(mode, models, monkeypatch, no_collection):
    """Whoever still holds the engine. As on another kind of device than the CPU, whose weights stay where they are."""
    kept = []

    def put_elsewhere(device, tensors):
        away = PutAway(Elsewhere(), tensors)
        kept.extend((weakref.ref(away), *map(weakref.ref, away._copies)))
        return away

    monkeypatch.setattr(maintenance, "PutAway", put_elsewhere)
    with running(mode, models[0], num_blocks=64) as engine:
        handle = engine.submit(PROMPTS[0], greedy())
        engine.sleep()
        assert len(kept) > 1
        assert all(reference() is not None for reference in kept)
    assert not any(reference() is not None for reference in kept)
    assert handle.result(PATIENCE).finish_reason == FinishReason.CANCELLED
    with pytest.raises(EngineClosed):
        engine.update_weights(models[1])


def _out_of_memory():
    raise RuntimeError("out of memory")


class Elsewhere:
    """Another kind of device than the CPU; here its memory is the host's."""

    torch_device = torch.device("meta")


def test_weights_go_and_come_back_behind_the_same_tensors():
    whole = torch.arange(12.0).view(3, 4)
    part, other = whole[1:2], torch.ones(5)

    class Cache:
        nbytes = 0

        def allocate(self):
            pass

    away = PutAway(Elsewhere(), [whole, part, other])
    away.free()
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    away.bring_back(Cache())
    assert part.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    assert (whole.sum(), other.sum()) == (66.0, 5.0)
    whole[1] = 0
    assert part.tolist() == [[0.0] * 4]
