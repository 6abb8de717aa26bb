"""Pauses while requests run: G11, and the engine's end in the midst of one."""

import threading

import pytest
from engines import running
from maintained import PROMPTS, Slow, begin, every_mode, greedy, results, save_model, tokens_of
from watching import PATIENCE, quiet, wait_until

from twostroke import EngineClosed, EngineDead, FinishReason, InvalidRequest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), 1, tied=False)


@pytest.fixture(scope="module")
def old(model):
    return tokens_of(model)


@every_mode
def test_a07_a_pause_keeps_every_token(mode, model, old):
    with running(mode, model, num_blocks=64) as engine, Slow(engine, seconds=0.05):
        handles = begin(engine)
        for _ in range(3):
            engine.pause()
            steps = engine._parts.scheduler.batch.launched_step
            engine.reset_prefix_cache()
            late = engine.submit(PROMPTS[2], greedy(3))
            assert engine.stats().running == 3
            assert engine._parts.scheduler.batch.committed_step == steps, "a step in flight"
            assert not late.wait(0.02)
            assert engine._parts.scheduler.batch.launched_step == steps
            engine.resume()
            assert late.result(PATIENCE).token_ids == old[2][:3]
        assert results(handles) == old
        quiet(engine)


@every_mode
def test_a_drain_ends_what_has_begun_and_begins_nothing(mode, model, old):
    with running(mode, model, num_blocks=64, max_rows=2) as engine, Slow(engine):
        handles = [engine.stream(prompt, greedy()) for prompt in PROMPTS]
        wait_until(lambda: engine.stats().running == 2)
        engine.pause("drain")
        assert [handle.result(PATIENCE).token_ids for handle in handles[:2]] == old[:2]
        assert (engine.stats().running, engine.stats().waiting) == (0, 1)
        engine.resume()
        assert results(handles) == old
        quiet(engine)


@every_mode
def test_paused_requests_can_be_cancelled_and_time_out(mode, model):
    with running(mode, model, num_blocks=64, max_rows=2) as engine, Slow(engine):
        handles = [engine.stream(prompt, greedy()) for prompt in PROMPTS[:2]]
        wait_until(lambda: engine.stats().running == 2)
        engine.pause()
        late = engine.submit([5], greedy(queue_timeout=0.05))
        assert late.result(PATIENCE).finish_reason == FinishReason.ERROR
        for handle in handles:
            handle.cancel()
            assert handle.result(PATIENCE).finish_reason == FinishReason.CANCELLED
        engine.resume()
        quiet(engine)


@every_mode
def test_a_drain_begins_no_sample_in_the_place_of_one_that_is_cancelled(mode, model, old):
    with running(mode, model, num_blocks=64, max_rows=4) as engine:
        engine.pause("drain")
        handle = engine.submit(PROMPTS[0], greedy(n=3))
        handle.cancel(0)
        other = engine.submit([5], greedy(queue_timeout=0.05))
        assert other.result(PATIENCE).finish_reason == FinishReason.ERROR, "the cancel before it has been done"
        assert (engine.stats().waiting, engine.stats().steps) == (2, 0)
        engine.resume()
        cancelled, *others = handle.result(PATIENCE).outputs
        assert cancelled.finish_reason == FinishReason.CANCELLED
        assert [sample.token_ids for sample in others] == [old[0]] * 2
        quiet(engine)


def test_an_unknown_mode_is_refused_and_resuming_what_runs_does_nothing(model):
    with running("async", model, num_blocks=64) as engine:
        with pytest.raises(InvalidRequest, match="mode='abort' must be 'keep' or 'drain'"):
            engine.pause("abort")
        engine.resume()
        assert len(engine.generate([5], greedy(2))[0].token_ids) == 2


# The engine's end


@pytest.mark.parametrize("end", ["close", "die", "resume"])
def test_a_drain_that_never_ends_is_let_go(model, end):
    """g11: nobody waits for ever: the engine closes, dies, or another thread resumes."""
    with running("async", model, num_blocks=200) as engine:
        outcome = []

        def drain():
            try:
                engine.pause("drain")
                outcome.append(None)
            except (EngineClosed, EngineDead) as error:
                outcome.append(type(error))

        handle = engine.submit([5], greedy(1900))
        wait_until(lambda: engine.stats().running == 1)
        thread = threading.Thread(target=drain)
        thread.start()
        wait_until(lambda: not engine._parts.scheduler.gate.is_open)
        if end == "resume":
            engine.resume()
        elif end == "close":
            engine.close()
        else:
            engine._life.inbox.put(lambda scheduler: 1 / 0)
        thread.join(PATIENCE)
        assert outcome == [{"close": EngineClosed, "die": EngineDead, "resume": None}[end]]
        handle.cancel()
    for call in (engine.pause, engine.resume, engine.sleep, lambda: engine.update_weights(model)):
        with pytest.raises((EngineClosed, EngineDead)):
            call()


def test_a_paused_and_a_sleeping_engine_close_at_once(model):
    for stop in ("pause", "sleep"):
        with running("async", model, num_blocks=64) as engine:
            handle = engine.submit([5], greedy(2000))
            getattr(engine, stop)()
        assert handle.result(PATIENCE).finish_reason == FinishReason.CANCELLED
