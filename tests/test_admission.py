"""Who is let into the queue, and how long they may stay there."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import MODES, running
from watching import PATIENCE, quiet, wait_until

from twostroke import EngineClosed, FinishReason, InvalidRequest, QueueFull, SamplingParams
from twostroke.inbox import Inbox


def greedy(max_tokens, **others):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


class Stopped:
    """Holds the loop between two steps for as long as the context lasts."""

    def __init__(self, engine):
        self._inbox, self._go, self._there = engine._life.inbox, threading.Event(), threading.Event()

    def __enter__(self):
        self._inbox.put(self._wait)
        assert self._there.wait(PATIENCE)

    def __exit__(self, *exc):
        self._go.set()

    def _wait(self, scheduler):
        self._there.set()
        assert self._go.wait(PATIENCE)


# The queue's limit


@pytest.mark.parametrize("mode", MODES)
def test_more_than_max_waiting_are_refused_and_the_others_are_untouched(mode):
    with running(mode, num_blocks=32, max_rows=1, max_waiting=3) as engine:
        expected = engine.generate([5, 6], greedy(6))[0].token_ids
        with Stopped(engine):
            handles = [engine.submit([5, 6], greedy(6)) for _ in range(3)]
            with pytest.raises(QueueFull, match="max_waiting=3: 3 wait to begin, there is no room for 1 more"):
                engine.submit([5, 6], greedy(6), request_id="late")
        assert [handle.result(PATIENCE).token_ids for handle in handles] == [expected] * 3
        assert engine.submit([5, 6], greedy(6), request_id="late").result(PATIENCE).token_ids == expected
        quiet(engine)


def test_a_call_that_does_not_fit_starts_nothing():
    with running("async", num_blocks=32, max_waiting=3) as engine:
        with pytest.raises(QueueFull):
            engine.generate([[5]] * 4, greedy(2))
        assert len(engine.generate([[5]] * 3, greedy(2))) == 3
        with Stopped(engine):
            first = engine.submit([5], greedy(2), request_id="a")
            with pytest.raises(InvalidRequest, match="in use"):
                engine.submit([5], greedy(2), request_id="a")
        first.result(PATIENCE)
        assert len(engine.generate([[5]] * 3, greedy(2))) == 3, "a refused request was counted in"
        quiet(engine)


def test_who_runs_or_has_ended_waits_no_longer():
    with running("async", num_blocks=64, max_rows=2, max_waiting=2) as engine:
        runs = [engine.submit([5], greedy(400)) for _ in range(2)]
        wait_until(lambda: engine.stats().running == 2)
        waits = [engine.submit([5], greedy(2)) for _ in range(2)]
        with pytest.raises(QueueFull):
            engine.submit([5], greedy(2))
        waits[0].cancel()
        waits[0].result(PATIENCE)
        again = engine.submit([5], greedy(2))
        for handle in runs:
            handle.cancel()
        assert all(len(handle.result(PATIENCE).token_ids) == 2 for handle in (waits[1], again))
        quiet(engine)


def test_many_threads_never_overfill_the_queue():
    with running("async", num_blocks=32, max_rows=1, max_waiting=5) as engine:

        def submit(number):
            try:
                return engine.submit([5], greedy(2))
            except QueueFull:
                return None

        with Stopped(engine), ThreadPoolExecutor(8) as pool:
            taken = [handle for handle in pool.map(submit, range(40)) if handle]
        assert len(taken) == 5
        assert all(len(handle.result(PATIENCE).token_ids) == 2 for handle in taken)


# The queue's time-out


@pytest.mark.parametrize("mode", MODES)
def test_who_waits_too_long_ends_with_an_error_that_names_the_parameter(mode):
    with running(mode, num_blocks=64, max_rows=1) as engine:
        first = engine.submit([5], greedy(600))
        wait_until(lambda: engine.stats().running == 1)
        late = engine.submit([6, 7], greedy(3, queue_timeout=0.05))
        patient = engine.submit([6, 7], greedy(3, queue_timeout=1000))
        output = late.result(PATIENCE)
        assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, [])
        assert output.error == "queue_timeout=0.05 s went by before it could begin to run"
        assert not first.done
        first.cancel()
        assert len(patient.result(PATIENCE).token_ids) == 3
        quiet(engine)


def test_a_request_that_runs_in_time_is_left_alone():
    with running("async", num_blocks=64) as engine:
        output = engine.submit([5], greedy(300, queue_timeout=0.02)).result(PATIENCE)
        assert (output.finish_reason, len(output.token_ids)) == (FinishReason.LENGTH, 300)


def test_a_timeout_that_lies_far_ahead_keeps_no_sample_alive():
    with running("async", num_blocks=64) as engine:
        handle = engine.submit([5], greedy(2, queue_timeout=1000))
        handle.result(PATIENCE)
        sample = weakref.ref(handle.samples[0])
        del handle
        engine.generate([[6], [7]], greedy(2))  # delivery lets go of one work with the next
        quiet(engine)
        wait_until(lambda: gc.collect() is not None and sample() is None)


def test_an_engine_with_timeouts_ahead_closes_at_once():
    with running("async", num_blocks=64, max_rows=1) as engine:
        handles = [engine.submit([5], greedy(500, queue_timeout=1000)) for _ in range(3)]
    assert {handle.result(0).finish_reason for handle in handles} == {FinishReason.CANCELLED}
    with pytest.raises(EngineClosed):
        engine.submit([5], greedy(2, queue_timeout=1000))


def test_the_inbox_takes_a_timed_command_when_it_is_due_and_never_once_closed():
    inbox = Inbox()
    inbox.put_at(1e12, "far ahead")
    inbox.put_at(0.0, "due")
    inbox.put("at once")
    assert inbox.take(block=True) == ["at once", "due"]
    assert inbox.take(block=False) == []
    inbox.close(EngineClosed("closed"))
    assert inbox.take(block=True) == []
    assert not inbox.open
